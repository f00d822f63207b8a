"""The local search with stays: it chooses the recomputation, and :mod:`.placement` the stays of each of its plans.

The link between device and host carries a certain number of bytes while the forward runs. It pays to carry those whose
recomputation is dear, and to compute the others again. So plans leave memory over the budget, and stays bring them down to it.
They come from larger budgets and from trials.
"""

import math
from collections.abc import Collection
from dataclasses import replace

from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan
from autoremat.planner.search.live_view import LiveView
from autoremat.planner.search.local_search import LocalSearch, SecondsOf, cost_of
from autoremat.planner.search.placement import place
from autoremat.planner.search.work_limit import PLACEMENT, PREPARATION, WorkLimit
from autoremat.planner.settings import settings


class SearchUnderStays(LocalSearch):
    """The search that counts the bytes which no stays can free."""

    def __init__(self, graph: Graph, limit: WorkLimit, share: float) -> None:
        super().__init__(graph, limit, share, bytes_at=lambda plan: self.grouped(plan).least_bytes_at_executions)
        self._grouped: dict[int, tuple[Plan, GroupedPlan]] = {}

    def grouped(self, plan: Plan) -> GroupedPlan:
        if id(plan) not in self._grouped:
            with self.limit.unit(PREPARATION * len(plan.sequence)):
                self._grouped[id(plan)] = plan, GroupedPlan(plan)
        return self._grouped[id(plan)][1]

    def view(self, plan: Plan) -> LiveView:
        """Returns the view. To drop a value frees nothing where a stay could free it, so it counts as idle only behind that."""
        view, grouped = super().view(plan), self.grouped(plan)
        may_be_idle, start, last = view.idle
        start = start.copy()
        for one in grouped.storables:
            start[view.of_value[one.value][0][1]] = grouped.begins[one.need]
        view.idle = may_be_idle, start, last
        return view


class StaysSearch(LocalSearch):
    """The search for plans within the bytes of ``limits`` on the device and on the host.

    Its plans have no stays. Each counts with those that bring it down to the budget.
    """

    def __init__(self, graph: Graph, limit: WorkLimit, share: float, limits: Limits, seconds_of: SecondsOf = cost_of) -> None:
        super().__init__(graph, limit, share, seconds_of, lambda plan: (self.best or plan).timeline.bytes_at)
        assert limits.peak_bytes is not None
        self.budget, self.limits = limits.peak_bytes, limits
        self.bare = LocalSearch(graph, limit, share)
        self.under = SearchUnderStays(graph, limit, share)
        self.best: Plan | None = None
        """The cheapest plan found, with its stays."""
        self.base: Plan | None = None
        """The same plan without stays."""
        self.grouped = self.under.grouped

    # -- one plan ------------------------------------------------------------------------------------------------------

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
        if found is not None:
            self.best, self.base = found, plan
        return found is not None

    def fill_base(self) -> None:
        """Uses what the stays leave free."""
        if self.base is not None:
            self.base = self.fill(self.base, self.budget)

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
        fastest, *others = self.bare.front(starts)
        for start in (*reversed(others), fastest):  # each recomputes less than the one before, and waits longer
            if self.is_done(enough) or (not self.consider(start) and self.least < math.inf and start.peak_bytes > self.budget):
                break
        if thorough:
            self._find_level(starts, self._reach(fastest), enough)
        self.fill_base()
        failures = trial = 0
        while thorough and self.base is not None and failures < settings.trials and not self.is_done(enough):
            ruined = self.bare.ruined(self.base, trial)
            level = max(self.base.peak_bytes, self.budget)
            improves = self.consider(self.bare.bring_down(ruined, level, noisy=trial % 3 == 2))
            if improves:
                self.fill_base()
            failures, trial = 0 if improves else failures + 1, trial + 1
        return self.best

    def is_done(self, enough: float) -> bool:
        return self.is_over() or (self.best is not None and self.seconds_of(self.best) <= enough)

    def _find_level(self, starts: Collection[Plan], reach: int, enough: float) -> None:
        """Considers plans of peaks up to ``reach`` bytes over the budget, then of peaks ever closer to the best one's."""
        best, width = self.budget if self.base is None else self.base.peak_bytes, reach // 4
        known, levels = list(starts), [self.budget + width * number for number in (4, 3, 2, 1)]
        while levels:
            for level in levels:  # from above: where recomputation alone costs too much, it does so below, too
                solved = [] if self.is_done(enough) else self.bare.solved(known, level, enough, near=1)
                known += solved
                best = level if any([self.consider(plan) for plan in solved]) else best
                if all(plan.cost_seconds >= self.least for plan in solved):
                    break
            width //= 2
            levels = [best + width, best - width] if width >= settings.rough_gap * self.budget else []
            levels = [level for level in levels if level > self.budget]

    def _reach(self, fastest: Plan) -> int:
        """Returns the bytes beyond the budget that stays could free without waiting, by the fastest plan."""
        grouped, beyond = self.grouped(fastest), float(max(fastest.peak_bytes - self.budget, 0))
        if not any(one.is_immediate for one in grouped.storables):
            beyond = min(beyond, grouped.store_rate * float(grouped.clock[grouped.num_forward]))
        if self.limits.host_bytes is not None:
            beyond = min(beyond, self.limits.host_bytes)
        return int(beyond)


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
