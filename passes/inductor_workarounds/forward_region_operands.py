"""Reads operands of a region directly where the region merely hands them back.

The forward of a nested compile region returns what its backward needs, also operands. Read through the region's results,
such an operand would keep the whole region from being left out of the backward.

         r = region(x, w) ── r[2], which is w ── backward            becomes            w ── backward
"""

from __future__ import annotations

import operator

from torch import fx

from autoremat.torch_private import higher_order


def forward_region_operands(joint: fx.GraphModule) -> None:
    """Replace results of calls that are their operands by these, in place."""
    for node in list(joint.graph.nodes):
        operands = higher_order.returned_operands(node) if node.op == "call_function" else {}
        for user in list(node.users) if operands else []:
            operand = operands.get(user.args[1]) if user.target is operator.getitem else None
            if operand is not None:
                user.replace_all_uses_with(operand)
                joint.graph.erase_node(user)
