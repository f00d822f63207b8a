"""Divides a plan into its fusion groups, and lists the saved values that could be kept in a form between two of them.

A transfer between two ops of one fused kernel would divide the kernel. All positions of stays therefore lie at the borders of
fusion groups: stores and frees behind the last execution of a group, loads and needs before the first one. Without fusion, each
execution is a group. Bytes of a group are the most at any of its executions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.cost.durations import durations
from autoremat.planner.graph.arrays import Flags, Numbers
from autoremat.planner.graph.op import Engine, Form
from autoremat.planner.graph.schedule import Schedule, Stay
from autoremat.planner.memory.fusion import fusion_in
from autoremat.planner.memory.live_ranges import Buffers
from autoremat.planner.plans.plan import Plan


@dataclass(frozen=True)
class Storable:
    """A saved value and one of its forms. All positions are fusion groups."""

    value: int
    form: Form
    bytes: int
    """Bytes of the value, as it is."""
    made: int
    """The group that computes the value."""
    free: int
    """The last group of the forward that reads the value: its memory can be freed behind it, or behind any later group."""
    need: int
    """The first group of the backward that reads the value."""

    @property
    def relief(self) -> int:
        """Bytes on the device that storing the value frees."""
        return self.bytes - self.form.device_bytes


class GroupedPlan:
    """The fusion groups of ``plan``, which has no stays."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.graph
        self.schedule = Schedule(plan.schedule.forward, plan.schedule.backward)
        length, border = len(self.schedule.sequence), len(self.schedule.forward)
        found = fusion_in(self.graph, self.schedule)
        buffers, absent, group = found.buffers, found.absent, found.group
        self.begins: Numbers = np.flatnonzero(np.diff(group, prepend=-1))
        """The first execution of each group."""
        self.ends: Numbers = np.append(self.begins[1:], length) - 1
        """The last execution of each group."""
        self.num_forward = int(np.searchsorted(self.begins, border))
        """Number of groups of the forward."""
        self.num_freeing = len(self.begins) if not self.graph.calls.others else self.num_forward
        """Number of groups behind which values may be freed. Other open calls hold what the backward frees, so it frees nothing
        then."""
        self.bytes: Numbers = np.maximum.reduceat(plan.timeline.bytes_at, self.begins)
        """Bytes that are live at each group."""
        of = np.repeat(np.arange(len(self.begins)), self.ends - self.begins + 1)
        self.storables = tuple(_storables(buffers, absent, border, of))
        """In the sequence in which their values are computed; those of one value, in the sequence of its forms."""

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of each execution, without waits."""
        return durations(self.graph, self.schedule)

    @cached_property
    def clock(self) -> NDArray[np.float64]:
        """For each group, the moment at which it begins without waits; the last entry is the end of the step."""
        found: NDArray[np.float64] = np.append(0.0, np.cumsum(np.add.reduceat(self.seconds, self.begins)))
        return found

    @cached_property
    def least_bytes(self) -> int:
        """Lower bound on the peak of this schedule with any stays."""
        return int(self._least_bytes_at.max(initial=0))

    @cached_property
    def _least_bytes_at(self) -> Numbers:
        """For each group, its bytes while all values are away that could be."""
        change = np.zeros(len(self.begins) + 1, dtype=np.int64)
        best = {one.value: one for one in sorted(self.storables, key=lambda one: one.relief)}
        others = self.graph.calls.others * sum(one.relief for one in best.values())
        for one in best.values():
            change[one.free + 1] -= one.relief
            change[one.need] += one.relief
        found: Numbers = self.bytes + np.cumsum(change)[:-1] - others
        return found

    @property
    def least_bytes_at_executions(self) -> Numbers:
        """For each execution, the bytes of its group while all values are away that could be."""
        found: Numbers = np.repeat(self._least_bytes_at, self.ends - self.begins + 1)
        return found

    @cached_property
    def store_rate(self) -> float:
        """The most bytes on the device that stores free per second, with all engines together."""
        rates: dict[Engine, float] = {}
        for one in self.storables:
            rate = one.relief / one.form.store.seconds if one.form.store.seconds else math.inf
            rates[one.form.store.engine] = max(rates.get(one.form.store.engine, 0.0), rate)
        return sum(rates.values())

    def least_stall(self, budget: int) -> float:
        """Returns a lower bound on the waits by which stays could bring the peak down to ``budget`` bytes."""
        fullest = int(self.bytes.argmax())
        if any(one.form.store.engine is Engine.COMPUTE for one in self.storables) or self.graph.calls.others:
            return 0.0
        return max(0.0, int(self.bytes[fullest] - budget) / max(self.store_rate, 1e-9) - float(self.clock[fullest]))

    def stay(self, storable: Storable, store: int, free: int, load: int) -> Stay:
        """Returns the stay with these groups as its positions."""
        begins, ends = self.begins, self.ends
        return Stay(
            storable.value, storable.form.name, int(ends[store]), int(ends[free]), int(begins[load]), int(begins[storable.need])
        )


def _storables(buffers: Buffers, absent: Flags, border: int, group: Numbers) -> list[Storable]:
    """Returns the saved values with their forms. ``group`` is that of each execution."""
    graph, count = buffers.graph, len(buffers.value)
    late = buffers.reader >= border
    need = np.full(count, len(buffers.sequence), dtype=np.int64)
    np.minimum.at(need, buffers.source[late], buffers.reader[late])
    crossing = np.flatnonzero((buffers.start < border) & (need < len(buffers.sequence)))
    outputs = {*graph.forward_outputs, *graph.backward_outputs}
    read = _last_reads_of_forward(buffers, absent, border)
    found = []
    for live_range in crossing.tolist():
        value = int(buffers.value[live_range])
        forms = () if value in outputs else graph.values[value].forms
        positions = (int(group[at[live_range]]) for at in (buffers.start, read, need))
        made, free, need_at = positions
        found += [Storable(value, form, graph.values[value].bytes, made, free, need_at) for form in forms]
    return [one for one in found if one.relief > 0]


def _last_reads_of_forward(buffers: Buffers, absent: Flags, border: int) -> Numbers:
    """Returns, for each live range, the last execution of the forward that computes or reads it."""
    early = buffers.reader < border
    last = buffers.start.copy()
    np.maximum.at(last, buffers.source[early], buffers.reader[early])
    begins = np.searchsorted(buffers.reader, np.arange(len(buffers.sequence) + 1)).tolist()
    until, source = last.tolist(), buffers.source.tolist()
    for live_range in reversed(np.flatnonzero(absent & (buffers.start < border)).tolist()):
        position = int(buffers.start[live_range])
        for behind in source[begins[position] : begins[position + 1]]:
            until[behind] = max(until[behind], until[live_range])
    return np.array(until, dtype=np.int64)
