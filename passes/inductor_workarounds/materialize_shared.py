"""Makes Inductor materialise once a pointwise result that several extern kernels, or extern kernels and others, read.

An extern kernel needs its operands as buffers. It may read a pointwise result through a view or in strides of its own choice,
as an attention reads its mask. Inductor then materialises that view anew for each such kernel: as many masks as layers, all
written by one kernel before the first use. Other readers recompute the result from its own operands, which stay live for them.

Before: mask -> attention, once for each layer. After: the same nodes, with ``mask`` marked to be materialised. The pass applies
to all supported versions of torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autoremat.ops.op_traits import MATERIALIZED, facts, is_view, kind_of
from autoremat.planner.graph.op import Kind


def materialize_shared(half: fx.GraphModule) -> int:
    """Marks pointwise results that several attentions read, or that an extern kernel reads through a view beside other readers.

    Returns their number.
    """
    marked = 0
    for node in half.graph.nodes:
        if node.op == "call_function" and kind_of(node) is Kind.POINTWISE:
            readers = dict(_readers(node, seen_through=False))
            attentions = sum(facts(reader).is_attention for reader in readers)
            viewed = any(through and kind_of(reader) is Kind.EXTERN for reader, through in readers.items())
            if attentions > 1 or (viewed and len(readers) > 1):
                node.meta[MATERIALIZED] = True
                marked += 1
    return marked


def _readers(node: fx.Node, seen_through: bool) -> Iterator[tuple[fx.Node, bool]]:
    """Yields the calls that read the node's result, with True if they read it through a view."""
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield from _readers(user, True)
        elif user.op == "call_function":
            yield user, seen_through
