"""Holds a graph as arrays of numbers, for the simulator's innermost loop."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

KINDS = (Kind.POINTWISE, Kind.REDUCTION, Kind.EXTERN)
POINTWISE, REDUCTION, EXTERN = range(3)


class ValuesOfOps:
    """Some values of each op, concatenated into one array."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.counts = np.array([len(row) for row in rows], dtype=np.int64)
        self.begins = np.cumsum(self.counts) - self.counts
        self.values = np.array([value for row in rows for value in row], dtype=np.int64)

    def of(self, ops: Numbers) -> tuple[Numbers, Numbers]:
        """Returns two arrays: the values of ``ops`` in sequence, preceded by the position in ``ops`` that each value belongs
        to.
        """
        counts = self.counts[ops]
        positions = np.repeat(np.arange(len(ops)), counts)
        within = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts)
        return positions, self.values[self.begins[ops][positions] + within]


class GraphArrays:
    """The facts about ``graph`` that the simulator reads, as arrays or lists with an entry for each op or value."""

    def __init__(self, graph: Graph) -> None:
        ops, values = graph.ops, graph.values
        self.inputs, self.outputs = ValuesOfOps(graph.computed_inputs), ValuesOfOps(graph.made)
        """The inputs of each op that some op computes, and its outputs."""
        self.given = [tuple(-1 - v for v in op.inputs if values[v].producer is None) for op in ops]
        """The inputs of each op that no op computes (inputs of the step and tangents), as negative numbers: -1 - value."""
        self.kinds: Numbers = np.array([KINDS.index(op.kind) for op in ops], dtype=np.int64)
        """``POINTWISE``, ``REDUCTION`` or ``EXTERN``."""
        self.in_place: Flags = np.array([bool(op.in_place) for op in ops], dtype=np.bool_)
        """True if the op's result may reuse the buffer of an input."""
        self.never_inlined: Flags = np.array([op.inlining is Inlining.NEVER for op in ops], dtype=np.bool_)
        self.inlined_once = [op.inlining is Inlining.ONCE for op in ops]
        self.value_bytes: Numbers = np.array([value.bytes for value in values], dtype=np.int64)
        self.workspace_bytes: Numbers = np.array([op.workspace_bytes for op in ops], dtype=np.int64)


def arrays_of(graph: Graph) -> GraphArrays:
    """Returns the arrays of ``graph``, built once per graph."""
    return graph.derived(GraphArrays)
