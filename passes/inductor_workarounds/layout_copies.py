"""States the copies of images and weights that Inductor makes for convolutions, so that the planner sees them.

Inductor runs convolutions of images channels-last on a CPU. In the forward, it copies inputs that lie otherwise into that
layout, and it saves the copies for the backward. As ops of the joint graph, the copies are planned: a budget may have them made
again from the inputs.

Before:

    result                      = convolution(image, weight)
    for_image, for_weight, _    = convolution_backward(gradient, image, weight)

After, if the weight is an input that is not channels-last:

    weight_laid                 = clone(weight, memory_format=channels_last)
    result                      = convolution(image, weight_laid)
    for_image, for_weight, _    = convolution_backward(gradient, image, weight_laid)

Results keep the layouts with which they were traced (:func:`.results_as_traced`): callers of the forward rely on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoremat.passes.building import Builder
from autoremat.torch_private.layouts import LAYOUT_COPY
from autoremat.torch_private.symbolic_sizes import size_hint

aten = torch.ops.aten

OPERANDS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (1, 2)}
"""Positions of image and weight among the arguments."""

CHANNELS_LAST = (0, 2, 3, 1)
"""The dimensions in their sequence in memory: images, rows, columns, channels."""


def state_layout_copies(joint: fx.GraphModule) -> int:
    """Makes convolutions and their gradients read such copies in ``joint``, a joint graph for Inductor on a CPU. Returns the
    number of copies."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        for position in OPERANDS.get(node.target, ()):
            operand = node.args[position]
            if node.target is aten.convolution.default and operand not in copies and _is_copied(operand):
                copies[operand] = _copy_before(node, operand)
            if operand in copies:
                node.update_arg(position, copies[operand])
    return len(copies)


def _copy_before(convolution: fx.Node, operand: fx.Node) -> fx.Node:
    with convolution.graph.inserting_before(convolution):
        layout = {"memory_format": torch.channels_last}
        copy = Builder.beside(operand).make(convolution, aten.clone.default, (operand,), layout, operand.name)
    copy.meta[LAYOUT_COPY] = True
    for key in ("recompute", "original_aten"):  # what the model or the options order for the convolution is not for the copy
        copy.meta.pop(key, None)
    return copy


def _is_copied(operand: Any) -> bool:
    traced = operand.meta.get("val") if isinstance(operand, fx.Node) and operand.op == "placeholder" else None
    if not isinstance(traced, torch.Tensor) or traced.layout != torch.strided or traced.dim() != 4:
        return False
    # Hints are compared, because comparisons of symbolic numbers would add guards.
    pairs = [(size_hint(traced.shape[dim]), size_hint(traced.stride()[dim])) for dim in CHANNELS_LAST]
    strides = [stride for size, stride in pairs if size > 1]
    return strides != sorted(strides, reverse=True)
