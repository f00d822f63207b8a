"""Has Inductor make once what several attentions read: their mask.

An attention asks for its mask in strides that suit it. If that is pointwise and not made by then, Inductor makes it in those
strides, anew for each attention: as many masks as layers, all written by one call where the first is needed.

Before: mask -> attention, once for each layer. After: the same nodes, with ``mask`` marked to be made.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autoremat.graph import Kind
from autoremat.op_rules import is_view, kind_of, packet
from autoremat.op_work import ATTENTION, ATTENTION_BACKWARD

MARK = "inductor_realize_to_strides"
"""The key of a node's metadata by which Inductor makes its result, with the strides that it was traced with."""


def make_once(module: fx.GraphModule) -> None:
    """Mark what two attentions or more read."""
    for node in module.graph.nodes:
        if node.op == "call_function" and kind_of(node) is Kind.POINTWISE and len(set(_attentions(node))) > 1:
            node.meta[MARK] = True


def _attentions(node: fx.Node) -> Iterator[fx.Node]:
    """The attentions that read the node's result or a view of it."""
    for user in node.users:
        if packet(user) in ATTENTION | ATTENTION_BACKWARD:
            yield user
        elif user.op == "call_function" and is_view(user):
            yield from _attentions(user)
