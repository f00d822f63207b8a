"""Search with the interval model: relaxations of growing depth give first plans, and neighbourhoods improve the best one.

The amount of work follows from the requested time limit, not from the clock. The clock can only interrupt it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoremat.planner.exact.interval_model import IntervalModel, Vector, recomputations
from autoremat.planner.exact.large_neighborhood import Improvement, Incumbent
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.interval_model


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
        for depth in settings.depths:
            model = IntervalModel(self.graph, depth)
            if model.columns > settings.columns_per_second * self.time_limit or (found and model.columns == found[-1].columns):
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
        if models[-1].columns > SETTINGS.neighborhood.whole_model_columns:
            relaxed = self._relax(models)
        start = min(self.plans, key=self._score)
        model = IntervalModel(self.graph, models[-1].depth, recomputations(self.graph, start.schedule))
        improvement = self._improvement(model)
        if relaxed is not None:
            improvement.relaxed = model.carried_over(models[-1], relaxed)
        neighbourhoods = int(SETTINGS.neighborhood.neighborhoods_per_second * self.time_limit)
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
            if model.depth <= settings.first_plan_depth:
                self._begin(current, support)
        return relaxed

    def _begin(self, current: Improvement, support: Vector) -> None:
        """Adds a first plan that uses only the columns of ``support``."""
        begun = time.monotonic()
        time_limit = self.time_limit * settings.first_plan_share
        chosen = current.among(np.flatnonzero(support > 1e-6), settings.first_plan_penalty, time_limit)
        if chosen is not None:
            self.plans.append(Incumbent.of(current.model, chosen).plan)
        self.interrupted = self.interrupted or time.monotonic() - begun > time_limit

    def _score(self, plan: Plan) -> float:
        """Returns the seconds of ``plan``, plus ``first_plan_penalty`` for its bytes over the budget."""
        over = plan.timeline.bytes_at - self.budget
        penalty = settings.first_plan_penalty * self.graph.step_seconds / self.peak
        return plan.cost_seconds + penalty * float(over[over > 0].sum())


def improve(
    graph: Graph, budget: int | None, time_limit: float, seed: int, found: PlanningResult, good_gap: float, deadline: float
) -> PlanningResult:
    """Returns ``found`` or a better result. A plan whose optimality gap, as a share of the step, is at most ``good_gap`` ends
    the search."""
    if budget is None or not graph.is_plain or found.is_converged(good_gap):
        return found

    def within_gap(plan: Plan) -> bool:
        return found.within_gap(plan, good_gap)

    descent = Descent(graph, budget, found.baseline.peak_bytes, time_limit, seed, within_gap, deadline)
    descent.run([found.plan or found.smallest])
    return found.with_plans(descent.plans, budget, descent.interrupted)
