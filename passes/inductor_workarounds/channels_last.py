"""Makes Inductor materialise the operands of a convolution's gradient as channels-last at once.

Inductor materialises these operands in their traced layout, and copies them into the layout in which it computes the gradient.
A recomputed operand may lack even the traced layout. Inductor then copies a concatenation of saved and recomputed images twice.
This pass states the final layout in the FX graph just before Inductor lowers it. It is for torch 2.13 and later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoremat.ops.op_traits import facts, is_view
from autoremat.torch_private.inductor_lowering import chooses_layouts_of_gradients

aten = torch.ops.aten


def state_channels_last(half: fx.GraphModule) -> int:
    """Marks the operands of a convolution's gradient as channels-last if the gradient has that layout. Returns their number.

    Inductor chooses these layouts since torch 2.13; for earlier versions the graph stays as it is.
    """
    marked = 0
    if not chooses_layouts_of_gradients():
        return marked
    for node in half.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        results = node.meta.get("val") or ()
        if not any(map(_is_channels_last_only, results[:2])):
            continue
        for operand in node.args[:2]:
            if _is_image(operand.meta.get("val")) and _has_free_layout(operand):
                operand.meta["val"] = operand.meta["val"].contiguous(memory_format=torch.channels_last)
                marked += 1
    return marked


def _is_image(traced: Any) -> bool:
    """Returns True for a traced tensor of four dimensions with known sizes."""
    return isinstance(traced, torch.Tensor) and traced.dim() == 4 and all(isinstance(size, int) for size in traced.shape)


def _is_channels_last_only(traced: Any) -> bool:
    """Returns True for images that are channels-last and not also contiguous."""
    return _is_image(traced) and traced.is_contiguous(memory_format=torch.channels_last) and not traced.is_contiguous()


def _has_free_layout(node: fx.Node) -> bool:
    """Returns True if Inductor chooses the layout of the result, and no user reads the result by its strides."""
    free = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and not is_view(node)
    return free and all(
        user.op == "call_function" and isinstance(user.target, torch._ops.OpOverload) and not facts(user).by_strides
        for user in node.users
    )
