"""Layouts that Inductor chooses: inputs, results, stored tensors and operands of attention keep those with which they were
traced."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from autoremat.torch_private.hooks import Method, hooked


@contextlib.contextmanager
def laid_out_as_saved(ops: Collection[torch._ops.OpOverload]) -> Iterator[None]:
    """Makes Inductor lay out the operands of ``ops`` as tensors that the graph returns, and keep results as they are.

    The layout of what a graph returns is the traced one, and readers get along with it. Any other layout is Inductor's own
    choice, and may not be one that attention can read. Nor are the operands padded, because a plan counts their bytes. A
    result of ``ops`` has the layout of its operand. Inductor would copy it into the traced one by a kernel of the host, which
    waits for no stream.
    """
    from torch._inductor.graph import GraphLowering

    def lower_node(lower: Method, lowering: Any, node: fx.Node) -> Any:
        output = lowering.module.graph.output_node()
        with _restored_users(node):
            if node.target in ops:
                node.users.pop(output, None)
            elif any(user.target in ops for user in node.users):
                node.users[output] = None
                node.meta["dislike_padding"] = True
            return lower(lowering, node)

    with hooked(GraphLowering, "run_node", lower_node):
        yield


@contextlib.contextmanager
def _restored_users(node: fx.Node) -> Iterator[None]:
    """Gives a node its users back at the end of the body, which may change them to tell Inductor which layout to choose."""
    users = dict(node.users)
    try:
        yield
    finally:
        node.users.clear()
        node.users.update(users)


LAYOUT_COPY = "autoremat_layout_copy"
"""Key of ``node.meta`` for the copies to channels-last that the passes state and the model does not make."""


def copies_to_channels_last(node: fx.Node) -> bool:
    """Returns True for a call that copies images, or weights for images, to channels-last."""
    return node.target is torch.ops.aten.clone.default and node.kwargs.get("memory_format") is torch.channels_last


@contextlib.contextmanager
def inputs_as_they_are() -> Iterator[None]:
    """Makes a graph return inputs as they are, if it copies them to channels-last.

    Inductor would return copies of them in that layout too. The backward would hold these beside the inputs.
    """
    from torch._inductor.graph import GraphLowering

    def lower_node(lower: Method, lowering: Any, node: fx.Node) -> Any:
        if node.op != "placeholder" or not any(map(copies_to_channels_last, node.users)):
            return lower(lowering, node)
        with _restored_users(node):
            node.users.pop(lowering.module.graph.output_node(), None)
            return lower(lowering, node)

    with hooked(GraphLowering, "run_node", lower_node):
        yield


@contextlib.contextmanager
def results_as_traced() -> Iterator[None]:
    """Makes Inductor derive the layouts of results as if the passes stated no copies to channels-last.

    The results of a convolution of such copies would be channels-last. But callers, and readers by strides, expect them as
    traced.
    """
    from torch._inductor import compile_fx

    def derive_as_traced(derive: Method, module: fx.GraphModule, *arguments: Any) -> Any:
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

    with hooked(compile_fx, "fake_tensor_prop", derive_as_traced):
        yield


@contextlib.contextmanager
def attention_as_traced() -> Iterator[None]:
    """Makes Inductor give the operands of fused attention the traced sequence of dimensions, where it is still free to choose.

    Inductor takes such an operand for contiguous and leaves it as it is. What it chooses later may have a last dimension that
    is not dense, and the kernels refuse that (torch 2.15 and earlier).
    """
    from torch._inductor import ir

    def is_aligned(found: Method, tensor: Any, alignment: int) -> bool:
        is_open = isinstance(tensor, ir.IRNode) and isinstance(tensor.maybe_get_layout(), ir.FlexibleLayout)
        return not is_open and bool(found(tensor, alignment))

    with hooked(ir, "is_aligned_realized_tensor", is_aligned):
        yield
