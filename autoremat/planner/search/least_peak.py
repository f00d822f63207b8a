"""The search for the least peak, by later recomputation and by ruin and recreate.

    excess over a target  =  sum over executions of max(0, bytes live there - target)

The target is a little below the least peak found. Each move drops a value that is idle at one of the fullest executions
(:mod:`.later_recomputation`). Of the moves there, the one of the least excess is taken, until none is left over the target. The
next target is lower then.

Where no move lowers the excess, a trial *ruins* the best plan: it leaves out recomputations of a stretch of the backward, so
that their values live longer. It *recreates* the plan by moves as before.

These plans have no segments, so greedy fill does not apply to them. :func:`relaxed` uses free memory instead: it leaves out
recomputations as long as the plan fits. :func:`recreated` improves plans of a given budget by the same moves: a trial ruins the
plan, and the moves with the fewest added seconds per byte of excess bring it back.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from autoremat.planner.cost.fused_traffic import traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.later_recomputation import IdleValues, with_backward
from autoremat.planner.search.work_limit import SIMULATION, WorkLimit
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.least_peak

SEED = 0


def lowered(starts: Sequence[Plan], bound: int, limit: WorkLimit) -> Plan:
    """Returns the plan of the least peak found from ``starts``, none of which has stays.

    A peak close to ``bound``, below which there is none, ends the search.

    Equal arguments give equal plans, unless the clock ends the search.
    """
    search = _Lowering(starts[0].graph, limit)
    best = min((search.descend(start) for start in starts), key=lambda plan: (plan.peak_bytes, plan.cost_seconds))
    generator, failures = random.Random(SEED), 0
    enough = int(bound * (1.0 + settings.good_gap))
    while failures < settings.patience and best.peak_bytes > enough and not search.is_over():
        found = search.descend(search.ruined(best, generator), best.peak_bytes)
        improves = found.peak_bytes < best.peak_bytes
        best, failures = (found, 0) if improves else (best, failures + 1)
    return relaxed(best, best.peak_bytes, limit)


def relaxed(plan: Plan, budget: int, limit: WorkLimit) -> Plan:
    """Returns ``plan``, which must fit, without recomputations that it does not need within ``budget`` bytes.

    The dearest ones come first; of one op, the first comes last.
    """
    search, seconds = _Lowering(plan.graph, limit), traffic_of(plan.graph).recompute_seconds
    for index in sorted(set(plan.recomputed), key=lambda index: (-seconds[index], index)):
        for place in reversed([place for place, other in enumerate(plan.schedule.backward) if other == index]):
            backward = plan.schedule.backward
            if limit.has_passed() or place >= len(backward) or backward[place] != index:
                continue
            for left in search.plans([with_backward(plan.graph, (*backward[:place], *backward[place + 1 :]))]):
                if left.peak_bytes <= budget and left.cost_seconds < plan.cost_seconds:
                    plan = left
    return plan


def recreated(plan: Plan, budget: int, enough: float, limit: WorkLimit) -> Plan:
    """Returns the cheapest plan found from ``plan`` within ``budget`` bytes by ruin and recreate; or ``plan`` itself.

    ``plan`` must fit, and has no stays. A cost of ``enough`` seconds ends the search. Equal arguments give equal plans, unless
    the clock ends the search.
    """
    search, generator = _Lowering(plan.graph, limit, moves_share=1.0), random.Random(SEED)
    best, failures = plan, 0
    while failures < settings.patience and best.cost_seconds > enough and not limit.has_passed():
        found = search.bring_down(search.ruined(best, generator), budget)
        if found.peak_bytes <= budget:
            found = relaxed(found, budget, limit)
        improves = found.peak_bytes <= budget and found.cost_seconds < best.cost_seconds
        best, failures = (found, 0) if improves else (best, failures + 1)
    return plan if best is plan else replace(best, label="recreated schedule")


class _Lowering:
    """Moves that lower the peak of plans of ``graph``, within ``limit``. None begins after ``moves_share`` of it."""

    def __init__(self, graph: Graph, limit: WorkLimit, moves_share: float = settings.moves_share) -> None:
        self.graph, self.limit, self.moves_share = graph, limit, moves_share
        ordered = (op for op in graph.ops if op.constraint is Constraint.RECOMPUTE and op.rematerializable)
        self.to_recompute = frozenset(value for op in ordered for value in op.outputs).difference(graph.forward_outputs)

    def is_over(self) -> bool:
        """Returns True if no further move may begin. The rest of the work is for leaving out recomputation."""
        return self.limit.has_passed(self.moves_share)

    def plans(self, schedules: Iterable[Schedule]) -> Iterator[Plan]:
        """Yields the simulated plans of those ``schedules`` that save nothing that a constraint recomputes."""
        for schedule in schedules:
            if not self.to_recompute or self.to_recompute.isdisjoint(schedule.saved(self.graph)):
                with self.limit.unit(SIMULATION * len(schedule.sequence)):
                    plan = Plan.of(self.graph, schedule, "least peak")
                yield plan

    def descend(self, plan: Plan, below: int | None = None) -> Plan:
        """Returns the plan of the least peak on a descent from ``plan``, whose first target is a little less than ``below``."""
        best, level = plan, below or plan.peak_bytes
        while level > 0:
            target = int(level * (1.0 - settings.step))
            plan, best = self._below(plan, target, best)
            if plan.peak_bytes > target:
                break
            level = best.peak_bytes
        return best

    def _below(self, plan: Plan, target: int, best: Plan) -> tuple[Plan, Plan]:
        """Returns the plan of the least excess over ``target`` that moves from ``plan`` reach, and the best plan on the way."""
        excess = _excess(plan, target)
        while excess:
            found = None
            for moved in self._moves(plan, target):
                best = min(best, moved, key=lambda plan: plan.peak_bytes)
                if _excess(moved, target) < excess:
                    found, excess = moved, _excess(moved, target)
            if found is None:
                break
            plan = found
        return plan, min(best, plan, key=lambda plan: plan.peak_bytes)

    def bring_down(self, plan: Plan, budget: int) -> Plan:
        """Returns the plan after the moves with the fewest added seconds per byte of excess over ``budget``.

        The moves end at a plan that fits, or where none lowers the excess.
        """
        excess = _excess(plan, budget)
        while excess:
            moved = [(other, _excess(other, budget)) for other in self._moves(plan, budget)]
            prices = [
                (max(other.cost_seconds - plan.cost_seconds, 0.0) / (excess - left), place)
                for place, (other, left) in enumerate(moved)
                if left < excess
            ]
            if not prices:
                break
            plan, excess = moved[min(prices)[1]]
        return plan

    def _moves(self, plan: Plan, target: int) -> Iterator[Plan]:
        """Yields the plans after one move, at the fullest execution at which some move lowers the excess."""
        if self.is_over():
            return
        with self.limit.unit(SIMULATION * len(plan.sequence)):
            idle, bytes_at, excess = IdleValues(self.graph, plan.schedule), plan.timeline.bytes_at, _excess(plan, target)
        fullest = np.argsort(-bytes_at, kind="stable")[: settings.executions]
        for position in fullest[bytes_at[fullest] > target].tolist():
            lowers = False
            for moved in self.plans(islice(idle.schedules(position), settings.moves)):
                lowers = lowers or _excess(moved, target) < excess
                yield moved
                if self.is_over():
                    return
            if lowers:
                return

    def ruined(self, plan: Plan, generator: random.Random) -> Plan:
        """Returns ``plan`` without some recomputations of a stretch of the backward."""
        backward = plan.schedule.backward
        begin, length = generator.randrange(len(backward)), generator.randint(1, max(1, len(backward) // 8))
        share = generator.random()
        left_out = {
            place
            for place in range(begin, min(begin + length, len(backward)))
            if backward[place] < self.graph.num_forward and generator.random() < share
        }
        schedule = with_backward(self.graph, (index for place, index in enumerate(backward) if place not in left_out))
        return next(self.plans([schedule]), plan)


def _excess(plan: Plan, target: int) -> int:
    return int(np.maximum(plan.timeline.bytes_at - target, 0).sum())
