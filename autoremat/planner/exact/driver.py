"""The event-gap model put to work: relaxations of growing depth give first plans, neighbourhoods improve the best of them.

How much is tried follows from the time limit that was asked for, not from the clock: the clock only cuts short.
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
"""How large a model is tried, per second of the time limit, so that its relaxation leaves time for neighbourhoods."""

NEIGHBOURHOODS_PER_SECOND = 2

DEPTHS = (1, 2, 4, 8, 16, 32)
"""Of the models that are tried, as far as they are not too large."""

DEEPEST_START, START_PENALTY, START_SHARE = 2, 2.0, 0.3
"""First plans come from models up to this depth; the whole peak in excess costs so many steps; each may take this share of
the time limit."""


@dataclass
class Descent:
    """The search on one graph for one budget in bytes; ``plans`` are all that were found, ``peak`` is without
    recomputation. ``within_gap`` says of a plan that fits whether it ends the search."""

    graph: Graph
    budget: int
    peak: int
    time_limit: float
    seed: int
    within_gap: Callable[[Plan], bool]
    deadline: float
    """A time of the monotonic clock, in seconds. How much is tried follows from ``time_limit`` alone."""

    def __post_init__(self) -> None:
        self.plans: list[Plan] = []
        self.interrupted = False

    def models(self) -> list[IntervalModel]:
        """Models of growing depth, as far as they grow and are not too large."""
        found: list[IntervalModel] = []
        for depth in DEPTHS:
            model = IntervalModel(self.graph, depth)
            if model.columns > COLUMNS_PER_SECOND * self.time_limit or (found and model.columns == found[-1].columns):
                break
            found.append(model)
        return found

    def run(self, starts: list[Plan]) -> None:
        """Find plans; ``starts`` (at least one) are plans to begin from, if they are better than those of the relaxations."""
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
        """The relaxation of the last of ``models``, None if out of time; first plans come from the first ones' on the way."""
        relaxed: Vector | None = None
        support, before = np.zeros(0), models[0]
        for model in models:
            current = self._improvement(model)
            current.relax(model.nothing_recomputed())
            relaxed = current.relaxed
            if relaxed is None:
                self.interrupted = True
                break
            # A deeper relaxation spreads over more places than any plan can; with the shallower ones' it has plans.
            support = np.maximum(model.carried_over(before, support), relaxed) if len(support) else relaxed
            before = model
            if model.depth <= DEEPEST_START:
                self._begin(current, support)
        return relaxed

    def _begin(self, current: Improvement, support: Vector) -> None:
        """A first plan, among what the relaxations use."""
        begun = time.monotonic()
        chosen = current.among(np.flatnonzero(support > 1e-6), START_PENALTY, self.time_limit * START_SHARE)
        if chosen is not None:
            self.plans.append(Incumbent.of(current.model, chosen).plan)
        self.interrupted = self.interrupted or time.monotonic() - begun > self.time_limit * START_SHARE

    def _score(self, plan: Plan) -> float:
        """Seconds, with what the bytes over the budget cost at :data:`START_PENALTY`."""
        over = plan.timeline.bytes_at - self.budget
        return plan.cost_seconds + START_PENALTY * self.graph.step_seconds / self.peak * float(over[over > 0].sum())


def improve(
    graph: Graph, budget: int | None, time_limit: float, seed: int, found: PlanningResult, good_gap: float, deadline: float
) -> PlanningResult:
    """The outcome ``found``, or a better one: stops at a plan whose gap, as a share of the step, is ``good_gap`` or less."""
    if budget is None or graph.fuses or found.is_converged(good_gap):
        return found

    def within_gap(plan: Plan) -> bool:
        return found.within_gap(plan, good_gap)

    descent = Descent(graph, budget, found.baseline.peak_bytes, time_limit, seed, within_gap, deadline)
    descent.run([found.plan or found.smallest])
    return found.with_plans(descent.plans, budget, descent.interrupted)
