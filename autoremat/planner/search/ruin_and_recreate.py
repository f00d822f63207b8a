"""Ruin and recreate: improves a filled plan by trials that each drop a few saved values and fill the memory again.

Greedy fill saves the value with the most gain per byte first, so a large value may take the memory of several small ones. A
trial *ruins* the saved set: it drops some values, and in every second trial it saves some recomputed values instead. It
*recreates* the set by greedy fill. The best plan found is the start of the next trial.

Source: Schrimpf et al., "Record Breaking Optimization Results Using the Ruin and Recreate Principle", J. Comput. Phys. 2000.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.greedy_fill import fill
from autoremat.planner.search.work_limit import DRAW, WorkLimit
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.search

SEED = 0


def recreate(
    start: Plan,
    rebuild: Callable[[frozenset[int]], Plan],
    budget: int,
    patience: int,
    is_good: Callable[[Plan], bool],
    limit: WorkLimit | None = None,
) -> Plan:
    """Returns the cheapest plan of a sequence of trials from ``start``, which must fit, within ``budget`` bytes.

    ``rebuild`` schedules and simulates a saved set. The trials end at a plan for which ``is_good`` returns True, or after
    ``patience`` trials in a row without an improvement, or once the plans' share of ``limit`` has passed. They are drawn from a
    fixed seed, so equal arguments give equal plans.
    """
    best, failures, draw, limit = start, 0, Draw(random.Random(SEED)), limit or WorkLimit()
    for trial in range(settings.recreation_trials * patience):
        if failures == patience or not best.saved or is_good(best) or limit.has_passed(settings.plans_share):
            break
        with limit.unit(DRAW * len(best.graph.ops)):
            drawn = draw.saved_set(best, trial)
        ruined = rebuild(drawn)
        found = fill(ruined, rebuild, budget, limit=limit) if ruined.peak_bytes <= budget else best
        improves = found.cost_seconds < best.cost_seconds
        best, failures = (found, 0) if improves else (best, failures + 1)
    return best


class Draw:
    """Draws the saved sets of trials."""

    def __init__(self, generator: random.Random) -> None:
        self.random = generator

    def saved_set(self, plan: Plan, trial: int) -> frozenset[int]:
        """Returns the saved set of ``plan`` without some values, and in every second trial with some others."""
        saved, ways = sorted(plan.saved), (self.neighbours, self.scattered, self.large)
        dropped = ways[trial % len(ways)](plan, saved)
        others = _recomputed(plan) if trial % 2 else []
        added = self.neighbours(plan, others) if others else set()
        return admissible(plan.graph, frozenset(saved) - dropped | added)

    def neighbours(self, plan: Plan, values: Sequence[int]) -> set[int]:
        """Returns a few consecutive ``values``."""
        first = self.random.randrange(len(values))
        return set(values[first : first + self._count()])

    def scattered(self, plan: Plan, values: Sequence[int]) -> set[int]:
        """Returns a few ``values``, all equally likely."""
        return set(self.random.sample(values, min(self._count(), len(values))))

    def large(self, plan: Plan, values: Sequence[int]) -> set[int]:
        """Returns a few ``values``, each as likely as its share of the bytes."""
        sizes = [plan.graph.values[value].bytes + 1 for value in values]
        return set(self.random.choices(values, sizes, k=self._count()))

    def _count(self) -> int:
        return self.random.randint(1, settings.recreation_values)


def _recomputed(plan: Plan) -> list[int]:
    """Returns the results of the recomputed ops that could be saved instead."""
    graph, again = plan.graph, set(plan.schedule.forward) & set(plan.schedule.backward)
    free = [index for index in sorted(again) if graph.ops[index].constraint is not Constraint.RECOMPUTE]
    saved = set(plan.saved)
    return [value for index in free for value in graph.ops[index].outputs if value not in saved]


def admissible(graph: Graph, saved: frozenset[int]) -> frozenset[int]:
    """Returns ``saved`` with the results of those ops that would have to run again and must not."""
    while True:
        missing = graph.producers(graph.backward_needs - saved)
        again = (graph.ops[index] for index in graph.ancestors(missing, saved))
        single = (op for op in again if not op.rematerializable or op.constraint is Constraint.SAVE)
        needed = frozenset(value for op in single for value in op.outputs)
        if not needed:
            return saved
        saved |= needed
