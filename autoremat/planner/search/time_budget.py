"""The budget of time: the least peak of a step that takes little longer than under its plan without a budget.

A time is the sum of the kernels of a step (:mod:`autoremat.planner.cost.durations`). The search answers the opposite question:
the least cost for a budget in bytes. :class:`Descent` therefore bisects over budgets. It looks for the least budget whose plan
keeps the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import dropwhile, takewhile

from autoremat.planner.plans.candidate import pareto_front
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.candidates import Search
from autoremat.planner.search.planning_result import ROUNDING
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.search


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


class Descent:
    """The search for the least budget whose plan keeps to a budget of time.

    Budgets are levels of a fixed grid, from the minimum peak found to the peak of the fastest plan. The outcome at one level
    depends on no other level, so the level at which the search ends never rises with the allowed time. Peaks lie below their
    levels, and can be a little higher for more time.
    """

    def __init__(self, search: Search, time: TimeBudget) -> None:
        self.search, self.time, self.level = search, time, settings.time_levels
        front = pareto_front(search.unfilled, lambda plan: plan)
        self.least, self.most = search.smallest.peak_bytes, front[0].peak_bytes
        given = [time.plan] if time.plan.graph is search.graph else []
        fast = takewhile(time.keeps, dropwhile(lambda plan: not time.keeps(plan), front))
        self.known = min((*fast, *given), key=_rank, default=None)
        self.best = self.known
        """The plan of the least peak seen that keeps to the time."""

    def run(self) -> None:
        """Finds the lowest level at which greedy fill keeps to the time, and descends from there by ruin and recreate."""
        if self.known is None:
            return
        fails, stride = -1, settings.time_stride
        while self.level - fails > 1:
            middle = (fails + self.level) // 2
            fails, self.level = (fails, middle) if self._keeps_at(middle) else (middle, self.level)
        while self.level > 0 and self._keeps_at((self.level - 1) // stride * stride, thorough=True):
            self.level = (self.level - 1) // stride * stride

    def bytes_at(self, level: int) -> int:
        """Returns the budget of a level in bytes."""
        return self.least + (self.most - self.least) * level // settings.time_levels

    def _keeps_at(self, level: int, thorough: bool = False) -> bool:
        """Returns True if a plan within the budget of ``level`` keeps to the time, by greedy fill alone or, if ``thorough``, by
        ruin and recreate too."""
        budget, search = self.bytes_at(level), self.search
        if self.known is not None and self.known.peak_bytes <= budget:
            return True
        search.forget()
        search.fill(budget)
        if thorough:
            search.recreate(budget, self.time.keeps)
        if search.joint is not None:
            search.joint.improve(budget, thorough, self.time.keeps)
        found = [candidate.plan for candidate in search.made_for_budgets if self.time.keeps(candidate.plan)]
        self.best = min(filter(None, (self.best, *found)), key=_rank, default=None)
        return bool(found)


def _rank(plan: Plan) -> tuple[int, float]:
    return plan.peak_bytes, plan.cost_seconds
