"""The budget of time: the least peak of a step that takes little longer than under its plan without a budget.

A time is the sum of the kernels of a step (:mod:`autoremat.planner.cost.durations`). The search answers the opposite question,
the least cost for a budget in bytes, so it bisects over budgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import ROUNDING


@dataclass(frozen=True)
class TimeBudget:
    """The seconds that a step may take: those of its plan without a budget, and a share of them beyond."""

    plan: Plan
    """The plan without a budget: the fastest one, or a slightly slower one whose peak torch's own partition does not exceed."""
    max_slowdown: float
    """Share of the seconds of ``plan`` by which a step may exceed them."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step under the plan without a budget."""
        return self.plan.predicted_seconds

    def slowdown(self, plan: Plan) -> float:
        """Returns the share by which the step under ``plan`` takes longer than under the plan without a budget.

        It is negative for a faster plan, as that of a graph that chunks the loss.
        """
        if self.seconds:
            return plan.predicted_seconds / self.seconds - 1.0
        return math.inf if plan.predicted_seconds else 0.0

    def keeps(self, plan: Plan) -> bool:
        """Returns True if the step under ``plan`` keeps to the time."""
        return self.slowdown(plan) <= self.max_slowdown + ROUNDING
