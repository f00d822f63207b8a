"""The event-gap model put to work: relaxations of growing depth give first plans, neighbourhoods improve the best of them.

How much is tried follows from the time limit that was asked for, not from the clock: the clock only cuts short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autoremat.graph import Graph
from autoremat.plans import Plan
from autoremat.solvers import Planning
from autoremat.solvers.event_gap import EventGap, Vector, recomputations
from autoremat.solvers.improve import Improvement, Incumbent

COLUMNS_PER_SECOND = 1500
"""How large a model is tried, per second of the time limit: its relaxation then takes about a sixth of the time."""

NEIGHBOURHOODS_PER_SECOND = 2

DEPTHS = (1, 2, 4, 8, 16, 32)
"""Of the models that are tried, as far as they are not too large."""

DEEPEST_START, START_PENALTY, START_SHARE = 2, 2.0, 0.3
"""First plans come from models up to this depth; the whole peak in excess costs so many steps; each may take this share of
the time limit."""


@dataclass
class Descent:
    """The search on one graph for one budget in bytes; ``plans`` are all that were found, ``peak`` is without
    recomputation. ``good_enough`` says of a plan that fits whether it ends the search."""

    graph: Graph
    budget: int
    peak: int
    time_limit: float
    seed: int
    good_enough: Callable[[Plan], bool]
    deadline: float
    """A time of the monotonic clock, in seconds. How much is tried follows from ``time_limit`` alone."""

    def __post_init__(self) -> None:
        self.plans: list[Plan] = []
        self.interrupted = False

    def improvement(self, depth: int, like: list[Plan]) -> Improvement:
        """The search on the model of this depth in which the plans ``like`` can be said."""
        sites = [pair for plan in like for pair in recomputations(self.graph, plan.schedule)]
        model = EventGap(self.graph, depth, sites)
        return Improvement(model, self.budget, self.peak, self.seed, self.deadline)

    def run(self, starts: list[Plan]) -> None:
        """Find plans; ``starts`` are plans to begin from, if they are better than those of the relaxations."""
        self.plans += starts
        deepest, support = None, np.zeros(0)
        for depth in DEPTHS:
            current = self.improvement(depth, [])
            grown = deepest is None or current.model.columns > deepest.model.columns
            if not grown or current.model.columns > COLUMNS_PER_SECOND * self.time_limit:
                break
            current.relax(current.model.nothing_recomputed())
            if current.relaxed is None:
                self.interrupted = True
                break
            # A deeper relaxation spreads over more places than any plan can; with the shallower ones' it has plans.
            known = np.zeros(current.model.columns) if deepest is None else current.model.carried_over(deepest.model, support)
            deepest, support = current, np.maximum(known, current.relaxed)
            if depth <= DEEPEST_START:
                self._begin(current, support)
        if deepest is not None:
            self._improve(deepest, min(self.plans, key=self._score))

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

    def _improve(self, deepest: Improvement, start: Plan) -> None:
        improvement = self.improvement(deepest.model.depth, [start])
        assert deepest.relaxed is not None
        improvement.relaxed = improvement.model.carried_over(deepest.model, deepest.relaxed)
        chosen = improvement.model.choice(start.schedule)
        neighbourhoods = int(NEIGHBOURHOODS_PER_SECOND * self.time_limit)
        self.plans += improvement.run(chosen, neighbourhoods, self.good_enough)
        self.interrupted = self.interrupted or improvement.interrupted


def improve(
    graph: Graph, budget: int | None, time_limit: float, seed: int, found: Planning, good_gap: float, deadline: float
) -> Planning:
    """The outcome ``found``, or a better one: stops at a plan whose gap, as a share of the step, is ``good_gap`` or less."""
    bound = found.lower_bound_seconds
    slack = good_gap * (graph.step_seconds + bound) + 1e-9 * graph.step_seconds

    def good_enough(plan: Plan) -> bool:
        return plan.added_seconds <= bound + slack

    if budget is None or math.isinf(bound) or (found.plan is not None and good_enough(found.plan)):
        return found
    descent = Descent(graph, budget, found.baseline.peak_bytes, time_limit, seed, good_enough, deadline)
    descent.run([found.plan or found.smallest])
    plans = sorted(descent.plans, key=lambda p: (p.cost_seconds, p.peak_bytes))
    best = next((plan for plan in plans if plan.peak_bytes <= budget), None)
    smallest = min((*plans, found.smallest), key=lambda p: (p.peak_bytes, p.cost_seconds))
    for plan in filter(None, (best, smallest)):
        plan.check()
    interrupted = found.interrupted or descent.interrupted
    candidates = found.candidates + len(plans)
    return replace(found, plan=best, smallest=smallest, candidates=candidates, interrupted=interrupted)
