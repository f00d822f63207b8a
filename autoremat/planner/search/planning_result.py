"""The result of a search for a plan within a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.lower_bounds import lower_bound
from autoremat.planner.search.starts import without_recomputation

ROUNDING = 1e-9
"""Share of the step below which a difference in seconds counts as zero."""


@dataclass(frozen=True)
class PlanningResult:
    """Result of a search. ``plan`` is None if no plan found fits the budget."""

    plan: Plan | None
    baseline: Plan
    """Plan without recomputation: everything that the backward reads is saved."""
    smallest: Plan
    """Plan of the minimum peak found."""
    lower_bound_bytes: int
    """Lower bound on the peak of any plan."""
    lower_bound_seconds: float
    """Lower bound on the cost in seconds of any plan within the budget that keeps the sequence; infinite if none fits."""
    interrupted: bool
    """True if the time limit, as an amount of work, ended the search."""
    ended_by_clock: bool = False
    """True if the clock ended it earlier, or ended one that it builds on: another search may find another plan."""
    least_is_searched: bool = False
    """True if ``smallest`` is the result of a search for the least peak, which only budgets below other plans need."""
    least: Plan | None = None
    """The plan of the least peak found within the limit of seconds, if no plan found keeps to that and to the bytes."""

    def is_converged(self, good_gap: float) -> bool:
        """Returns True if the optimality gap of the plan is at most ``good_gap``, or if the bound shows that no plan fits."""
        step, bound = self.smallest.graph.step_seconds, self.lower_bound_seconds
        most = bound + good_gap * (step + bound) + ROUNDING * step
        return math.isinf(bound) or (self.plan is not None and self.plan.cost_seconds <= most)

    def with_plans(self, plans: list[Plan], budget: int | None, interrupted: bool) -> PlanningResult:
        """Returns the result after adding ``plans``, for a budget in bytes. The best and the smallest plan are checked."""
        known = [*filter(None, (self.plan, self.smallest)), *plans]
        best = min(filter(Limits(budget).keep, known), key=lambda p: (p.cost_seconds, p.peak_bytes), default=None)
        smallest = min(known, key=lambda p: (p.peak_bytes, p.cost_seconds))
        for plan in filter(None, (best, smallest)):
            plan.check()
        return replace(self, plan=best, smallest=smallest, interrupted=self.interrupted or interrupted)


def result_of(plan: Plan, budget: int | None) -> PlanningResult:
    """Returns the result of a search that has found ``plan`` alone, with the lower bounds of its graph."""
    bound = lower_bound(plan.graph, Limits(budget))
    found = PlanningResult(None, without_recomputation(plan.graph), plan, bound.peak_bytes, bound.seconds, False)
    return found.with_plans([plan], budget, False)
