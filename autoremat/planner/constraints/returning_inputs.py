"""Keeps values out of the saved ones that follow from inputs alone which come back by themselves for the backward.

Sharded data parallelism (``fully_shard``) frees the gathered parameters after the forward and gathers them again for the
backward. A saved parameter therefore takes no memory. A saved copy of it does: a cast or a transposed copy holds the
whole weight on every rank, for all layers, which is the memory that sharding is to save. To compute the copy again takes one
pass over the weight.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint


def without_saved_copies(graph: Graph, returning: Collection[int]) -> Graph:
    """Returns ``graph`` with the constraint to recompute whatever follows from the inputs ``returning`` alone.

    Constraints of the model stay. Arithmetic that counts FLOPs, such as a product of two weights, is left to the search. So are
    results that the forward returns, which the caller holds anyway.
    """
    derived, held = set(returning), set(graph.forward_outputs)
    ops = list(graph.ops)
    for number, op in enumerate(graph.ops[: graph.num_forward]):
        if not op.inputs or op.flops or not op.rematerializable or not derived.issuperset(op.inputs):
            continue
        derived.update(op.outputs)
        if op.constraint is Constraint.NONE and held.isdisjoint(op.outputs):
            ops[number] = replace(op, constraint=Constraint.RECOMPUTE)
    return replace(graph, ops=tuple(ops))
