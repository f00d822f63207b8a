"""Joint search: chooses recomputation and stays together, where values have forms.

The link between device and host carries a certain number of bytes while the forward runs. It pays to carry those whose
recomputation is dear, and to recompute the others. Four sources give plans whose recomputation leaves memory over the budget,
and :mod:`.placement` brings each of them down to it:

1. the candidates of the search, and those filled to larger budgets, within what the link carries beyond the budget;
2. saved sets of a linear program that knows when the link is free (:mod:`.joint_program`);
3. saved sets of those plans that no stays bring down, without the values that are in the way;
4. ruin and recreate from the cheapest of all plans.

A plan is left out if its recomputation alone costs more than the best plan, if no stays bring it within the budget, or if the
link is too slow to do so at less than the best plan's cost.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.forms import Engine
from autoremat.planner.plans.candidate import Candidate, Segmentation
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.candidates import Search, effort
from autoremat.planner.search.greedy_fill import fill
from autoremat.planner.search.grouped_plan import GroupedPlan
from autoremat.planner.search.lower_bounds import Bounds
from autoremat.planner.search.placement import place
from autoremat.planner.search.ruin_and_recreate import SEED, Draw, admissible
from autoremat.planner.search.work_limit import DRAW, PLACEMENT, PREPARATION, PROGRAM
from autoremat.planner.settings import SETTINGS

if TYPE_CHECKING:
    from autoremat.planner.search.joint_program import JointProgram

settings = SETTINGS.joint_search


class JointSearch:
    """Plans with stays of one graph, from the candidates of ``search``."""

    def __init__(self, search: Search, bounds: Bounds, host_bytes: int | None) -> None:
        self.search, self.graph, self.limit = search, search.graph, search.limit
        self.bounds, self.host_bytes = bounds, host_bytes
        self.found: list[Candidate] = []
        """Plans with stays, made for all budgets so far."""
        self._unfit: list[Candidate] = []
        """Plans that no stays bring down to the present budget, although they cost less than those that fit."""
        self._bounds: dict[int, float] = {}
        self._grouped: dict[int, GroupedPlan] = {}
        """By the identity of a candidate's plan."""
        self.limit.extend()

    @cached_property
    def unfilled(self) -> list[Candidate]:
        """The plans of the search that do not depend on the budget, with their segmentations."""
        whole, *_ = self.search.unfilled
        return [Candidate(whole, self.search.whole), *self.search.candidates]

    @cached_property
    def smallest(self) -> Candidate | None:
        """The plan with stays of the least peak that was found, at any number of seconds; None if no stays lower the peak."""
        by_peak = sorted(self.unfilled, key=lambda c: (c.plan.peak_bytes, c.plan.cost_seconds))
        by_cost = sorted(self.unfilled, key=lambda c: (c.plan.cost_seconds, c.plan.peak_bytes))
        rounds = effort(settings.least_peak_work, settings.least_peak_rounds, self.graph.num_forward)
        mended = self._mended(self.unfilled[0], 0, rounds)
        tried = {id(c): c for c in (*by_peak[: settings.least_peak_plans], *by_cost[: settings.least_peak_plans], mended)}
        lowest = sorted((self.grouped(c.plan, keep=True).least_bytes, number, c) for number, c in enumerate(tried.values()))
        best, peak = None, by_peak[0].plan.peak_bytes
        for least, _, candidate in lowest[: settings.least_peak_descents]:
            low, level = least, least
            for _ in range(settings.least_peak_levels):
                if level >= peak:
                    break
                found = self.brought_down(candidate.plan, level, keep=True)
                if found is None:
                    low = level
                else:
                    best, peak = Candidate(found, candidate.segmentation), found.peak_bytes
                level = (low + peak) // 2
        return best

    def improve(self, budget: int, thorough: bool = True, suffices: Callable[[Plan], bool] = lambda plan: False) -> None:
        """Finds plans within ``budget`` bytes, unless a known one suffices or costs hardly more than the lower bound.

        Unless ``thorough``, only plans that do not depend on the budget are brought down.
        """
        if self.smallest is not None and self.smallest.plan.peak_bytes <= budget:
            self.found.append(self.smallest)
        self._unfit = []
        sources = (
            self._from_candidates, self._from_larger_budgets, self._from_programs, self._by_mending, self._by_recreation,
        )  # fmt: skip
        for source in sources if thorough else sources[:1]:
            best = self.search.best(budget)
            if self._has_passed() or self._is_good(budget) or (best is not None and suffices(best)):
                return
            source(budget)
            self._fill(budget)

    def _has_passed(self) -> bool:
        return self.limit.has_passed(SETTINGS.search.plans_share)

    def _is_good(self, budget: int) -> bool:
        """Returns True if no plan within ``budget`` can cost much less than the cheapest known one."""
        least = max(self.search.least_cost, self._bound(budget))
        return self._best_cost(budget) <= least + settings.worthwhile * self.graph.step_seconds

    def _bound(self, budget: int) -> float:
        """Returns the lower bound on the cost of any plan within ``budget``, computed once per budget."""
        if budget not in self._bounds:
            self._bounds[budget] = self.bounds.seconds(budget)
        return self._bounds[budget]

    def _best_cost(self, budget: int) -> float:
        """Returns the least cost of a known plan within ``budget``, infinite if there is none."""
        best = self.search.best(budget)
        return math.inf if best is None else best.cost_seconds

    # -- one plan ------------------------------------------------------------------------------------------------------

    def grouped(self, plan: Plan, keep: bool = False) -> GroupedPlan:
        """Returns the fusion groups of ``plan``, which are remembered with ``keep``."""
        if id(plan) in self._grouped:
            return self._grouped[id(plan)]
        with self.limit.unit(PREPARATION * len(plan.sequence)):
            found = GroupedPlan(plan)
        if keep:
            self._grouped[id(plan)] = found
        return found

    def brought_down(self, plan: Plan, budget: int, below: float = math.inf, keep: bool = False) -> Plan | None:
        """Returns ``plan`` with stays by which it fits ``budget`` bytes, if it then costs less than ``below`` seconds."""
        if plan.cost_seconds >= below or plan.peak_bytes <= budget:
            return plan if plan.cost_seconds < below else None
        grouped, most_stall = self.grouped(plan, keep), below - plan.cost_seconds
        if grouped.least_bytes > budget or grouped.least_stall(budget) >= most_stall:
            return None
        with self.limit.unit(PLACEMENT * len(plan.sequence)):
            found = place(grouped, budget, self.host_bytes, most_stall)
        return found if found is not None and found.cost_seconds < below else None

    def _add(self, candidates: Iterable[Candidate], budget: int, keep: bool = False) -> None:
        """Brings ``candidates`` down, the cheapest first, and adds those that are cheaper than all before."""
        below = self._best_cost(budget)
        for candidate in sorted(candidates, key=lambda c: (c.plan.cost_seconds, c.plan.peak_bytes)):
            if candidate.plan.cost_seconds >= below or self._has_passed():
                break
            found = self.brought_down(candidate.plan, budget, below, keep)
            if found is not None:
                self.found.append(Candidate(found, candidate.segmentation))
                below = found.cost_seconds
            else:
                self._unfit.append(candidate)

    def _best(self, budget: int) -> Candidate | None:
        """Returns the cheapest plan within ``budget``, with or without stays."""
        known = (*self.found, *self.search.made_for_budgets, *self.unfilled)
        fitting = (candidate for candidate in known if candidate.plan.peak_bytes <= budget)
        return min(fitting, key=lambda candidate: candidate.plan.cost_seconds, default=None)

    def _fill(self, budget: int) -> None:
        """Saves more values of the cheapest plan with stays, where these leave memory free."""
        best = self._best(budget)
        if best is None or best.plan.cost_seconds > self._best_cost(budget):
            return

        def rebuild(saved: frozenset[int]) -> Plan:
            plan = self.search.plan(saved, best.segmentation, "filled")
            return self.brought_down(plan, budget, self._best_cost(budget)) or plan

        filled = fill(best.plan, rebuild, budget, limit=self.limit)
        if filled is not best.plan:
            self.found.append(Candidate(filled, best.segmentation))

    # -- sources of plans ----------------------------------------------------------------------------------------------

    def _from_candidates(self, budget: int) -> None:
        self._add(self.unfilled, budget, keep=True)

    def _from_larger_budgets(self, budget: int) -> None:
        search, reach = self.search, self._reach(budget)
        for share in settings.levels:
            level, filled = budget + int(share * reach), list[Candidate]()
            for base in islice(search.bases(level, math.inf), settings.bases):
                rebuild = partial(search.plan, segmentation=base.segmentation, label="filled")
                filled.append(Candidate(fill(base.plan, rebuild, level, limit=self.limit), base.segmentation))
            self._add(filled, budget)

    def _reach(self, budget: int) -> int:
        """Returns the bytes beyond ``budget`` that stays could free without waiting, by the fastest plan."""
        grouped = self.grouped(self._fastest, keep=True)
        if any(one.form.store.engine is Engine.COMPUTE for one in grouped.storables):
            return max(self._fastest.peak_bytes - budget, 0)
        carried = grouped.store_rate * float(grouped.clock[grouped.num_forward])
        return int(max(min(carried, self._fastest.peak_bytes - budget), 0))

    @cached_property
    def _fastest(self) -> Plan:
        return min(self.search.unfilled, key=lambda plan: (plan.cost_seconds, plan.peak_bytes))

    def _from_programs(self, budget: int) -> None:
        """Brings down the schedules of saved sets that linear programs find. Each counts from the plan of the one before."""
        plan, failures = self._fastest, 0
        patience = effort(settings.program_work, settings.program_limits, self.graph.num_forward)
        for share in settings.program_budgets:
            if failures == patience:
                break
            began, cost = time.monotonic(), self._best_cost(budget)
            with self.limit.unit(2 * PROGRAM * len(self.graph.ops)):
                shares = self._program.solve(int(share * budget), plan, settings.program_seconds)
            if time.monotonic() - began >= settings.program_seconds:  # by the solver's clock
                self.limit.interrupted = self.limit.ended_by_clock = True
            if shares is None or self._has_passed():
                break
            chosen = (np.flatnonzero(shares >= threshold).tolist() for threshold in settings.thresholds)
            for saved in dict.fromkeys(admissible(self.graph, frozenset(values)) for values in chosen):
                plans = [Candidate(self.search.plan(saved, s, "program"), s) for s in self._program_segmentations]
                self._add(plans, budget)
                plan = plans[0].plan
            failures = 0 if self._best_cost(budget) < cost else failures + 1

    @cached_property
    def _program(self) -> JointProgram:
        from autoremat.planner.search.joint_program import JointProgram  # SciPy's solvers take long to import

        return JointProgram(self.graph, self._seconds_of_ops, self.host_bytes)

    @cached_property
    def _program_segmentations(self) -> list[Segmentation]:
        """One segment, and some segmentations of few segments, all of whose cuts are saved."""
        plain = (s for s in self.search.segmentations() if not s.nested and s.segments.count > 1)
        return [self.search.whole, *islice(plain, 1, 1 + 2 * (settings.program_segmentations - 1), 2)]

    @cached_property
    def _seconds_of_ops(self) -> NDArray[np.float64]:
        """For each op, its seconds under the fastest plan; zero if that does not run it first in its own half."""
        grouped, seconds = self.grouped(self._fastest, keep=True), np.zeros(len(self.graph.ops))
        border = len(grouped.schedule.forward)
        for position, index in enumerate(grouped.schedule.sequence):
            if (position < border) == (index < self.graph.num_forward):
                seconds[index] = grouped.seconds[position]
        return seconds

    def _by_mending(self, budget: int) -> None:
        """Mends the cheapest plans that are too large where their values are in use, and brings them down."""
        below, possible = self._best_cost(budget), dict[tuple[int, ...], tuple[float, int, Candidate]]()
        for number, candidate in enumerate(self._unfit):
            grouped = self.grouped(candidate.plan)
            least = candidate.plan.cost_seconds + grouped.least_stall(budget)
            if grouped.least_bytes > budget and least < below:
                possible.setdefault(candidate.plan.saved, (least, number, candidate))
        for *_, candidate in sorted(possible.values())[: settings.mended_plans]:
            if self._has_passed():
                break
            self._add([self._mended(candidate, budget)], budget)

    def _mended(self, candidate: Candidate, budget: int, rounds: int = settings.mending_rounds) -> Candidate:
        """Returns ``candidate`` without saved values that keep its peak above ``budget`` bytes under any stays."""
        fitting, grouped = self._best(budget), self.grouped(candidate.plan)
        segmentations = dict.fromkeys([candidate.segmentation, *([] if fitting is None else [fitting.segmentation])])
        for _ in range(rounds):
            if grouped.least_bytes <= budget:
                break
            saved, level = frozenset(candidate.plan.saved), max(budget, int(settings.mending_share * grouped.least_bytes))
            sets = (admissible(self.graph, saved - some) for some in grouped.in_the_way(level)[: settings.mending_values])
            fewer = [some for some in dict.fromkeys(sets) if some != saved]
            options = [Candidate(self.search.plan(some, s, "mended"), s) for some, s in product(fewer, segmentations)]
            ranked = [(self.grouped(option.plan), option) for option in options]
            lower, best = min(
                ranked, key=lambda one: (*one[0].excess(budget, level), one[1].plan.cost_seconds), default=(grouped, candidate)
            )
            if lower.excess(budget, level) >= grouped.excess(budget, level):
                break
            grouped, candidate = lower, best
        return candidate

    def _by_recreation(self, budget: int) -> None:
        """Improves the cheapest plan by trials that each save some values more and others no longer."""
        best = self._best(budget)
        if best is None:
            return
        draw, failures = Draw(random.Random(SEED)), 0
        patience = effort(settings.trial_work, settings.trial_limits, self.graph.num_forward)
        for trial in range(patience * SETTINGS.search.recreation_trials):
            if failures == patience or not best.plan.saved or self._is_good(budget) or self._has_passed():
                break
            with self.limit.unit(DRAW * len(self.graph.ops)):
                saved = draw.saved_set(best.plan, trial)
            drawn = self.search.plan(saved, best.segmentation, "recreated")
            found = self.brought_down(drawn, budget, best.plan.cost_seconds)
            failures = failures + 1 if found is None else 0
            if found is not None:
                best = Candidate(found, best.segmentation)
                self.found.append(best)
