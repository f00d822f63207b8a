"""One local search over schedules: ruin a plan, bring it down by moves, fill the free memory by keeps.

    excess over a target  =  sum over executions of max(0, bytes live there - target)

A batch of moves is chosen by deltas on live ranges (:mod:`.moves`), and the simulator judges the batch. A quarter of a batch
that does not improve the plan is tried again, and four times as many follow one that does (Schrimpf et al., "Record Breaking
Optimization Results Using the Ruin and Recreate Principle", J. Comput. Phys. 2000).
"""

import itertools
import math
import random
import sys
from collections.abc import Callable, Collection, Hashable, Sequence, Set
from functools import partial
from operator import attrgetter

import numpy as np

from autoremat.planner.cost.durations import ROUNDING
from autoremat.planner.graph.arrays import Numbers
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.limits import undominated
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.live_view import Facts, LiveView, schedule_of
from autoremat.planner.search.moves import Move, Moves, keeps_of, relief
from autoremat.planner.search.work_limit import CHOICE, SIMULATION, STEP, VIEW, WorkLimit
from autoremat.planner.settings import settings

SecondsOf = Callable[[Plan], float]
"""What a search makes least."""

BytesOf = Callable[[Plan], Numbers]
"""The bytes at each execution that count against a target."""

Choice = Callable[[LiveView, int, Set[Hashable]], Sequence[Hashable]]
"""Applies at most so many moves to a view, without those that are banned, and returns their keys."""


cost_of: SecondsOf = attrgetter("cost_seconds")
bytes_of: BytesOf = attrgetter("timeline.bytes_at")


class LocalSearch:
    """The search on one graph, within ``limit``. Equal sequences of questions get equal plans, unless the clock ends it."""

    def __init__(
        self, graph: Graph, limit: WorkLimit, share: float = 1.0, seconds_of: SecondsOf = cost_of, bytes_at: BytesOf = bytes_of
    ) -> None:
        self.graph, self.limit, self.share, self.random = graph, limit, share, random.Random(0)
        self.seconds_of, self.bytes_at = seconds_of, bytes_at
        self.never_saved = graph.derived(Facts).never_saved
        self.seconds_of_a_byte = 1e-8 * graph.step_seconds
        """Seconds that each drop counts beside its own, so that free ones free many bytes."""

    def peak(self, plan: Plan) -> int:
        return int(self.bytes_at(plan).max(initial=0))

    def excess(self, plan: Plan, target: int) -> int:
        """Returns the bytes over the target, summed over the executions."""
        return int(np.maximum(self.bytes_at(plan) - target, 0).sum())

    def is_over(self) -> bool:
        return self.limit.has_passed(self.share)

    def plan(self, schedule: Schedule, label: str) -> Plan | None:
        """Returns the simulated plan, or None if it saves what a constraint recomputes."""
        if self.never_saved and not self.never_saved.isdisjoint(schedule.saved(self.graph)):
            return None
        with self.limit.unit(SIMULATION * len(schedule.sequence)):
            return Plan.of(self.graph, schedule, label)

    def view(self, plan: Plan) -> LiveView:
        with self.limit.unit(VIEW * len(plan.sequence)):
            return LiveView(plan, self.bytes_at(plan))

    # -- batches -------------------------------------------------------------------------------------------------------

    def _batches(self, plan: Plan, choose: Choice, improves: Callable[[Plan, Plan], bool], most_banned: int) -> Plan:
        """Returns the plan after batches of moves, each of which improves it."""
        most, banned = sys.maxsize, set[Hashable]()
        while len(banned) < most_banned and not self.is_over():
            view = self.view(plan)
            chosen = choose(view, most, banned)
            if not chosen:
                break
            found = self.plan(view.schedule(), plan.label)
            if found is not None and improves(found, plan):
                plan, most, banned = found, 4 * most, set()
            elif len(chosen) == 1:
                banned.add(chosen[0])
            else:
                most = max(len(chosen) // 4, 1)
        return plan

    def bring_down(self, plan: Plan, target: int, noisy: bool = False) -> Plan:
        """Returns the plan after drops that lower its excess over ``target``, those of the fewest seconds per byte first."""

        def choose(view: LiveView, most: int, banned: Set[Hashable]) -> list[Hashable]:
            """Applies drops until the deltas of the view fit, each at the fullest execution at which one helps."""
            chosen, stuck, drops = list[Hashable](), list[int](), Moves(view)
            while len(chosen) < most and len(stuck) <= settings.refusals and not self.is_over():
                over = view.bytes_at - target
                over[stuck] = 0
                fullest = int(over.argmax())
                if over[fullest] <= 0:
                    break
                with self.limit.unit():
                    best = self._best_move(drops, fullest, target, banned, noisy)
                    if best is None:
                        stuck.append(fullest)
                    else:
                        chosen.append(best.key(view))
                        drops.apply(best)
            return chosen

        def improves(found: Plan, plan: Plan) -> bool:
            return self.excess(found, target) < self.excess(plan, target)

        return plan if self.peak(plan) <= target else self._batches(plan, choose, improves, settings.refusals)

    def _best_move(self, drops: Moves, execution: int, target: int, banned: Set[Hashable], noisy: bool) -> Move | None:
        """Returns the move of the fewest seconds per byte of excess at an execution, if there is one."""
        view, over, best, least, judged = drops.view, drops.view.bytes_at - target, None, math.inf, 0
        for options in drops.at(execution, over[execution]):
            most, drops.steps = relief(over, options[0].gap(view)), drops.steps + 1
            for drop in options if most > 0.0 else ():
                price = max(drop.seconds, 0.0) + self.seconds_of_a_byte
                price *= self.random.uniform(0.7, 1.4) if noisy else 1.0
                if price >= least * most or (banned and drop.key(view) in banned):
                    continue
                judged += 1
                gained = relief(over, drop.spans(view)) if drop.extended else most
                if gained > 0.0 and price < least * gained:
                    best, least = drop, price / gained
        for drop in () if best else drops.dividing(execution):
            judged, price, gained = judged + 1, max(drop.seconds, 0.0) + self.seconds_of_a_byte, relief(over, drop.spans(view))
            if gained > 0.0 and price < least * gained and drop.key(view) not in banned:
                best, least = drop, price / gained
        self.limit.add(CHOICE * judged + STEP * drops.steps)
        drops.steps = 0
        return best

    def fill(self, plan: Plan, target: int) -> Plan:
        """Returns the plan, which must fit, after keeps that use the memory free below ``target`` and lower the cost."""

        def choose(view: LiveView, most: int, banned: Set[Hashable]) -> list[Hashable]:
            chosen = list[Hashable]()
            with self.limit.unit(VIEW * len(plan.sequence)):
                keeps = keeps_of(view)
            for keep in keeps:
                if len(chosen) == most:
                    break
                if keep.execution not in banned:
                    view.add(keep.spans)
                    if all(view.bytes_at[begin:end].max(initial=0) <= target for begin, end, _ in keep.spans):
                        view.removed.add(keep.execution)
                        chosen.append(keep.execution)
                    else:
                        view.add((begin, end, -more) for begin, end, more in keep.spans)
            return chosen

        can_gain = plan.recomputed or plan.schedule.materialised
        return self._batches(plan, choose, partial(self.is_better, target=target), 1) if can_gain else plan

    def is_better(self, found: Plan, plan: Plan, target: int) -> bool:
        return self.peak(found) <= target and self.seconds_of(found) < self.seconds_of(plan)

    def solve(self, plan: Plan, target: int, noisy: bool = False) -> Plan:
        """Returns the plan brought down to ``target``, and filled if it fits."""
        plan = self.bring_down(plan, target, noisy=noisy)
        return self.fill(plan, target) if self.peak(plan) <= target else plan

    # -- trials --------------------------------------------------------------------------------------------------------

    def ruined(self, plan: Plan, trial: int) -> Plan:
        """Returns the plan without recomputations of a stretch, or in odd trials with some values dropped."""
        if trial % 2:
            schedule = self._with_gaps(plan, trial % 4 == 1)
            return (None if schedule is None else self.plan(schedule, plan.label)) or plan
        draw, border = self.random, 0 if self.graph.single_phase else len(plan.schedule.forward)
        length = len(plan.sequence) - border
        begin, share = border + draw.randrange(length), draw.random()
        stretch = range(begin, begin + draw.randint(1, max(1, length // settings.stretches)))
        ran, left, materialised = set[int](), list[int](), set(plan.schedule.materialised)
        for execution, index in enumerate(plan.sequence):
            if execution in stretch:
                materialised.difference_update(self.graph.made[index])
            is_left_out = index in ran and execution in stretch and draw.random() < share
            ran.add(index)
            if execution >= border and not is_left_out:
                left.append(index)
        return self.plan(schedule_of(self.graph, left, materialised), plan.label) or plan

    def _with_gaps(self, plan: Plan, are_neighbours: bool) -> Schedule | None:
        """Returns the schedule with some values dropped, long gaps between two uses more often than short ones."""
        view = self.view(plan)
        gaps = [
            (number, behind, behind - before)
            for number in np.flatnonzero(view.idle[0]).tolist()
            if view.facts.may_run_again[view.value[number]] and view.size[number]
            for before, behind in itertools.pairwise((view.start[number], *view.uses[number]))
            if behind >= view.border
        ]
        if not gaps:
            return None
        count, drops = self.random.randint(1, settings.near), Moves(view)
        if are_neighbours:
            (first,) = self.random.choices(range(len(gaps)), [length for *_, length in gaps])
            picked = gaps[first : first + count]
        else:
            picked = self.random.choices(gaps, [view.size[number] * length for number, _, length in gaps], k=count)
        for number, behind, _ in picked:
            options = drops.around(number, behind - 1) if behind in view.uses[number] else []
            if options:
                drops.apply(self.random.choice(options))
        return view.schedule()

    def improve(self, plan: Plan, target: int, enough: float) -> Plan:
        """Returns the cheapest plan of a sequence of trials from one that fits. One of ``enough`` seconds ends them."""
        failures = trial = 0
        while failures < settings.trials and self.seconds_of(plan) > enough and not self.is_over():
            found = self.solve(self.ruined(plan, trial), target, noisy=trial % 3 == 2)
            trial += 1
            is_cheaper = self.seconds_of(found) < self.seconds_of(plan) * (1 - ROUNDING)
            improves = self.peak(found) <= target and (is_cheaper or self.seconds_of(found) <= enough)
            plan, failures = (found, 0) if improves else (plan, failures + 1)
        return plan

    def lower(self, plan: Plan, seconds: float) -> Plan:
        """Returns the plan of the least peak of a sequence of trials from one, all within ``seconds``."""
        failures = trial = 0
        while failures < 2 * settings.trials and not self.is_over():
            target = int(self.peak(plan) * (1.0 - settings.step / 2 ** (trial % 6)))
            found = self.solve(self.ruined(plan, trial), target, noisy=trial % 3 == 2)
            trial += 1
            improves = self.peak(found) < self.peak(plan) and self.seconds_of(found) <= seconds
            plan, failures = (found, 0) if improves else (plan, failures + 1)
        return plan

    # -- questions -----------------------------------------------------------------------------------------------------

    def front(self, plans: Collection[Plan]) -> list[Plan]:
        """Returns the plans that no other one beats in both peak and seconds, the fastest first."""
        return undominated(plans, lambda plan: (self.seconds_of(plan), plan.peak_bytes))

    def solved(self, starts: Collection[Plan], target: int, enough: float = -math.inf, near: int = settings.near) -> list[Plan]:
        """Returns the plans within ``target`` bytes that ``near`` starts on each side of it lead to, the cheapest first.

        One of ``enough`` seconds is the only one.
        """
        front = self.front(starts)
        below = [plan for plan in front if plan.peak_bytes <= target][:near]
        least = self.seconds_of(below[0]) if below else math.inf
        above = [plan for plan in front if plan.peak_bytes > target and self.seconds_of(plan) < least][-near:]
        found = dict[float, Plan]()
        for start in (*below, *reversed(above)):
            if found and self.is_over():
                break
            solved = self.solve(start, target)
            if self.peak(solved) <= target:
                if self.seconds_of(solved) <= enough:
                    return [solved]
                found.setdefault(self.seconds_of(solved), solved)
        return [found[cost] for cost in sorted(found)]

    def cheapest(self, starts: Collection[Plan], target: int, enough: float) -> Plan | None:
        """Returns the cheapest plan found within ``target`` bytes, or None. One of ``enough`` seconds ends the search."""
        found = list[Plan]()
        for solved in self.solved(starts, target, enough)[: settings.near]:
            if all(self.seconds_of(plan) > enough for plan in found):
                found.append(self.improve(solved, target, enough))
        return min(found, key=self.seconds_of, default=None)

    def least_peak(self, starts: Collection[Plan], bound: int) -> Plan:
        """Returns the plan of the least peak found. A peak close to ``bound``, below which there is none, ends the search."""
        lowest = sorted(starts, key=lambda plan: (self.peak(plan), plan.cost_seconds))[: settings.near]
        enough = int(bound * (1.0 + settings.good_gap))
        best, failures, trial = lowest[0], 0, 0
        # Straight down first, in part of the work: one start may lead to the bound, and another one would take all of it.
        shares = [self.share * number / settings.stretches for number in range(1, len(lowest) + 1)]
        straight = [LocalSearch(self.graph, self.limit, share, self.seconds_of, self.bytes_at).bring_down for share in shares]
        ways = [partial(bring_down, start, bound) for bring_down, start in zip(straight, lowest, strict=True)]
        for way in (*ways, *(partial(self.descend, start) for start in lowest)):
            if self.peak(best) > enough:
                best = min(best, way(), key=lambda plan: (self.peak(plan), plan.cost_seconds))
        while failures < settings.trials and self.peak(best) > enough and not self.is_over():
            found = self.descend(self.ruined(best, trial), self.peak(best))
            trial += 1
            best, failures = (found, 0) if self.peak(found) < self.peak(best) else (best, failures + 1)
        return best

    def descend(self, plan: Plan, level: int | None = None) -> Plan:
        """Returns the plan of the least peak on a way down from ``plan``, whose first target is a little below ``level``."""
        best, level = plan, level or self.peak(plan)
        while level > 0 and not self.is_over():
            target = int(level * (1.0 - settings.step))
            plan = self.bring_down(plan, target)
            best = min(best, plan, key=self.peak)
            if self.peak(plan) > target:
                break
            level = self.peak(plan)
        return best
