"""Has Inductor make once what kernels of their own and others read.

A kernel of its own asks for its operands as buffers. Where it reads a pointwise result through a view, or in strides that suit
it, as an attention reads its mask, Inductor makes that view: anew for each such kernel, as many masks as layers, all written by
one call where the first is needed. All others compute the result from what *it* reads, which lives on for them.

Before: mask -> attention, once for each layer. After: the same nodes, with ``mask`` marked to be made.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autoremat.ops.op_traits import is_view, kind_of, packet
from autoremat.ops.work import ATTENTION, ATTENTION_BACKWARD
from autoremat.planner.graph.graph import Kind

MARK = "inductor_realize_to_strides"
"""The key of a node's metadata by which Inductor makes its result, with the strides that it was traced with."""


def materialize_shared(module: fx.GraphModule) -> None:
    """Mark what two attentions or more read, and what a kernel of its own reads through a view beside other readers."""
    for node in module.graph.nodes:
        if node.op == "call_function" and kind_of(node) is Kind.POINTWISE:
            readers = dict(_readers(node, seen_through=False))
            attentions = sum(packet(reader) in ATTENTION | ATTENTION_BACKWARD for reader in readers)
            viewed = any(through and kind_of(reader) is Kind.EXTERN for reader, through in readers.items())
            if attentions > 1 or (viewed and len(readers) > 1):
                node.meta[MARK] = True


def _readers(node: fx.Node, seen_through: bool) -> Iterator[tuple[fx.Node, bool]]:
    """The calls that read the node's result, and whether they read it through a view."""
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield from _readers(user, True)
        elif user.op == "call_function":
            yield user, seen_through
