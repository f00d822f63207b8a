"""Placement: chooses which saved values of a plan are kept in a form, and when, so that its schedule fits a budget.

The recomputation of the plan stays. Every engine beside the compute stream is a queue, and waiting for it costs seconds.

1. *Stores.* A sweep over the groups gives an idle engine the next value that was computed, as long as a later group is over
   the budget and the value frees memory there. Values that are computed early are needed late, so this sequence carries the
   most bytes. A value is freed behind the group in which its store ends, which may lie in the backward.
2. *Waits.* Where memory is over the budget, the option of the fewest seconds per byte frees some: wait for a store that is on
   its way, begin another one, or convert a value on the compute stream.
3. *Loads.* They end just before their value is needed, the last one first, and begin later where memory is over the budget.

A round knows when loads begin from the one before; the first one guesses. The simulator judges each. If the compute stream
still waits, further rounds let the backward free values too: that relieves engines, but loads may come late.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoremat.planner.cost.durations import stalls_of
from autoremat.planner.graph.op import Engine
from autoremat.planner.graph.schedule import Stay
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan, Storable
from autoremat.planner.settings import settings

MANY = 1000
"""Number of open calls beside which the peak of one call itself hardly counts."""


@dataclass
class _Away:
    """A value that is to be stored. Positions are groups, as in stays; the load is as far as it is known."""

    storable: Storable
    store: int
    free: int
    load: int
    stored: float
    """The moment at which the store ends, in seconds."""


def place(grouped: GroupedPlan, limits: Limits, most_stall: float = math.inf) -> Plan | None:
    """Returns the plan with stays by which it keeps to the bytes of ``limits``, with the fewest seconds of waiting found.

    Returns None if no stays are found that fit and stall for less than ``most_stall`` seconds.
    """
    plan, best, least, budget = grouped.plan, None, most_stall, limits.peak_bytes
    if budget is None or grouped.least_bytes > budget:
        return None
    host = math.inf if limits.host_bytes is None else limits.host_bytes // plan.graph.calls.in_flight
    for num_freeing in dict.fromkeys((grouped.num_forward, grouped.num_freeing)):
        loads: dict[int, int] = {}
        goal = budget
        for shrinkage in (0.0, settings.step):  # the second round knows where the first one loads values
            if least <= 1e-4 * grouped.clock[-1]:  # too little to look for less
                return best
            sweep = _Sweep(grouped, num_freeing, min(goal, int(budget * (1 - shrinkage))), host, loads, least)
            if not sweep.run():
                break
            schedule = replace(grouped.schedule, stays=sweep.stays())
            found = Plan.of(plan.graph, schedule, plan.label)
            excess = found.peak_bytes - budget
            if excess > 0:
                goal = min(goal, budget) - excess
                continue
            seconds = sum(stalls_of(plan.graph, schedule, seconds=grouped.seconds))
            if seconds < least:
                best, least = found, seconds
    return best


class _Sweep:
    """The sweep over the groups that chooses values for a peak of about ``goal`` bytes, and where they are stored and freed.

    Values are freed behind the first ``num_freeing`` groups. ``host`` bounds the bytes of a call on the host. ``loads`` are the
    groups at which an earlier round loads values; they are updated. The stays stall for less than ``most_stall`` seconds.
    """

    def __init__(
        self, grouped: GroupedPlan, num_freeing: int, goal: int, host: float, loads: dict[int, int], most_stall: float
    ) -> None:
        self.num_freeing = num_freeing
        self.grouped, self.goal, self.host, self.loads, self.most_stall = grouped, goal, host, loads, most_stall
        self.bytes = grouped.bytes.copy()
        """Bytes at each group, without what is chosen to be away then."""
        self.clock: list[float] = grouped.clock.tolist()
        self.others = grouped.graph.calls.others
        self.waited = 0.0
        self.ended: list[float] = []
        """The moments at which the groups so far end."""
        self.idle_from = dict.fromkeys(Engine, 0.0)
        self.ready: list[Storable] = []
        """Values whose store could begin, in the sequence of their computation."""
        self.late: list[Storable] = []
        """Values whose store would end too late to be of use, unless the compute stream waits."""
        self.away: dict[int, _Away] = {}
        self.promised: dict[int, Storable] = {}
        """Values that will be stored in any case, for the memory of the other open calls, each in its form."""

    @property
    def now(self) -> float:
        return self.ended[-1] if self.ended else 0.0

    def run(self) -> bool:
        """Chooses the values. Returns False if no choice fits, or if the compute stream waits too long."""
        over = (self.bytes > self.goal).nonzero()[0]
        made: dict[int, list[Storable]] = {}
        for one in self.grouped.storables:
            made.setdefault(one.made, []).append(one)
        for group in range(int(over[-1]) + 1 if len(over) else 0):
            while self.bytes[group] > self.goal:
                if not self._relieve(group) or self.waited >= self.most_stall:
                    return False
            if group < self.num_freeing:
                self.ended.append(self.clock[group + 1] + self.waited)
                self.ready += made.get(group, ())
                self._begin_stores(group)
            if group == self.grouped.num_forward - 1:
                for one in (*self.ready, *self.late):
                    if self.promised.get(one.value) is one and one.value not in self.away:
                        self._store_now(one, group, group)
        return True

    def stays(self) -> tuple[Stay, ...]:
        """Returns the stays of the chosen values. Loads end just before the need, and begin later where memory is over."""
        grouped, clock, before = self.grouped, self.clock, dict.fromkeys(Engine, math.inf)
        away = sorted(self.away.values(), key=lambda one: (one.storable.need, one.storable.made, one.storable.value))
        for one in reversed(away):
            load = one.storable.form.load
            one.load = one.storable.need
            if load.engine is not Engine.COMPUTE:
                begin = min(clock[one.storable.need], before[load.engine]) - load.seconds
                before[load.engine] = max(begin, clock[grouped.num_forward])
                one.load = min(max(bisect_right(clock, begin) - 1, grouped.num_forward, one.free + 1), one.storable.need)
        bytes_at = grouped.bytes - self.others * sum(one.storable.relief for one in away)
        for one in away:
            bytes_at[one.free + 1 : one.load] -= one.storable.relief
        for one in reversed(away):
            over = (bytes_at[one.load : one.storable.need] > self.goal).nonzero()[0]
            if len(over):
                later = one.load + int(over[-1]) + 1
                bytes_at[one.load : later] -= one.storable.relief
                one.load = later
        self.loads.update((one.storable.value, one.load) for one in away)
        found = [grouped.stay(one.storable, one.store, one.free, one.load) for one in away]
        return tuple(sorted(found, key=lambda stay: stay.value))

    def _load_of(self, one: Storable) -> int:
        """Returns the group at which the value will be loaded, by an earlier round or by a guess."""
        if one.form.load.engine is Engine.COMPUTE:
            return one.need
        if one.value not in self.loads:
            begin = self.clock[one.need] - one.form.load.seconds
            self.loads[one.value] = max(bisect_right(self.clock, begin) - 1, self.grouped.num_forward)
        return min(self.loads[one.value], one.need)

    def _begins(self, one: Storable) -> float:
        return max(self.idle_from[one.form.store.engine], self.ended[one.made])

    def _begin_stores(self, group: int) -> None:
        """Gives idle engines values, as long as a group behind ``group`` is over the goal."""
        while self.bytes[group + 1 :].max(initial=0) > self.goal or self.promised.keys() - self.away.keys():
            idle = {engine for engine, moment in self.idle_from.items() if moment <= self.now}
            chosen = next((one for one in self.ready if one.form.store.engine in idle), None) if idle else None
            if chosen is None:
                return
            self.ready.remove(chosen)
            begin = self._begins(chosen)
            stored = begin + chosen.form.store.seconds
            free = max(bisect_left(self.clock, stored - self.waited) - 1, chosen.free, group)
            load = self._load_of(chosen)
            useful = not chosen.is_immediate and free < self.num_freeing
            useful = useful and (chosen.value in self.promised or self.bytes[free + 1 : load].max(initial=0) > self.goal)
            if useful and self._is_possible(chosen):
                self._choose(chosen, begin, stored, free, load)
            else:
                self.late.append(chosen)

    def _is_possible(self, one: Storable) -> bool:
        """Returns True if the value has no other form, and the host has room for it."""
        has_room = self.promised[one.value] is one if one.value in self.promised else one.form.host_bytes <= self.host
        return has_room and one.value not in self.away

    def _account(self, one: Storable) -> None:
        """Counts the value on the host, and no longer as it is on the device in the other open calls."""
        self.bytes -= self.others * one.relief
        self.host -= one.form.host_bytes

    def _choose(self, one: Storable, begin: float, stored: float, free: int, load: int) -> None:
        store = min(max(one.made, bisect_right(self.ended, begin) - 1), self.grouped.num_forward - 1, free)
        self.away[one.value] = _Away(one, store, free, load, stored)
        self.bytes[free + 1 : load] -= one.relief
        if one.value not in self.promised:
            self._account(one)
        if not one.is_immediate:
            self.idle_from[one.form.store.engine] = stored

    def _relieve(self, group: int) -> bool:
        """Frees memory at ``group`` at the fewest seconds per byte. Returns False if nothing can be freed.

        Delayed loads come first: that of the value that is needed last. The memory of other open calls comes last.
        """
        early = [one for one in self.away.values() if one.load <= group < one.storable.need]
        if group >= self.grouped.num_forward and early:
            last = max(early, key=lambda one: (one.storable.need, one.storable.value))
            self.bytes[last.load : group + 1] -= last.storable.relief
            last.load = group + 1
            return True
        behind = min(group, self.num_freeing) - 1
        waits = [
            (max(0.0, one.stored - self.now) / one.storable.relief, one.stored, one)
            for one in self.away.values()
            if one.free > behind and one.storable.free <= behind and one.load > group
        ]
        options = [
            (self._seconds_of(one) / one.relief, number, one)
            for number, one in enumerate((*self.ready, *self.late))
            if one.free <= behind and one.need > group and self._is_possible(one)
        ]
        wait, option = min(waits, default=None, key=lambda o: o[:2]), min(options, default=None, key=lambda o: o[:2])
        if wait is not None and (option is None or wait[0] <= option[0]):
            self._wait_until(wait[2].stored)
            self.bytes[behind + 1 : wait[2].free + 1] -= wait[2].storable.relief
            wait[2].free = behind
        elif option is not None:
            self._store_now(option[2], behind, group)
        else:
            others = (one for one in self.grouped.storables if one.value not in self.promised and self._is_possible(one))
            promised = next(others, None) if self.others else None
            if promised is None:
                return False
            self.promised[promised.value] = promised
            self._account(promised)
        return True

    def _seconds_of(self, one: Storable) -> float:
        """Returns the seconds that the compute stream would wait to have the value stored now."""
        load = one.form.load.seconds if one.form.load.engine is Engine.COMPUTE else 0.0
        if one.is_immediate:
            return one.form.store.seconds + load
        return max(0.0, self._begins(one) + one.form.store.seconds - self.now) + load

    def _store_now(self, one: Storable, behind: int, group: int) -> None:
        """Stores the value, so that it is away from ``group`` on. The compute stream waits behind the group ``behind``."""
        load = self._load_of(one)
        load = load if load > group else one.need
        if one.is_immediate:
            self._choose(one, self.ended[one.free], self.ended[one.free], one.free, load)
            self._wait_until(self.now + one.form.store.seconds)
        else:
            begin = self._begins(one)
            end = begin + one.form.store.seconds
            self._choose(one, begin, end, behind, load)
            self._wait_until(end)

    def _wait_until(self, moment: float) -> None:
        """Lets the compute stream wait behind the last group that has run."""
        if moment > self.now:
            self.waited += moment - self.now
            self.ended[-1] = moment


def relieving(plan: Plan, shares: Sequence[float] = (1 / 3, 2 / 3, 1.0)) -> Iterator[Plan]:
    """Yields ``plan``, which has no stays, with stays that free ``shares`` of what it keeps between its halves.

    What one of several open calls keeps there is live while the others run, whatever the peak of its own graph.
    """
    graph = plan.graph
    grouped = GroupedPlan(Plan.of(graph.with_calls(MANY), plan.schedule, plan.label))
    best = {one.value: one.relief for one in sorted(grouped.storables, key=lambda one: one.relief)}
    for share in shares if best else ():
        found = place(grouped, Limits(grouped.plan.peak_bytes - int((MANY - 1) * share * sum(best.values()))))
        if found is not None:
            yield Plan.of(graph, replace(plan.schedule, stays=found.schedule.stays), plan.label)
