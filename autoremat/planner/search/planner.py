"""The planner of one training step: from a graph and a budget to a checked plan with lower bounds."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.candidate import Candidate
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.candidates import EVERY_STRATEGY, Search, Strategies
from autoremat.planner.search.joint_search import JointSearch
from autoremat.planner.search.least_peak import recreated
from autoremat.planner.search.lower_bounds import Moments
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.time_budget import Descent, TimeBudget
from autoremat.planner.search.work_limit import CHECK, WorkLimit
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.search


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turns garbage collection off. The search creates many lists but no cycles, and each collection would walk all of torch's
    graphs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Planner:
    """Plans one training step. ``baseline`` is available at once, because a budget can be a share of its peak."""

    graph: Graph
    time_limit: float = 10.0
    """Limit in seconds, of which follows the work of the search (:mod:`autoremat.planner.search.work_limit`)."""
    strategies: Strategies = EVERY_STRATEGY
    given: tuple[Candidate, ...] = ()
    """Candidates from outside the search, such as a policy's schedule."""
    soft_budget_bytes: int | None = None
    """Peak that a plan without a budget stays below, unless that costs much time. The fastest plan may save little time for
    much more memory."""
    host_bytes: int | None = None
    """Bound on the bytes of stays on the host; None: no bound."""

    def __post_init__(self) -> None:
        self.limit = WorkLimit(self.time_limit)
        self.search = Search(self.graph, self.limit, self.strategies, self.given)
        with self.limit.unit():
            self.moments = Moments(self.graph, self.search.mincut)
        if Strategies.STORE in self.strategies and any(value.forms for value in self.graph.values):
            self.search.joint = JointSearch(self.search, self.moments, self.host_bytes)
        self.baseline = self.search.save_everything()
        self.check(self.baseline, ignores_recompute=True)

    @property
    def smallest(self) -> Plan:
        """The plan of the least peak among those that do not depend on the budget, without the search for it."""
        return self.search.smallest

    @property
    def lowest(self) -> Plan:
        """The plan of the minimum peak found, the same for every budget."""
        return self.search.lowest

    @property
    def ended_by_clock(self) -> bool:
        """True if the clock has ended a search."""
        return self.limit.ended_by_clock

    def restart(self) -> None:
        """Begins a new search with all its work. Candidates stay; plans that were filled for other budgets go.

        The plan for a budget therefore does not depend on earlier searches.
        """
        self.search.restart()

    def check(self, plan: Plan, ignores_recompute: bool = False) -> None:
        """Raises ``PlanInvalid`` if ``plan`` breaks a rule, within the limit of the search. See :meth:`Plan.check`."""
        with self.limit.unit(CHECK * len(plan.sequence)):
            plan.check(ignores_recompute=ignores_recompute)

    def find(self, budget_bytes: int | None, accepts: Callable[[Plan], bool] | None = None) -> PlanningResult:
        """Returns the cheapest plan found with a peak of at most ``budget_bytes`` (None: no bound), and the lower bounds.

        With ``accepts``, only plans that it admits count, out of those that :meth:`Search.spread_out` finds for all budgets. A
        lower peak is not searched for then: what is accepted need not fall with the peak.
        """
        best = self.choose(budget_bytes, accepts=accepts)
        search, smallest, is_searched = self.search, self.search.smallest, False
        if budget_bytes is not None and smallest.peak_bytes > budget_bytes and accepts is None:
            smallest = search.lowest
            is_searched = smallest.peak_bytes > budget_bytes
        seconds = 0.0 if budget_bytes is None else self._least_seconds(budget_bytes)
        if best is not None and budget_bytes is not None and accepts is None:
            best = self._recreated(best, budget_bytes, seconds)
            seconds = min(seconds, best.cost_seconds)
        ends = (search.is_limited, self.ended_by_clock)
        return PlanningResult(best, self.baseline, smallest, self._least_bytes(), seconds, search.simulated, *ends, is_searched)

    def _recreated(self, plan: Plan, budget: int, least_seconds: float) -> Plan:
        """Returns ``plan``, improved by ruin and recreate on its schedule if it costs much more than ``least_seconds``."""
        enough = least_seconds + settings.schedule_gap * self.graph.step_seconds
        tries = Strategies.LOWER | Strategies.RECREATE in self.strategies and not self.graph.single_phase
        if not tries or plan.schedule.stays or plan.cost_seconds <= enough:
            return plan
        with _without_garbage_collection(), self.limit.beside(self.limit.share_left) as limit:
            found = recreated(plan, budget, enough, limit)
        if found is not plan:
            self.check(found)
            self.search.lowered.append(found)  # so that a larger budget of this planner never costs more, until it restarts
        return found

    def judge(self, plan: Plan, budget_bytes: int | None) -> PlanningResult:
        """Returns the result of :meth:`find` as if ``plan`` were the only plan found.

        Without a budget, the lower bound on the cost is that for the plan's own peak.
        """
        limit = plan.peak_bytes if budget_bytes is None else budget_bytes
        fitting = plan if plan.peak_bytes <= limit else None
        ends = (self.limit.interrupted, self.ended_by_clock)
        return PlanningResult(fitting, self.baseline, plan, self._least_bytes(), self._least_seconds(limit), 1, *ends)

    def _least_bytes(self) -> int:
        return self.moments.peak_bytes()

    def _least_seconds(self, budget: int) -> float:
        """Returns a lower bound on the added seconds of plans within ``budget`` bytes; infinite if no plan fits."""
        return math.inf if budget < self._least_bytes() else self.moments.seconds(budget)

    def choose(self, budget_bytes: int | None, accepts: Callable[[Plan], bool] | None = None) -> Plan | None:
        """Returns the plan of :meth:`find` without the lower bounds, and so before its schedule is recreated."""
        with _without_garbage_collection():
            search = self.search
            if accepts is not None:
                search.spread_out()
                best = search.best(budget_bytes, accepts)
            elif budget_bytes is None:
                best = self._without_budget()
            else:
                best = search.cheapest(budget_bytes)
            smallest = search.smallest
            if best is None and budget_bytes is not None and accepts is None:
                best, smallest = search.lowered_to(budget_bytes), search.lowest
            for plan in filter(None, (best, smallest)):
                self.check(plan)
        return best

    def fastest(self, accepts: Callable[[Plan], bool] | None = None) -> Plan | None:
        """Returns the plan of least time, without a bound on memory."""
        return self.search.best(None) if accepts is None else self.choose(None, accepts=accepts)

    def least_peak(self, time: TimeBudget) -> PlanningResult:
        """Returns the plan of the least peak found that keeps to ``time``, if there is one.

        The lower bound on the cost is that for the plan's own peak.
        """
        descent = Descent(self.search, time)
        descent.run()
        if descent.best is not None:
            self.check(descent.best)
        judged = self.judge(descent.best or self.smallest, None)
        return replace(
            judged, plan=descent.best, smallest=self.smallest, candidates=self.search.simulated,
            interrupted=self.search.is_limited, ended_by_clock=self.ended_by_clock,
        )  # fmt: skip

    def least_traffic(self) -> Plan:
        """Returns the plan that recomputes only what saving would slow down."""
        return self.search.least_traffic()

    def front(self) -> list[Plan]:
        """Returns plans of many peaks and many amounts of saved bytes, for a graph that shares its budget with others."""
        return self.search.spread_out()

    def _without_budget(self) -> Plan | None:
        """Returns the cheapest plan within the soft budget if that costs little time; else the fastest plan."""
        fastest = self.fastest()
        below = None if self.soft_budget_bytes is None else self.search.cheapest(self.soft_budget_bytes)
        if fastest is None or below is None:
            return fastest
        worth = below.cost_seconds - fastest.cost_seconds <= settings.soft_budget_cost * self.graph.step_seconds
        return below if worth else fastest
