"""The budget of time: the least peak of a step that takes little longer than under the fastest plan.

The search answers the opposite question: the least cost for a budget in bytes. :func:`least_peak` therefore bisects over
budgets. It looks for the least budget whose plan keeps the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import ROUNDING, Planner, PlanningResult
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.search


@dataclass(frozen=True)
class TimeBudget:
    """The seconds that a step may take: those of its fastest plan, and a share of them beyond."""

    fastest_seconds: float
    """Seconds of the step under the fastest plan, by the cost model."""
    max_slowdown: float
    """Share of these seconds by which a plan may exceed them."""

    @classmethod
    def of(cls, planner: Planner, max_slowdown: float) -> TimeBudget:
        """Returns the budget of time beside the fastest plan of ``planner``."""
        return cls(_seconds(_fastest(planner)), max_slowdown)

    def slowdown(self, plan: Plan) -> float:
        """Returns the share by which the step under ``plan`` takes longer than under the fastest plan.

        It is negative if the graph of the plan is another form of the step, which is faster.
        """
        return self._share_of(_seconds(plan))

    def keeps(self, plan: Plan) -> bool:
        """Returns True if the step under ``plan`` keeps to the time."""
        return self.slowdown(plan) <= self.max_slowdown + ROUNDING

    def excludes(self, planner: Planner, budget_bytes: int) -> bool:
        """Returns True if the lower bounds show that no plan within ``budget_bytes`` keeps to the time."""
        seconds = planner.graph.step_seconds + planner.moments.seconds(budget_bytes)
        return self._share_of(seconds) > self.max_slowdown + ROUNDING

    def _share_of(self, seconds: float) -> float:
        if self.fastest_seconds:
            return seconds / self.fastest_seconds - 1.0
        return math.inf if seconds else 0.0


def _seconds(plan: Plan) -> float:
    """Returns the seconds of the step under ``plan``, and zero where only the rounding of a sum is left of them."""
    step = plan.graph.step_seconds
    seconds = step + plan.cost_seconds
    return seconds if seconds > ROUNDING * step else 0.0


def _fastest(planner: Planner) -> Plan:
    """Returns the plan of least time. Among equally fast ones it has the lowest peak."""
    return min(planner.search.unfilled, key=lambda plan: (plan.cost_seconds, plan.peak_bytes))


def least_peak(planner: Planner, time: TimeBudget) -> Plan | None:
    """Returns the plan of the least peak found that keeps to ``time``; None if no plan does."""
    descent = Descent(planner, time)
    descent.run()
    if descent.best is not None:
        planner.check(descent.best)
    return descent.best


def least_peak_result(planner: Planner, time: TimeBudget) -> PlanningResult:
    """Returns the result of :func:`least_peak`. The lower bound on the added seconds is that for the plan's own peak."""
    plan, search = least_peak(planner, time), planner.search
    judged = planner.judge(plan or search.smallest, None)
    return replace(
        judged, plan=plan, smallest=search.smallest, candidates=search.simulated,
        interrupted=search.is_limited, ended_by_clock=planner.limit.ended_by_clock,
    )  # fmt: skip


class Descent:
    """The search for the least budget whose plan keeps to a budget of time.

    Budgets are levels of a fixed grid, from the minimum peak found to the peak of the fastest plan. The outcome at one level
    depends on no other level, so the level at which the search ends never rises with the allowed time. Peaks lie below their
    levels, and can be a little higher for more time.
    """

    def __init__(self, planner: Planner, time: TimeBudget) -> None:
        self.planner, self.time, self.level = planner, time, settings.time_levels
        self.least, self.most = planner.search.smallest.peak_bytes, _fastest(planner).peak_bytes
        self.known = min(filter(time.keeps, planner.search.unfilled), key=_rank, default=None)
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
        budget, search = self.bytes_at(level), self.planner.search
        if self.known is not None and self.known.peak_bytes <= budget:
            return True
        if self.time.excludes(self.planner, budget):
            return False
        search.filled = []
        search.fill(budget)
        if thorough:
            search.recreate(budget, self.time.keeps)
        found = [candidate.plan for candidate in search.filled if self.time.keeps(candidate.plan)]
        self.best = min(filter(None, (self.best, *found)), key=_rank, default=None)
        return bool(found)


def _rank(plan: Plan) -> tuple[int, float]:
    return plan.peak_bytes, plan.cost_seconds
