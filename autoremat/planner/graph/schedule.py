"""Defines schedules: the sequence of executions in the forward and in the backward.

Builds one from a saved set.

A forward op in the backward is a recomputation; it may occur several times. A value that the backward reads before it computes
it is *saved*. In a single-phase graph the backward is empty, and the forward repeats ops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Form

T = TypeVar("T")

RECENT = 4
"""Number of schedules that a search builds together, before it chooses stays for them."""


@dataclass(frozen=True)
class Stay:
    """The decision to keep a saved value in one of its forms. All positions are positions in ``Schedule.sequence``.

    The bytes of a step follow from positions alone. The rate of a link only changes seconds, because the compute stream waits
    at ``free`` and at ``need``.
    """

    value: int
    form: str
    """The name of one of the value's forms."""
    store: int
    """The execution of the forward after which the store is issued: not before the one that computes the value."""
    free: int
    """The execution after which the store is complete and the value's device memory is freed: in the forward after the last
    read there, or in the backward before the load."""
    load: int
    """The execution of the backward before which the device memory is allocated again and the load is issued."""
    need: int
    """The execution of the backward before which the load is complete: at the latest the first one that reads the value."""


@dataclass(frozen=True)
class Schedule:
    """The executions of both halves of a step, as op numbers in sequence."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    stays: tuple[Stay, ...] = ()
    """At most one for each saved value, in ascending sequence of values. Others stay on the device as they are."""

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """All executions of the step in sequence."""
        return self.forward + self.backward

    @property
    def without_stays(self) -> Schedule:
        """The executions alone."""
        return Schedule(self.forward, self.backward) if self.stays else self

    def recomputed(self, graph: Graph) -> tuple[int, ...]:
        """Returns the executions of forward ops after their first one, in sequence.

        The first execution of an op that only the backward needs is not a recomputation.
        """
        seen = set()
        repeated = []
        for op in self.sequence:
            if op >= graph.num_forward:
                continue
            if op in seen:
                repeated.append(op)
            seen.add(op)
        return tuple(repeated)

    def forms(self, graph: Graph) -> dict[int, Form]:
        """Returns the form of each value that has a stay."""
        return {stay.value: graph.values[stay.value].form(stay.form) for stay in self.stays}

    def saved(self, graph: Graph) -> tuple[int, ...]:
        """Returns the forward values that cross from the forward into the backward."""
        fresh: set[int] = set()
        saved: dict[int, None] = {}
        reads, outputs, backward_begins = graph.forward_reads, graph.made, graph.num_forward
        for index in self.backward:
            for value in reads[index]:
                if value not in fresh:
                    saved[value] = None
            if index < backward_begins:
                fresh.update(outputs[index])
        made = set(graph.forward_values)
        saved.update(dict.fromkeys(v for v in graph.backward_outputs if v in made and v not in fresh))
        return tuple(saved)


@dataclass(frozen=True)
class Segments:
    """The forward, cut into consecutive segments.

    ``of_op[i]`` is the segment of forward op ``i``. A recomputed value is dropped when the backward leaves the segment that
    needed it.
    """

    of_op: tuple[int, ...]
    long_range: frozenset[int] = frozenset()
    """Values that are read far from their producer (masks, rotary tables, skips). Their readers do not tell which segment the
    backward is in."""

    @property
    def count(self) -> int:
        """Number of segments."""
        return max(self.of_op, default=-1) + 1


class _Backward:
    """Builds the backward half. Walks the backward ops in sequence and recomputes each missing value just before its reader."""

    def __init__(self, graph: Graph, saved: Collection[int], segments: Segments) -> None:
        self.graph, self.segments = graph, segments
        self.saved = frozenset(saved)
        self.available = set(self.saved)
        self.local: list[int] = []
        """Recomputed values that are dropped when the backward leaves the current segment."""
        self.current = segments.count - 1
        self.executions: list[int] = []
        self.segment_of_op = graph.derived(_BackwardSegments).of(segments)

    def read_here(self, value: int) -> bool:
        """Returns True if a backward op of the current segment reads ``value``."""
        first = self.graph.num_forward
        return any(r >= first and self.segment_of_op[r - first] == self.current for r in self.graph.readers[value])

    def missing(self, values: Sequence[int]) -> list[int]:
        """Returns those of the forward values ``values`` that are not available."""
        available = self.available
        return [value for value in values if value not in available]

    def enter(self, segment: int) -> None:
        """Enters ``segment``. Drops the values that were recomputed for another segment."""
        if segment != self.current:
            self.available.difference_update(self.local)
            self.local.clear()
            self.current = segment

    def recompute(self, values: list[int]) -> None:
        """Executes all ops that ``values`` still need, in forward sequence."""
        graph, of_op = self.graph, self.segments.of_op
        for index in sorted(graph.ancestors(graph.producers(values), self.available)):
            self.executions.append(index)
            for value in graph.ops[index].outputs:
                if value not in self.saved and (of_op[index] == self.current or self.read_here(value)):
                    self.available.add(value)
                    self.local.append(value)

    def build(self) -> tuple[int, ...]:
        """Returns the executions of the backward half."""
        graph, available, first = self.graph, self.available, self.graph.num_forward
        for index, (segment, reads) in enumerate(zip(self.segment_of_op, graph.forward_reads[first:], strict=True), first):
            self.enter(segment)
            if not available.issuperset(reads):
                self.recompute(self.missing(reads))
            self.executions.append(index)
        made = set(graph.forward_values)
        missing = self.missing([value for value in graph.backward_outputs if value in made])
        if missing:
            self.recompute(missing)
        return tuple(self.executions)


class _BackwardSegments:
    """The segments of the backward ops of a graph, for each division of its forward. Many saved sets share one division."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[Segments, list[int]] = {}

    def of(self, segments: Segments) -> list[int]:
        """Returns, for each backward op, the segment whose gradients it computes."""
        if segments not in self.known:
            self.known[segments] = _backward_segments(self.graph, segments)
        return self.known[segments]


def _backward_segments(graph: Graph, segments: Segments) -> list[int]:
    """Returns, for each backward op, the segment whose gradients it computes.

    That is the latest segment from which it or a later op reads, so the backward leaves each segment only once.
    """
    latest = [0] * len(graph.values)
    for index, op in enumerate(graph.ops[: graph.num_forward]):
        for value in op.outputs:
            latest[value] = 0 if value in segments.long_range else segments.of_op[index]
    found = []
    current = 0
    for reads in reversed(graph.forward_reads[graph.num_forward :]):
        for value in reads:
            if latest[value] > current:
                current = latest[value]
        found.append(current)
    return found[::-1]


def build_schedule(graph: Graph, saved: Collection[int], segments: Segments | None = None) -> Schedule:
    """Returns the schedule that saves ``saved`` and recomputes every other value that the backward reads, just in time.

    Without ``segments``, each value is recomputed at most once and stays live until its last reader.
    """
    backward = _Backward(graph, saved, segments or Segments((0,) * graph.num_forward)).build()
    draft = Schedule((), backward)
    crossing = draft.saved(graph)
    forward = graph.ancestors([*graph.required_forward, *graph.producers(crossing)])
    return Schedule(tuple(sorted(forward)), backward)


def recent(compute: Callable[[Schedule], T]) -> Callable[[Schedule], T]:
    """Returns ``compute`` with its results for the last few schedules, for which a search asks again soon."""
    return lru_cache(RECENT)(compute)
