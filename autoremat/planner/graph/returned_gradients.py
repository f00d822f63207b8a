"""Finds the gradients of the backward that nothing reads, such as those of weights. They may run earlier or later."""

from __future__ import annotations

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import PASSED_BY_NONE, Kind

Gradients = dict[int, frozenset[int]]
"""Ops that compute gradients, and for each of them the ops that cast its results before they are returned."""


def returned_gradients(graph: Graph) -> Gradients:
    """Returns the extern kernels of the backward whose results nothing reads but casts, and which are returned then."""
    found = Gradients()
    for index in range(graph.num_forward, len(graph.ops)):
        op = graph.ops[index]
        if op.kind is Kind.EXTERN and op.outputs and not op.traits & PASSED_BY_NONE:
            casts, values = set[int](), list(op.outputs)
            while values and _is_returned(graph, values[-1]):
                value = values.pop()
                casts.update(graph.readers[value])
                values += [made for reader in graph.readers[value] for made in graph.made[reader]]
            if not values:
                found[index] = frozenset(casts)
    return found


def _is_returned(graph: Graph, value: int) -> bool:
    """Returns True if a value of the backward is returned, or if only pointwise ops read it that read nothing else."""
    readers = [graph.ops[index] for index in graph.readers[value]]
    if not readers:
        return value in graph.backward_outputs
    are_casts = all(op.kind is Kind.POINTWISE and not op.traits & PASSED_BY_NONE for op in readers)
    return are_casts and all(graph.computed_inputs[index] == (value,) for index in graph.readers[value])
