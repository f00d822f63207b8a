"""Drops reads that would keep tensors for the backward, or keep ops from running again, although the result needs neither."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autoremat.torch_private import higher_order


def forward_region_operands(joint: fx.GraphModule) -> int:
    """Reads operands of a nested compile region directly where the region returns them unchanged. Returns their number.

    The forward of such a region returns all tensors that its backward needs, operands included. If an operand is read through
    the region's results, the backward cannot omit the region.

         r = region(x, w) ── r[2], which is w ── backward            becomes            w ── backward
    """
    replaced = 0
    for node in list(joint.graph.nodes):
        operands = higher_order.returned_operands(node) if node.op == "call_function" else {}
        for user in list(node.users) if operands else []:
            operand = operands.get(user.args[1]) if user.target is operator.getitem else None
            if operand is not None:
                user.replace_all_uses_with(operand)
                joint.graph.erase_node(user)
                replaced += 1
    return replaced


aten = torch.ops.aten

AVERAGES = slice(3, 5)
"""Positions of the running averages among the arguments."""
IS_TRAINING = 7
"""Position of the argument that is True in training."""


def ignore_running_averages(module: fx.GraphModule) -> int:
    """Drops the running averages from gradients of batch norms in training, which do not depend on them.

    A backward that names them would keep the new averages of every batch norm for it. What names them cannot run again either,
    because the step overwrites them. Returns the number of rewritten calls.
    """
    rewrites = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[IS_TRAINING] is True and node.args[AVERAGES] != (None, None):
            node.args = (*node.args[: AVERAGES.start], None, None, *node.args[AVERAGES.stop :])
            rewrites += 1
    return rewrites
