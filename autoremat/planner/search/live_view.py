"""The live ranges of a plan with their uses, and what the moves of a batch change about them.

A *range* is one live range of a forward value. Its *uses* are the executions that need its memory: those that read it, also
through results that fusion does not materialise. Moves change the ranges as if fusion stayed as it is, and the simulator judges
the result.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from autoremat.planner.cost.durations import traffic_of
from autoremat.planner.graph.arrays import Numbers
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.fusion import fusion_in
from autoremat.planner.plans.plan import Plan

Span = tuple[int, int, int]
"""Executions from the first up to, not including, the second, and the bytes by which each of them has more live."""


class Facts:
    """What moves read of a graph."""

    def __init__(self, graph: Graph) -> None:
        ops, border = graph.ops, graph.num_forward
        self.seconds_again = traffic_of(graph).recompute_seconds
        """For each op, the seconds of running it again."""
        self.saving_seconds: list[float] = traffic_of(graph).saving_seconds.tolist()
        self.materialise_seconds = [traffic_of(graph).materialise_seconds(value) for value in range(len(graph.values))]
        self.may_run_again = [0 <= maker < border and ops[maker].may_run_again for maker in graph.makers]
        """For each value, True if it may be computed again."""
        ordered = (op for op in ops if op.constraint is Constraint.RECOMPUTE and op.rematerializable)
        crossing = () if graph.single_phase else (value for op in ordered for value in op.outputs)
        self.never_saved = frozenset(crossing).difference(graph.forward_outputs)
        """The values that constraints keep from crossing into the backward."""
        held = {*graph.forward_outputs, *graph.backward_outputs} if graph.single_phase else graph.backward_outputs
        self.needed_at_the_end = frozenset(held).intersection(graph.forward_values)


def schedule_of(graph: Graph, executions: Sequence[int], materialised: Iterable[int] = ()) -> Schedule:
    """Returns the schedule of a backward, or of all executions of a single phase, without recomputation that nothing reads."""
    first = {index: place for place, index in reversed(list(enumerate(executions)))} if graph.single_phase else {}
    needed, kept = set(graph.derived(Facts).needed_at_the_end), list[int]()
    for place, index in reversed(list(enumerate(executions))):
        is_own = first[index] == place if graph.single_phase else index >= graph.num_forward
        if is_own or not needed.isdisjoint(graph.made[index]):
            needed.difference_update(graph.made[index])
            needed.update(graph.forward_reads[index])
            kept.append(index)
    if graph.single_phase:
        return Schedule(tuple(reversed(kept)), ())
    forward = graph.ancestors([*graph.required_forward, *graph.producers(needed)])
    return Schedule(tuple(sorted(forward)), tuple(reversed(kept)), materialised=tuple(sorted(materialised)))


class LiveView:
    """The live ranges of ``plan`` under the moves of a batch. ``bytes_at`` takes the place of the plan's own, if given."""

    def __init__(self, plan: Plan, bytes_at: Numbers | None = None) -> None:
        self.plan, self.graph, self.facts, self.sequence = plan, plan.graph, plan.graph.derived(Facts), plan.sequence
        self.border = 0 if self.graph.single_phase else len(plan.schedule.forward)
        """The first execution before which values can be computed again."""
        fused = fusion_in(self.graph, plan.schedule)
        buffers, absent = fused.buffers, fused.absent
        self.bytes_at: Numbers = (plan.timeline.bytes_at if bytes_at is None else bytes_at).astype(np.int64)
        """Bytes at each execution, with those of the moves so far."""
        self.num_ranges = len(buffers.value)
        """Number of ranges of the plan itself. Those of moves come behind them."""
        self.value: list[int] = buffers.value.tolist()
        self.start: list[int] = buffers.start.tolist()
        self.last: list[int] = buffers.last.tolist()
        self.size: list[int] = buffers.bytes.tolist()
        self.absent: list[bool] = absent.tolist()
        self.held: list[bool] = buffers.kept.tolist()
        own = buffers.sequence[buffers.start] >= self.graph.num_forward
        self.inlined = np.flatnonzero(fused.inlined & own), buffers.start, buffers.last
        """The inlined results of the backward's own ops, and where each range starts and ends."""
        self.idle = ~absent & ~buffers.kept, buffers.start, buffers.last
        self.inserted: dict[int, set[int]] = {}
        """The ops that run again before an execution."""
        self.removed: set[int] = set()
        """The executions that are left out. Own ops of the backward run, but their results are inlined."""
        self.materialised = set(plan.schedule.materialised)
        self.of_value: dict[int, list[tuple[int, int]]] = {}
        """For each value, the starts and the numbers of its ranges, ascending."""
        for number, value in enumerate(self.value):
            self.of_value.setdefault(value, []).append((self.start[number], number))
        order = np.argsort(buffers.source, kind="stable")
        readers: list[int] = buffers.reader[order].tolist()
        bounds: list[int] = np.searchsorted(buffers.source[order], np.arange(self.num_ranges + 1)).tolist()
        self.readers = [readers[begin:end] for begin, end in pairwise(bounds)]
        """For each range, the executions that read it."""
        self.made_from: list[int] = np.searchsorted(buffers.start, np.arange(len(self.sequence) + 1)).tolist()
        """For each execution, its first range."""
        self.reads = buffers.reads
        self.uses = list(self.readers)  # lists that are replaced and never changed
        for inlined in reversed(np.flatnonzero(absent).tolist()):
            for source in self.reads[self.start[inlined]]:
                self.uses[source] = sorted({*self.uses[source], *self.uses[inlined]})

    def made_by(self, execution: int) -> range:
        return range(self.made_from[execution], self.made_from[execution + 1])

    def last_use(self, number: int) -> int:
        return self.uses[number][-1] if self.uses[number] else self.start[number]

    def newest(self, value: int, place: int) -> int:
        """Returns the newest range of a value that what is inserted before an execution can read, or -1."""
        for start, number in reversed(self.of_value.get(value, ())):
            if start < place or (start == place and number >= self.num_ranges):
                return number
        return -1

    def between_halves(self, more: int) -> list[Span]:
        """Returns the span of the other open calls, each of which holds so many bytes more between its halves."""
        more *= self.graph.calls.others
        return [(0, len(self.sequence), more)] if more else []

    def idle_at(self, execution: int) -> list[int]:
        """Returns the ranges that are live at an execution and needed later, and may be computed again, the largest first."""
        may_be_idle, start, last = self.idle
        live = np.flatnonzero(may_be_idle & (start <= execution) & (last > execution)).tolist()
        live += [number for number in range(self.num_ranges, len(self.value)) if self.start[number] <= execution]
        may, uses, size, value = self.facts.may_run_again, self.uses, self.size, self.value
        found = [n for n in live if size[n] and may[value[n]] and uses[n] and uses[n][-1] > execution]
        return sorted(found, key=lambda number: (-size[number], number))

    def inlined_at(self, execution: int) -> list[int]:
        """Returns the inlined results of the backward's own ops that an execution precedes, but not all of their readers."""
        numbers, start, last = self.inlined
        live = numbers[(start[numbers] <= execution) & (last[numbers] > execution)].tolist()
        return [number for number in live if self.absent[number]]

    def divide(self, number: int, place: int) -> None:
        """Divides a range: from execution ``place`` on, another one takes its place."""
        uses = self.uses[number]
        self.uses[number] = [use for use in uses if use < place]
        self.uses.append([use for use in uses if use >= place])
        for column in (self.value, self.last, self.size):
            column.append(column[number])
        self.start.append(place)
        self.absent.append(False)
        self.held.append(False)
        self.readers.append([])
        insort(self.of_value[self.value[number]], (place, len(self.value) - 1))

    def add(self, spans: Iterable[Span]) -> None:
        for begin, end, more in spans:
            self.bytes_at[begin:end] += more

    def schedule(self) -> Schedule:
        found = list[int]()
        for place in range(self.border, len(self.sequence)):
            found += sorted(self.inserted.get(place, ()))
            if place not in self.removed or self.sequence[place] >= self.graph.num_forward:
                found.append(self.sequence[place])
        inlined = {value for execution in self.removed for value in self.graph.made[self.sequence[execution]]}
        return schedule_of(self.graph, found, self.materialised - inlined)
