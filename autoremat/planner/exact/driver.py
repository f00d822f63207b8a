"""Search with the interval model: relaxations of growing depth give first plans, and neighbourhoods improve the best one.

The amount of work follows from the requested time limit, not from the clock. The clock can only interrupt it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoremat.planner.exact.interval_model import IntervalModel, Vector, recomputations
from autoremat.planner.exact.large_neighborhood import WHOLE_COLUMNS, Improvement, Incumbent
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import PlanningResult

COLUMNS_PER_SECOND = 1500
"""Columns of the largest model that is tried, per second of the time limit. Its relaxation leaves time for neighbourhoods."""

NEIGHBOURHOODS_PER_SECOND = 2

DEPTHS = (1, 2, 4, 8, 16, 32)
"""Depths of the models that are tried, as long as they are not too large."""

DEEPEST_START, START_PENALTY, START_SHARE = 2, 2.0, 0.3
"""Depth up to which models give first plans. Penalty, in steps, of an excess as large as the baseline's peak. Share of the time
limit for each first plan."""


@dataclass
class Descent:
    """Search on one graph for one budget in bytes.

    ``peak`` is the peak without recomputation. ``within_gap`` returns True for a fitting plan that ends the search. ``plans``
    collects all plans that were found.
    """

    graph: Graph
    budget: int
    peak: int
    time_limit: float
    seed: int
    within_gap: Callable[[Plan], bool]
    deadline: float
    """Time of the monotonic clock, in seconds. The amount of work follows from ``time_limit`` alone."""

    def __post_init__(self) -> None:
        self.plans: list[Plan] = []
        self.interrupted = False

    def models(self) -> list[IntervalModel]:
        """Returns models of growing depth, as long as they grow and are not too large."""
        found: list[IntervalModel] = []
        for depth in DEPTHS:
            model = IntervalModel(self.graph, depth)
            if model.columns > COLUMNS_PER_SECOND * self.time_limit or (found and model.columns == found[-1].columns):
                break
            found.append(model)
        return found

    def run(self, starts: list[Plan]) -> None:
        """Searches for plans, starting from the best of ``starts`` (at least one plan) and of the plans of the relaxations."""
        self.plans += starts
        models = self.models()
        if not models:
            return
        relaxed: Vector | None = None
        if models[-1].columns > WHOLE_COLUMNS:
            relaxed = self._relax(models)
        start = min(self.plans, key=self._score)
        model = IntervalModel(self.graph, models[-1].depth, recomputations(self.graph, start.schedule))
        improvement = self._improvement(model)
        if relaxed is not None:
            improvement.relaxed = model.carried_over(models[-1], relaxed)
        neighbourhoods = int(NEIGHBOURHOODS_PER_SECOND * self.time_limit)
        self.plans += improvement.run(model.choice(start.schedule), neighbourhoods, self.within_gap)
        self.interrupted = self.interrupted or improvement.interrupted

    def _improvement(self, model: IntervalModel) -> Improvement:
        return Improvement(model, self.budget, self.peak, self.seed, self.deadline)

    def _relax(self, models: list[IntervalModel]) -> Vector | None:
        """Returns the relaxation of the last of ``models``, or None if time runs out. The shallow models also give first
        plans."""
        relaxed: Vector | None = None
        support, before = np.zeros(0), models[0]
        for model in models:
            current = self._improvement(model)
            current.relax(model.nothing_recomputed())
            relaxed = current.relaxed
            if relaxed is None:
                self.interrupted = True
                break
            # A deeper relaxation spreads over more sites than any plan can use. Merged with the shallower ones, it contains
            # plans.
            support = np.maximum(model.carried_over(before, support), relaxed) if len(support) else relaxed
            before = model
            if model.depth <= DEEPEST_START:
                self._begin(current, support)
        return relaxed

    def _begin(self, current: Improvement, support: Vector) -> None:
        """Adds a first plan that uses only the columns of ``support``."""
        begun = time.monotonic()
        chosen = current.among(np.flatnonzero(support > 1e-6), START_PENALTY, self.time_limit * START_SHARE)
        if chosen is not None:
            self.plans.append(Incumbent.of(current.model, chosen).plan)
        self.interrupted = self.interrupted or time.monotonic() - begun > self.time_limit * START_SHARE

    def _score(self, plan: Plan) -> float:
        """Returns the seconds of ``plan``, plus the penalty of its bytes over the budget at :data:`START_PENALTY`."""
        over = plan.timeline.bytes_at - self.budget
        return plan.cost_seconds + START_PENALTY * self.graph.step_seconds / self.peak * float(over[over > 0].sum())


def improve(
    graph: Graph, budget: int | None, time_limit: float, seed: int, found: PlanningResult, good_gap: float, deadline: float
) -> PlanningResult:
    """Returns ``found`` or a better result. A plan whose optimality gap, as a share of the step, is at most ``good_gap`` ends
    the search."""
    if budget is None or graph.fuses or found.is_converged(good_gap):
        return found

    def within_gap(plan: Plan) -> bool:
        return found.within_gap(plan, good_gap)

    descent = Descent(graph, budget, found.baseline.peak_bytes, time_limit, seed, within_gap, deadline)
    descent.run([found.plan or found.smallest])
    return found.with_plans(descent.plans, budget, descent.interrupted)
