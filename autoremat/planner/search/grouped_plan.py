"""Divides a plan into its fusion groups, and lists the saved values that could be kept in a form between two of them.

A transfer between two ops of one fused kernel would divide the kernel. All positions of stays therefore lie at the borders of
fusion groups: stores and frees behind the last execution of a group, loads and needs before the first one. Without fusion, each
execution is a group. Bytes of a group are the most at any of its executions.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.cost.durations import durations
from autoremat.planner.graph.arrays import Numbers
from autoremat.planner.graph.op import Engine, Form
from autoremat.planner.graph.schedule import Stay
from autoremat.planner.memory.fusion import fusion_in
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.live_view import LiveView


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

    @property
    def is_immediate(self) -> bool:
        """True if the compute stream itself stores the value."""
        return self.form.store.engine is Engine.COMPUTE


class GroupedPlan:
    """The fusion groups of ``plan``, which has no stays."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph, self.schedule = plan, plan.graph, plan.schedule.without_stays
        length, border = len(self.schedule.sequence), len(self.schedule.forward)
        self.begins: Numbers = np.flatnonzero(np.diff(fusion_in(self.graph, self.schedule).group, prepend=-1))
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
        group = np.repeat(np.arange(len(self.begins)), self.ends - self.begins + 1).tolist()
        self.storables: list[Storable] = []
        """The saved values in the sequence in which they are computed; those of one value, in the sequence of its forms."""
        view, outputs = LiveView(plan), {*self.graph.forward_outputs, *self.graph.backward_outputs}
        for number, start, uses in zip(view.value, view.start, view.uses, strict=True):
            late, value = bisect_left(uses, border), self.graph.values[number]
            if start < border and late < len(uses) and value.forms and number not in outputs:
                places = (group[start], group[uses[late - 1] if late else start], group[uses[late]])
                found = (Storable(number, form, value.bytes, *places) for form in value.forms)
                self.storables += (one for one in found if one.relief > 0)

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
        return int(self.least_bytes_at_executions.max(initial=0))

    @cached_property
    def least_bytes_at_executions(self) -> Numbers:
        """For each execution, the bytes of its group while all values are away that could be."""
        change = np.zeros(len(self.begins) + 1, dtype=np.int64)
        best = {one.value: one for one in sorted(self.storables, key=lambda one: one.relief)}
        others = self.graph.calls.others * sum(one.relief for one in best.values())
        for one in best.values():
            change[one.free + 1] -= one.relief
            change[one.need] += one.relief
        found: Numbers = np.repeat(self.bytes + np.cumsum(change)[:-1] - others, self.ends - self.begins + 1)
        return found

    @cached_property
    def store_rate(self) -> float:
        """The most bytes on the device that stores free per second, with all engines together."""
        rates: dict[Engine, float] = {}
        for one in self.storables:
            rate = one.relief / one.form.store.seconds if one.form.store.seconds else math.inf
            rates[one.form.store.engine] = max(rates.get(one.form.store.engine, 0.0), rate)
        return sum(rates.values())

    def stay(self, storable: Storable, store: int, free: int, load: int) -> Stay:
        """Returns the stay with these groups as its positions."""
        positions = (*self.ends[[store, free]].tolist(), *self.begins[[load, storable.need]].tolist())
        return Stay(storable.value, storable.form.name, *positions)
