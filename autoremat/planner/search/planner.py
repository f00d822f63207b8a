"""The planner of one step: from a graph and a budget to a checked plan with lower bounds."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.local_search import LocalSearch, pareto
from autoremat.planner.search.lower_bounds import Bounds, Moments
from autoremat.planner.search.placement import MANY, relieving
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.single_phase import OnePhaseBounds, OnePhaseStarts
from autoremat.planner.search.starts import Starts
from autoremat.planner.search.stays_search import StaysSearch, lowest_with_stays
from autoremat.planner.search.time_budget import TimeBudget
from autoremat.planner.search.work_limit import CHECK, PLACEMENT, WorkLimit
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.search

Accepts = Callable[[Plan], bool]
"""A condition on plans beside their peak."""


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
    """Plans one step. ``baseline`` is available at once, because a budget can be a share of its peak."""

    graph: Graph
    time_limit: float = 10.0
    """Limit in seconds, of which follows the work of the search (:mod:`autoremat.planner.search.work_limit`)."""
    moves: bool = True
    """False for the minimum cuts alone, without the local search."""
    given: tuple[Plan, ...] = ()
    """Plans from outside the search, such as a policy's."""
    soft_budget_bytes: int | None = None
    """Peak that a plan without a budget stays below, unless that costs much time. The fastest plan may save little time for
    much more memory."""
    host_bytes: int | None = None
    """Bound on the bytes of stays on the host; None: no bound."""
    found: list[Plan] = field(default_factory=list, init=False)
    """Plans found for budgets, kept so that a later, larger budget never costs more than an earlier one."""

    def __post_init__(self) -> None:
        self.limit = WorkLimit(self.time_limit)
        graph, limit = self.graph, self.limit
        self.has_forms = any(value.forms for value in graph.values) and not graph.single_phase
        if graph.single_phase:
            self.starts: Starts | OnePhaseStarts = OnePhaseStarts(graph, limit)
            self.moments: Bounds = OnePhaseBounds(graph, limit)
        else:
            self.starts = starts = Starts(graph, limit)
            with limit.unit():
                self.moments = Moments(graph, starts.mincut)
        self._seconds: dict[int, float] = {}
        self.baseline = self.starts.save_everything()
        self.check(self.baseline, ignores_recompute=True)

    @property
    def ended_by_clock(self) -> bool:
        """True if the clock has ended a search."""
        return self.limit.ended_by_clock

    def restart(self) -> None:
        """Begins a new search with all its work. Starts stay; plans that were found for other budgets go.

        The plan for a budget therefore does not depend on earlier searches.
        """
        self.limit.restart()
        self.found.clear()
        self._seconds.clear()

    def check(self, plan: Plan, ignores_recompute: bool = False) -> None:
        """Raises ``PlanInvalid`` if ``plan`` breaks a rule, within the limit of the search. See :meth:`Plan.check`."""
        with self.limit.unit(CHECK * len(plan.sequence)):
            plan.check(ignores_recompute=ignores_recompute)

    # -- plans that do not depend on the budget --------------------------------------------------------------------------

    @cached_property
    def plans(self) -> list[Plan]:
        """The minimum cuts and the given plans, without stays."""
        return [*self.starts.plans, *self.given]

    @cached_property
    def smallest(self) -> Plan:
        """The plan of the least peak that the first moves find, without the search for it."""
        return self._lowered(quick=True)

    @cached_property
    def lowest(self) -> Plan:
        """The plan of the minimum peak found. The search for it takes no work from one for a budget."""
        return min(self.smallest, self._lowered(quick=False), key=_by_peak)

    def _lowered(self, quick: bool) -> Plan:
        """Returns the plan of the least peak found, without recomputation that this peak does not demand."""
        lowest = min(self.plans, key=_by_peak)
        if not self.moves:
            return lowest
        share = settings.quick_share if quick else settings.least_peak_share
        with _without_garbage_collection(), self.limit.beside(share) as limit:
            search, bound = LocalSearch(self.graph, limit, settings.drops_share), self._least_bytes()
            found = search.bring_down(lowest, bound) if quick else search.least_peak(self.plans, bound)
            found = min(lowest, LocalSearch(self.graph, limit).fill(found, found.peak_bytes), key=_by_peak)
            if self.has_forms:
                found = lowest_with_stays(self.graph, limit, self.host_bytes, [found, *self.plans]) or found
        self.check(found)
        return found

    @cached_property
    def least_cost(self) -> float:
        """Least cost of any plan in seconds: that of the first minimum cut."""
        return min(plan.cost_seconds for plan in self.plans)

    def fastest(self, accepts: Accepts | None = None) -> Plan | None:
        """Returns the plan of least time, without a bound on memory."""
        return min(self.plans, key=_by_cost) if accepts is None else self.choose(None, accepts=accepts)

    def least_traffic(self) -> Plan:
        """Returns the plan that recomputes only what saving would slow down."""
        return self.starts.least_traffic()

    # -- plans for a budget ----------------------------------------------------------------------------------------------

    def find(self, budget_bytes: int | None, accepts: Accepts | None = None) -> PlanningResult:
        """Returns the cheapest plan found with a peak of at most ``budget_bytes`` (None: no bound), and the lower bounds.

        With ``accepts``, only plans that it admits count, out of those of :meth:`front`. A lower peak is not searched for then:
        what is accepted need not fall with the peak.
        """
        best = self.choose(budget_bytes, accepts=accepts)
        is_searched = best is None and accepts is None and self.moves
        known = (*self.plans, *self.found) if self.limit.interrupted else (self.smallest, *self.plans, *self.found)
        smallest = self.lowest if is_searched else min(known, key=_by_peak)
        seconds = 0.0 if budget_bytes is None else self._least_seconds(budget_bytes)
        if best is not None and budget_bytes is not None and accepts is None:
            seconds = min(seconds, best.cost_seconds)
        return self._result(best, smallest, seconds, is_searched)

    def choose(self, budget_bytes: int | None, accepts: Accepts | None = None) -> Plan | None:
        """Returns the plan of :meth:`find` without the lower bounds."""
        with _without_garbage_collection():
            if accepts is not None:
                fitting = (p for p in self.front() if (budget_bytes is None or p.peak_bytes <= budget_bytes) and accepts(p))
                best = min(fitting, key=_by_cost, default=None)
            elif budget_bytes is None:
                best = self._without_budget()
            else:
                best = self._cheapest(budget_bytes)
            if best is not None:
                self.check(best)
        return best

    def _cheapest(self, budget: int, lowers: bool = True) -> Plan | None:
        """Returns the cheapest plan found within ``budget`` bytes. If the starts lead to none and it ``lowers``, it is that of
        the least peak."""
        graph, limit, share = self.graph, self.limit, settings.plans_share
        known = [plan for plan in (*self.plans, *self.found) if plan.peak_bytes <= budget]
        best = min(known, key=_by_cost, default=None)
        if not self.moves or (best is not None and best.cost_seconds <= self.least_cost):
            return best
        enough = max(self._least_seconds(budget), self.least_cost) + settings.good_gap * self.graph.step_seconds
        if enough == math.inf:
            return best

        def suffices(plan: Plan) -> bool:
            return plan.cost_seconds <= enough

        starts = [plan for plan in (*self.plans, *self.found) if not plan.schedule.stays]
        search, found = LocalSearch(graph, limit, share), list[Plan]()
        if self.has_forms:
            solved = search.solved(starts, budget, suffices)[:1]
            with_stays = StaysSearch(graph, limit, share, budget, self.host_bytes).run([*starts, *solved], suffices)
            found += filter(None, (*solved, with_stays))
        if not found or not self._gains_much(found):
            found += filter(None, [search.cheapest(starts, budget, suffices)])
        if lowers and not found and best is None and self.lowest.peak_bytes <= budget:
            is_bare = not self.lowest.schedule.stays
            found += filter(None, [search.cheapest([self.lowest], budget, suffices) if is_bare else self.lowest])
        self.found += found
        return min((*known, *found), key=_by_cost, default=None)

    def _gains_much(self, found: list[Plan]) -> bool:
        """Returns True if stays make further trials without stays useless."""
        bare = min((plan.cost_seconds for plan in found if not plan.schedule.stays), default=math.inf)
        least = min(plan.cost_seconds for plan in found)
        return least - self.least_cost < (1.0 - settings.large_gain) * (bare - self.least_cost)

    def _without_budget(self) -> Plan | None:
        """Returns the cheapest plan within the soft budget if that costs little time; else the fastest plan."""
        fastest = min(self.plans, key=_by_cost)
        below = None if self.soft_budget_bytes is None else self._cheapest(self.soft_budget_bytes, lowers=False)
        if below is None:
            return fastest
        worth = below.cost_seconds - fastest.cost_seconds <= settings.soft_budget_cost * self.graph.step_seconds
        return below if worth else fastest

    def least_peak(self, time: TimeBudget) -> PlanningResult:
        """Returns the plan of the least peak found that keeps to ``time``, if there is one.

        Starts are solved for levels of the peak, by bisection, and trials go on from the lowest one within the time. They make
        the predicted seconds least instead of the cost. The lower bound on the cost is that for the plan's own peak.
        """
        given = [time.plan] if time.plan.graph is self.graph else []
        best = min((plan for plan in (*self.plans, *given) if time.keeps(plan)), key=_by_peak, default=None)
        if best is not None and self.moves:
            with _without_garbage_collection():
                best = self._descended(best, time)
            self.check(best)
        judged = self.judge(best or self.smallest, None)
        return replace(judged, plan=best, smallest=self.smallest)

    def _descended(self, best: Plan, time: TimeBudget) -> Plan:
        search = LocalSearch(self.graph, self.limit, settings.plans_share, lambda plan: plan.predicted_seconds)
        least, most, fails, level = self.moments.peak_bytes(), best.peak_bytes, -1, settings.time_levels
        while level - fails > 1:
            middle = (fails + level) // 2
            budget = least + (most - least) * middle // settings.time_levels
            found = next(filter(time.keeps, search.solved(self.plans, budget, time.keeps)), None)
            if self.has_forms and found is None:
                stays = StaysSearch(self.graph, self.limit, settings.plans_share, budget, self.host_bytes)
                found = stays.run(self.plans, time.keeps, thorough=False)
            if found is not None and time.keeps(found):
                level, best = middle, min(best, found, key=_by_peak)
            else:
                fails = middle
        return best if best.schedule.stays else search.lower(best, time.keeps)

    def front(self) -> list[Plan]:
        """Returns plans of many peaks and many amounts of saved bytes, for a graph that shares its budget with others."""
        if not self.moves:
            return self.plans
        return self._front

    @cached_property
    def _front(self) -> list[Plan]:
        graph, least, whole = self.graph, self.smallest.peak_bytes, self.starts.save_what_constraints_allow()
        steps = range(settings.peak_levels - 1, -1, -1)  # the plans of a level are starts of the next lower one
        levels = [int(least * (whole.peak_bytes / least) ** (step / settings.peak_levels)) for step in steps if least]
        found = [*self.plans, self.smallest]
        with _without_garbage_collection(), self.limit.beside(1.0) as limit:
            search = LocalSearch(graph, limit)
            for level in levels:
                found += search.solved(found, level, lambda plan: False, settings.front_starts)
            found += self._of_saved_bytes(limit)
            bases = pareto([plan for plan in found if not plan.schedule.stays]) if self.has_forms else []
            for level in levels if bases else ():
                with_stays = StaysSearch(graph, limit, 1.0, level, self.host_bytes)
                found += filter(None, [with_stays.run(bases, lambda plan: False, thorough=False)])
            for base in bases:
                if limit.has_passed():
                    break
                with limit.unit(3 * PLACEMENT * len(base.sequence)):
                    found += relieving(base)
        return found

    def _of_saved_bytes(self, limit: WorkLimit) -> list[Plan]:
        """Returns plans of several amounts of saved bytes: those of a graph with very many open calls, within its budgets."""
        many = replace(self.graph, calls=replace(self.graph.calls, in_flight=MANY))
        starts = [Plan.of(many, plan.schedule, plan.label) for plan in self.plans]
        search, peaks = LocalSearch(many, limit), [plan.peak_bytes for plan in starts]
        least, most, found = min(peaks), max(peaks), list[Plan]()
        for step in range(1, settings.saved_levels):
            solved = search.solved(
                starts, least + (most - least) * step // settings.saved_levels, lambda plan: False, settings.front_starts
            )
            found += [Plan.of(self.graph, plan.schedule, plan.label) for plan in solved]
        return found

    # -- results -----------------------------------------------------------------------------------------------------------

    def judge(self, plan: Plan, budget_bytes: int | None) -> PlanningResult:
        """Returns the result of :meth:`find` as if ``plan`` were the only plan found.

        Without a budget, the lower bound on the cost is that for the plan's own peak.
        """
        limit = plan.peak_bytes if budget_bytes is None else budget_bytes
        return self._result(plan if plan.peak_bytes <= limit else None, plan, self._least_seconds(limit), False)

    def _result(self, best: Plan | None, smallest: Plan, seconds: float, is_searched: bool) -> PlanningResult:
        interrupted = self.limit.interrupted or self.starts.lacks_cuts
        least = self._least_bytes()
        return PlanningResult(
            best, self.baseline, smallest, least, seconds, self.limit.simulated, interrupted, self.ended_by_clock, is_searched
        )

    def _least_bytes(self) -> int:
        return self.moments.peak_bytes()

    def _least_seconds(self, budget: int) -> float:
        """Returns a lower bound on the added seconds of plans within ``budget`` bytes; infinite if no plan fits."""
        if budget not in self._seconds:
            self._seconds[budget] = math.inf if budget < self._least_bytes() else self.moments.seconds(budget)
        return self._seconds[budget]


def _by_peak(plan: Plan) -> tuple[int, float]:
    return plan.peak_bytes, plan.cost_seconds


def _by_cost(plan: Plan) -> tuple[float, int]:
    return plan.cost_seconds, plan.peak_bytes
