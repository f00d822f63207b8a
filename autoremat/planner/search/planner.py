"""From a graph and a budget to a plan."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.candidate import Candidate
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.candidates import EVERY_STRATEGY, Search, Strategies
from autoremat.planner.search.lower_bounds import Bounds, Moments

STEPS = 100
"""In how many equal steps of the baseline's peak memory is filled, where a larger budget must never cost more."""


WORTH = 0.05
"""The share of the step that staying below a ceiling may take, by the cost model."""

ROUNDING = 1e-9
"""Seconds that differ by a smaller share of the step are equal."""


@dataclass(frozen=True)
class PlanningResult:
    """The outcome of a search. ``plan`` is None if nothing found fits the budget."""

    plan: Plan | None
    baseline: Plan
    """No recomputation: everything that the backward reads is saved."""
    smallest: Plan
    """The plan of least memory found."""
    lower_bound_bytes: int
    """No plan has a lower peak."""
    lower_bound_seconds: float
    """No plan within the budget adds less recomputation; infinite if none fits."""
    candidates: int
    interrupted: bool
    """Whether the time limit, and not the search itself, ended it."""

    def within_gap(self, plan: Plan, good_gap: float) -> bool:
        """Whether ``plan`` costs at most a share ``good_gap`` of the step more than the lower bound."""
        step, bound = plan.graph.step_seconds, self.lower_bound_seconds
        return plan.added_seconds <= bound + good_gap * (step + bound) + ROUNDING * step

    def is_converged(self, good_gap: float) -> bool:
        """Whether nothing is left to look for: the plan is :meth:`within_gap`, or no plan fits."""
        return math.isinf(self.lower_bound_seconds) or (self.plan is not None and self.within_gap(self.plan, good_gap))

    def with_plans(self, plans: list[Plan], budget: int, interrupted: bool) -> PlanningResult:
        """With further ``plans``, of which the better ones are checked; ``budget`` in bytes."""
        known = [*filter(None, (self.plan, self.smallest)), *plans]
        fitting = [plan for plan in known if plan.peak_bytes <= budget]
        best = min(fitting, key=lambda p: (p.cost_seconds, p.peak_bytes), default=None)
        smallest = min(known, key=lambda p: (p.peak_bytes, p.cost_seconds))
        for plan in filter(None, (best, smallest)):
            plan.check()
        candidates, interrupted = self.candidates + len(plans), self.interrupted or interrupted
        return replace(self, plan=best, smallest=smallest, candidates=candidates, interrupted=interrupted)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """The search makes no cycles but many lists; each collection would walk all of torch's graphs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Planner:
    """Plans one training step. ``baseline`` is known at once, so that a budget can be a share of its peak."""

    graph: Graph
    time_limit: float = 10.0
    strategies: Strategies = EVERY_STRATEGY
    stepwise: bool = False
    """Whether memory is filled in steps, so that a larger budget never costs more, even planned afresh (see
    :meth:`_fill_stepwise`)."""
    bounds: Bounds | None = None
    """What filling in steps relies on: the graph's own moments, unless the graph is part of another problem."""
    given: tuple[Candidate, ...] = ()
    """Candidates from elsewhere: a policy's."""
    soft_budget_bytes: int | None = None
    """What a plan without a budget is not to exceed, unless that takes much time: the fastest of all may save little time at
    the price of much memory."""

    def __post_init__(self) -> None:
        self.search = Search(self.graph, time.monotonic() + self.time_limit, self.strategies, self.given)
        self.moments = Moments(self.graph, self.search.mincut)
        self.baseline = self.search.save_everything()
        self.baseline.check()

    def find(self, budget_bytes: int | None, accepts: Callable[[Plan], bool] | None = None) -> PlanningResult:
        """The cheapest plan found with a peak of at most ``budget_bytes`` (None: no bound), and the bounds.

        With ``accepts``, the cheapest for which that holds of those that :meth:`Search.spread_out` finds for every budget.
        """
        best = self.choose(budget_bytes, accepts=accepts)
        search, seconds = self.search, 0.0 if budget_bytes is None else self.moments.seconds(budget_bytes)
        bytes_, interrupted = self.moments.peak_bytes(), search.interrupted
        return PlanningResult(best, self.baseline, search.smallest, bytes_, seconds, search.simulated, interrupted)

    def judge(self, plan: Plan, budget_bytes: int | None) -> PlanningResult:
        """What :meth:`find` would say, had it found ``plan`` and nothing else. Without a budget the bound on added seconds is
        that of the plan's own peak."""
        limit = plan.peak_bytes if budget_bytes is None else budget_bytes
        fitting = plan if plan.peak_bytes <= limit else None
        bytes_, seconds = self.moments.peak_bytes(), self.moments.seconds(limit)
        return PlanningResult(fitting, self.baseline, plan, bytes_, seconds, 1, False)

    def choose(
        self,
        budget_bytes: int | None,
        known_seconds: float = math.inf,
        accepts: Callable[[Plan], bool] | None = None,
    ) -> Plan | None:
        """As :meth:`find`, without the bounds. A plan that costs ``known_seconds`` is had elsewhere: only a cheaper one is
        worth filling for."""
        with _without_garbage_collection():
            search = self.search
            if accepts is not None:
                search.spread_out()
                best = search.best(budget_bytes, accepts)
            elif self.stepwise:
                best = self._fill_stepwise(budget_bytes, known_seconds)
            elif budget_bytes is None:
                best = self._without_budget()
            else:
                best = search.cheapest(budget_bytes)
        for plan in filter(None, (best, self.search.smallest)):
            plan.check()
        return best

    def fastest(self, accepts: Callable[[Plan], bool] | None = None) -> Plan | None:
        """The plan of least time, whatever memory it needs."""
        return self.search.best(None) if accepts is None else self.choose(None, accepts=accepts)

    def _without_budget(self) -> Plan | None:
        """The cheapest plan below the ceiling if it is worth its time, else the fastest."""
        fastest = self.fastest()
        below = None if self.soft_budget_bytes is None else self.search.cheapest(self.soft_budget_bytes)
        if fastest is None or below is None:
            return fastest
        return below if below.cost_seconds - fastest.cost_seconds <= WORTH * self.graph.step_seconds else fastest

    def _fill_stepwise(self, budget: int | None, known_seconds: float) -> Plan | None:
        """The cheapest plan within ``budget`` of all that come from filling to a whole percent of the baseline's peak.

        What is filled for a budget is filled for every larger one too. Percents are taken from the budget down; once the
        bound says that no plan of so little memory is cheaper than what is found, the rest need not be looked at.
        """
        search, peak, bounds = self.search, self.baseline.peak_bytes, self.bounds or self.moments
        # The last step whose level, rounded down to a byte, is within the budget.
        top = STEPS if budget is None else min(STEPS, ((budget + 1) * STEPS - 1) // max(peak, 1))
        for step in range(top if Strategies.FILL in self.strategies else 0, 0, -1):
            level, best = peak * step // STEPS, search.best(budget)
            if best is None or level < search.smallest.peak_bytes or search.interrupted:
                break
            if min(best.cost_seconds, known_seconds) <= max(search.least_cost, bounds.seconds(level)):
                break
            search.fill(level)
        return search.best(budget)
