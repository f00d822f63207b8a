"""Layouts that Inductor chooses: inputs, results, stored tensors and operands of attention keep those with which they were
traced."""

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from autoremat.torch_private.hooks import Method, hooked


@contextlib.contextmanager
def laid_out_as_planned(ops: Collection[torch._ops.OpOverload]) -> Iterator[None]:
    """Keeps Inductor to the layouts that a plan counts: those with which tensors were traced.

    ``ops`` copy saved tensors to the host.
    """
    from torch._inductor import compile_fx, ir
    from torch._inductor.graph import GraphLowering

    with (
        hooked(GraphLowering, "run_node", partial(_lower_node, ops)),
        hooked(compile_fx, "fake_tensor_prop", _derive_as_traced),
        hooked(ir, "is_aligned_realized_tensor", _is_aligned),
    ):
        yield


def _lower_node(ops: Collection[torch._ops.OpOverload], lower: Method, lowering: Any, node: fx.Node) -> Any:
    """Tells Inductor by the users of a node which layout to choose.

    The operands of ``ops`` are laid out as tensors that the graph returns: as traced, which readers get along with. Inductor's
    own choice may not be one that attention can read. Nor are the operands padded, because a plan counts their bytes. A result
    of ``ops`` has the layout of its operand. Inductor would copy it into the traced one by a kernel of the host, which waits
    for no stream.

    Inputs of which the graph makes copies channels-last are returned as they are. Inductor would return copies in that layout
    too, which the backward would hold beside the inputs.
    """
    users, output = dict(node.users), lowering.module.graph.output_node()
    if node.target in ops or (node.op == "placeholder" and any(map(copies_to_channels_last, users))):
        node.users.pop(output, None)
    elif any(user.target in ops for user in users):
        node.users[output] = None
        node.meta["dislike_padding"] = True
    try:
        return lower(lowering, node)
    finally:
        node.users.clear()
        node.users.update(users)


LAYOUT_COPY = "autoremat_layout_copy"
"""Key of ``node.meta`` for the copies to channels-last that the passes state and the model does not make."""


def copies_to_channels_last(node: fx.Node) -> bool:
    """Returns True for a call that copies images, or weights for images, to channels-last."""
    return node.target is torch.ops.aten.clone.default and node.kwargs.get("memory_format") is torch.channels_last


def _derive_as_traced(derive: Method, module: fx.GraphModule, *arguments: Any) -> Any:
    """Derives the layouts of results as if the passes stated no copies to channels-last.

    The results of a convolution of such copies would be channels-last. But callers, and readers by strides, expect them as
    traced.
    """
    stated = {node: node.kwargs for node in module.graph.nodes if LAYOUT_COPY in node.meta and node.op == "call_function"}
    for node, kwargs in stated.items():
        node.kwargs = {**kwargs, "memory_format": torch.preserve_format}
    try:
        mode = derive(module, *arguments)
    finally:
        for node, kwargs in stated.items():
            node.kwargs = kwargs
    for node in stated:
        node.meta["val"] = node.meta["val"].contiguous(memory_format=torch.channels_last)
    return mode


def _is_aligned(found: Method, tensor: Any, alignment: int) -> bool:
    """Gives the operands of fused attention the traced sequence of dimensions, where Inductor is still free to choose.

    Inductor takes such an operand for contiguous and leaves it as it is. What it chooses later may have a last dimension that
    is not dense, and the kernels refuse that (torch 2.15 and earlier).
    """
    from torch._inductor import ir

    is_open = isinstance(tensor, ir.IRNode) and isinstance(tensor.maybe_get_layout(), ir.FlexibleLayout)
    return not is_open and bool(found(tensor, alignment))
