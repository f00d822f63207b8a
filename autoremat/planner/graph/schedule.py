"""Defines schedules: the sequence of executions in the forward and in the backward.

Builds one from a saved set.

A forward op in the backward is a recomputation; it may occur several times. A value that the backward reads before it computes
it is *saved*. In a single-phase graph the backward is empty, and the forward repeats ops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Form

RECENT = 4
"""Number of schedules that a search builds together, before it chooses stays for them. Their figures are remembered."""


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
    materialised: tuple[int, ...] = ()
    """Results of the backward's own ops that fusion would inline, but that are buffers, ascending."""

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """All executions of the step in sequence."""
        return self.forward + self.backward

    @property
    def without_stays(self) -> Schedule:
        """The executions alone."""
        return replace(self, stays=()) if self.stays else self

    def repetitions(self, graph: Graph) -> list[int]:
        """Returns the positions of the executions of forward ops after their first one.

        The first execution of an op that only the backward needs is not a recomputation.
        """
        seen, found = set[int](), list[int]()
        for position, op in enumerate(self.sequence):
            if op in seen:
                found.append(position)
            elif op < graph.num_forward:
                seen.add(op)
        return found

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


def build_schedule(graph: Graph, saved: Collection[int]) -> Schedule:
    """Returns the schedule that saves ``saved`` and recomputes every other value that the backward reads, just in time.

    Each value is recomputed at most once and stays live until its last reader.
    """
    available, backward = set(saved), list[int]()

    def recompute(values: Iterable[int]) -> None:
        for index in sorted(graph.ancestors(graph.producers([v for v in values if v not in available]), available)):
            backward.append(index)
            available.update(graph.ops[index].outputs)

    for index, reads in enumerate(graph.forward_reads[graph.num_forward :], graph.num_forward):
        if not available.issuperset(reads):
            recompute(reads)
        backward.append(index)
    made = set(graph.forward_values)
    recompute(value for value in graph.backward_outputs if value in made)
    crossing = Schedule((), tuple(backward)).saved(graph)
    forward = graph.ancestors([*graph.required_forward, *graph.producers(crossing)])
    return Schedule(tuple(sorted(forward)), tuple(backward))
