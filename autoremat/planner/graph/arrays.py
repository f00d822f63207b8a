"""Holds a graph as arrays of numbers, for the simulator's innermost loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.graph import Graph

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

KINDS = ("pointwise", "reduction", "extern")
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
    """The facts about ``graph`` that the simulator reads, as arrays."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def inputs(self) -> ValuesOfOps:
        """The inputs of each op that some op computes."""
        return ValuesOfOps(self.graph.computed_inputs)

    @cached_property
    def given(self) -> list[tuple[int, ...]]:
        """The inputs of each op that no op computes (inputs of the step and tangents), as negative numbers: -1 - value."""
        values = self.graph.values
        return [tuple(-1 - v for v in op.inputs if values[v].producer is None) for op in self.graph.ops]

    @cached_property
    def outputs(self) -> ValuesOfOps:
        """The outputs of each op."""
        return ValuesOfOps(self.graph.made)

    @cached_property
    def kinds(self) -> Numbers:
        """The kind of each op: ``POINTWISE``, ``REDUCTION`` or ``EXTERN``."""
        return np.array([KINDS.index(op.kind.value) for op in self.graph.ops], dtype=np.int64)

    @cached_property
    def ends_pass(self) -> list[bool]:
        """For each op, True if what depends on its result runs in a later kernel (``Op.ends_pass``)."""
        return [op.ends_pass for op in self.graph.ops]

    @cached_property
    def in_place(self) -> Flags:
        """For each op, True if its result may reuse the buffer of an input (``Op.in_place``)."""
        return np.array([bool(op.in_place) for op in self.graph.ops], dtype=np.bool_)

    @cached_property
    def never_inlined(self) -> Flags:
        """For each op, True if its result is never inlined into readers (``Inlining.NEVER``)."""
        return np.array([op.inlining.value == "never" for op in self.graph.ops], dtype=np.bool_)

    @cached_property
    def inlined_once(self) -> list[bool]:
        """For each op, True if its result is inlined into a single reader only (``Inlining.ONCE``)."""
        return [op.inlining.value == "once" for op in self.graph.ops]

    @cached_property
    def value_bytes(self) -> Numbers:
        """Bytes of each value."""
        return np.array([value.bytes for value in self.graph.values], dtype=np.int64)

    @cached_property
    def workspace_bytes(self) -> Numbers:
        """Workspace bytes of each op."""
        return np.array([op.workspace_bytes for op in self.graph.ops], dtype=np.int64)


def arrays_of(graph: Graph) -> GraphArrays:
    """Returns the arrays of ``graph``, built once per graph."""
    return graph.derived(GraphArrays)
