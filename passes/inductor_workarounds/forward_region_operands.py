"""Reads operands of a nested compile region directly where the region returns them unchanged.

The forward of such a region returns all tensors that its backward needs, operands included. If an operand is read through the
region's results, the backward cannot omit the region. The pass applies to all supported versions of torch.

         r = region(x, w) ── r[2], which is w ── backward            becomes            w ── backward
"""

from __future__ import annotations

import operator

from torch import fx

from autoremat.torch_private import higher_order


def forward_region_operands(joint: fx.GraphModule) -> int:
    """Replaces results of region calls that are operands by these operands, in place, and returns their number."""
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
