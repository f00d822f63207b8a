"""The local search with stays: it chooses the recomputation, and :mod:`.placement` the stays of each of its plans.

The link between device and host carries a certain number of bytes while the forward runs. It pays to carry those whose
recomputation is dear, and to compute the others again. So plans leave memory over the budget, and stays bring them down to it.
They come from larger budgets, from a linear program that knows when the link is free (:mod:`.joint_program`), and from trials.
"""

import math
import time
from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan
from autoremat.planner.search.local_search import LocalSearch, SecondsOf, cost_of
from autoremat.planner.search.placement import place
from autoremat.planner.search.work_limit import PLACEMENT, PREPARATION, PROGRAM, WorkLimit
from autoremat.planner.settings import settings

MOST_SECONDS = 30.0
"""Time limit of one linear program. On a machine of ordinary speed, it takes less than one second."""


class StaysSearch(LocalSearch):
    """The search for plans within the bytes of ``limits`` on the device and on the host.

    Its plans have no stays. Each counts with those that bring it down to the budget.
    """

    def __init__(self, graph: Graph, limit: WorkLimit, share: float, limits: Limits, seconds_of: SecondsOf = cost_of) -> None:
        super().__init__(graph, limit, share, seconds_of, lambda plan: (self.best or plan).timeline.bytes_at)
        assert limits.peak_bytes is not None
        self.budget, self.limits = limits.peak_bytes, limits
        self.bare = LocalSearch(graph, limit, share)
        self.under = LocalSearch(graph, limit, share, bytes_at=lambda plan: self.grouped(plan).least_bytes_at_executions)
        """The search that counts the bytes which no stays can free."""
        self.best: Plan | None = None
        """The cheapest plan found, with its stays."""
        self.base: Plan | None = None
        """The same plan without stays."""
        self._grouped: dict[int, tuple[Plan, GroupedPlan]] = {}

    # -- one plan ------------------------------------------------------------------------------------------------------

    def grouped(self, plan: Plan) -> GroupedPlan:
        if id(plan) not in self._grouped:
            with self.limit.unit(PREPARATION * len(plan.sequence)):
                self._grouped[id(plan)] = plan, GroupedPlan(plan)
        return self._grouped[id(plan)][1]

    @property
    def least(self) -> float:
        return math.inf if self.best is None else self.best.cost_seconds

    def placed(self, plan: Plan) -> Plan | None:
        """Returns the plan with stays by which it fits, if it then costs less than the cheapest one so far."""
        if plan.cost_seconds >= self.least or plan.peak_bytes <= self.budget:
            return plan if plan.cost_seconds < self.least else None
        grouped, most_stall = self.grouped(plan), self.least - plan.cost_seconds
        if grouped.least_bytes > self.budget:
            return None
        with self.limit.unit(PLACEMENT * len(plan.sequence)):
            found = place(grouped, self.limits, most_stall)
        return found if found is not None and found.cost_seconds < self.least else None

    def consider(self, plan: Plan) -> bool:
        """Brings a plan down by stays, after drops where these free too little. Returns True for the cheapest so far."""
        if plan.cost_seconds < self.least and plan.peak_bytes > self.budget:
            plan = self.under.bring_down(plan, self.budget)
        found = self.placed(plan)
        if found is None:
            return False
        self.best, self.base = found, plan
        self.base = self.fill(plan, self.budget)  # with what the stays leave free
        return True

    def is_better(self, found: Plan, plan: Plan, target: int) -> bool:
        """Returns True for a plan that is cheaper with its stays than all before."""
        placed = self.placed(found)
        self.best = placed or self.best
        return placed is not None

    # -- sources of plans ------------------------------------------------------------------------------------------------

    def run(self, starts: Collection[Plan], enough: float = -math.inf, thorough: bool = True) -> Plan | None:
        """Returns the cheapest plan found from ``starts``, which have no stays; None if none fits.

        One of ``enough`` seconds ends the search. Unless ``thorough``, only the starts are brought down.
        """

        def is_done() -> bool:
            return self.is_over() or (self.best is not None and self.seconds_of(self.best) <= enough)

        fastest, *others = self.bare.front(starts)
        for start in (fastest, *others):
            if is_done() or start.cost_seconds >= self.least:
                break
            self.consider(start)
        if not thorough:
            return self.best
        for share in (0.5, 1.0):
            level = self.budget + int(share * self._reach(fastest))
            for plan in () if is_done() else self.bare.solved(starts, level, enough, near=1):
                self.consider(plan)
        if not is_done():
            self._from_program(fastest)
        failures = trial = 0
        while self.base is not None and failures < settings.trials and not is_done():
            ruined = self.bare.ruined(self.base, trial)
            level = max(self.base.peak_bytes, self.budget)
            improves = self.consider(self.bare.bring_down(ruined, level, noisy=trial % 3 == 2))
            failures, trial = 0 if improves else failures + 1, trial + 1
        return self.best

    def _reach(self, fastest: Plan) -> int:
        """Returns the bytes beyond the budget that stays could free without waiting, by the fastest plan."""
        grouped = self.grouped(fastest)
        if any(one.is_immediate for one in grouped.storables):
            return max(fastest.peak_bytes - self.budget, 0)
        carried = grouped.store_rate * float(grouped.clock[grouped.num_forward])
        return int(max(min(carried, fastest.peak_bytes - self.budget), 0))

    def _from_program(self, plan: Plan) -> None:
        """Considers what a linear program saves at least half of. It counts the bytes beside from ``plan``."""
        from autoremat.planner.search.joint_program import JointProgram  # SciPy's solvers take long to import

        program = JointProgram(self.graph, self._seconds_of_ops(plan), self.limits.host_bytes)
        began = time.monotonic()
        with self.limit.unit(2 * PROGRAM * len(self.graph.ops)):
            shares = program.solve(self.budget, plan, MOST_SECONDS)
        if time.monotonic() - began >= MOST_SECONDS:  # by the solver's clock
            self.limit.interrupted = self.limit.ended_by_clock = True
        if shares is not None:
            saved = admissible(self.graph, frozenset(np.flatnonzero(shares >= 0.5).tolist()))
            if found := self.plan(build_schedule(self.graph, saved), "program"):
                self.consider(found)

    def _seconds_of_ops(self, plan: Plan) -> NDArray[np.float64]:
        """For each op, its seconds under a plan; zero if that does not run it first in its own half."""
        sequence, seconds = np.array(plan.sequence), np.zeros(len(self.graph.ops))
        own = (np.arange(len(sequence)) < len(plan.schedule.forward)) == (sequence < self.graph.num_forward)
        seconds[sequence[own]] = self.grouped(plan).seconds[own]
        return seconds


def admissible(graph: Graph, saved: frozenset[int]) -> frozenset[int]:
    """Returns ``saved`` with the results of those ops that would have to run again and must not."""
    while True:
        again = graph.ancestors(graph.producers(graph.backward_needs - saved), saved)
        needed = frozenset(value for index in again if not graph.ops[index].may_run_again for value in graph.made[index])
        if not needed:
            return saved
        saved |= needed


def lowest_with_stays(graph: Graph, limit: WorkLimit, limits: Limits, starts: Collection[Plan]) -> Plan | None:
    """Returns the plan with stays of the least peak found, at any number of seconds; None if no stays lower the peak."""
    search = StaysSearch(graph, limit, 1.0, replace(limits, peak_bytes=0))
    lowest = min(starts, key=lambda plan: (plan.peak_bytes, plan.cost_seconds))
    best, peak = None, lowest.peak_bytes
    for base in (search.under.least_peak(starts, 0), lowest):
        low = level = search.grouped(base).least_bytes
        for _ in range(settings.levels):
            if level >= peak:
                break
            found = StaysSearch(graph, limit, 1.0, replace(limits, peak_bytes=level)).placed(base)
            if found is None:
                low = level
            else:
                best, peak = found, found.peak_bytes
            level = (low + peak) // 2
    return best
