"""The planner of one step: from a graph and a budget to a checked plan with lower bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from autoremat.basics.errors import OptionsError
from autoremat.basics.units import format_bytes
from autoremat.planner.cost.durations import ROUNDING
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.limits import UNLIMITED, Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan
from autoremat.planner.search.local_search import LocalSearch, SecondsOf
from autoremat.planner.search.lower_bounds import LowerBounds
from autoremat.planner.search.placement import MANY, relieving
from autoremat.planner.search.starts import Starts, without_recomputation
from autoremat.planner.search.stays_search import StaysSearch, lowest_with_stays
from autoremat.planner.search.work_limit import CHECK, PLACEMENT, WorkLimit
from autoremat.planner.settings import settings

SOFT = 0.05
"""Share of the step that a plan without a budget may cost, to need no more than without this package (docs/budgets.md)."""

_by_peak, _by_cost = attrgetter("peak_bytes", "cost_seconds"), attrgetter("cost_seconds", "peak_bytes")


class Planner:
    """Plans one step. ``baseline`` is available at once, because a budget can be a share of its peak.

    The work of the search follows from ``time_limit`` in seconds. Plans ``given`` are from outside the search, such as a
    policy's. ``limits`` hold where nothing else is asked: the bytes on the host always, the peak unless that costs much time.
    """

    def __init__(
        self, graph: Graph, time_limit: float = 10.0, given: tuple[Plan, ...] = (), limits: Limits = UNLIMITED
    ) -> None:
        self.graph, self.given, self.limits, self.limit = graph, given, limits, WorkLimit(time_limit)
        self.found: list[Plan] = []
        """Plans found for budgets, kept so that a later, larger budget never costs more than an earlier one."""
        self.has_forms = any(value.forms for value in graph.values) and not graph.single_phase
        self.starts = Starts(graph, self.limit)
        self.bounds = LowerBounds(graph, self.limit, None if graph.single_phase else self.starts.mincut)
        self._unlimited: Plan | None = None
        """The plan without other limits, once it was asked for."""
        self.baseline = self.starts.save_everything()
        self.check(self.baseline, ignores_recompute=True)

    def restart(self) -> None:
        """Begins a new search with all its work. Starts stay; plans and bounds that earlier searches found go."""
        self.limit.restart()
        self.found.clear()
        self.bounds.known.clear()

    def check(self, plan: Plan, ignores_recompute: bool = False) -> None:
        """Raises ``PlanInvalid`` if ``plan`` breaks a rule, within the limit of the search. See :meth:`Plan.check`."""
        with self.limit.unit(CHECK * len(plan.sequence)):
            plan.check(ignores_recompute=ignores_recompute)

    # -- plans that do not depend on the budget --------------------------------------------------------------------------

    @cached_property
    def plans(self) -> list[Plan]:
        """The minimum cuts and the given plans, without stays."""
        return [*self.starts.plans, *self.given]

    @property
    def smallest(self) -> Plan:
        """The plan of the least peak that the first moves find, without the search for it."""
        return self.completed(self._smallest)

    @property
    def lowest(self) -> Plan:
        """The plan of the minimum peak found. The search for it takes no work from one for a budget."""
        return min(self.completed(self._lowest), self.smallest, key=_by_peak)

    @cached_property
    def _smallest(self) -> Plan:
        return self._lowered(quick=True)

    @cached_property
    def _lowest(self) -> Plan:
        return min(self._smallest, self._lowered(quick=False), key=_by_peak)

    def _lowered(self, quick: bool) -> Plan:
        """Returns the plan of the least peak found, without recomputation that this peak does not demand."""
        lowest = min(self.plans, key=_by_peak)
        with self.limit.beside(settings.search_share) as limit:
            search, bound = LocalSearch(self.graph, limit, settings.search_share), self.bounds.within().peak_bytes
            found = search.bring_down(lowest, bound) if quick else search.least_peak(self.plans, bound)
            found = min(lowest, LocalSearch(self.graph, limit).fill(found, found.peak_bytes), key=_by_peak)
            if self.has_forms:
                found = lowest_with_stays(self.graph, limit, self.limits, [found, *self.plans]) or found
        self.check(found)
        return found

    @cached_property
    def least_cost(self) -> float:
        """Least cost of any plan in seconds: that of the first minimum cut."""
        return min(plan.cost_seconds for plan in self.plans)

    def fastest(self, limits: Limits = UNLIMITED) -> Plan | None:
        """Returns the plan of least time, without a bound on memory but the share of ``limits``."""
        if limits.share is not None:
            return self.find(Limits(share=limits.share, kept_inputs=limits.kept_inputs)).plan
        return self.completed(min(self.plans, key=_by_cost))

    # -- plans within limits ---------------------------------------------------------------------------------------------

    def find(self, limits: Limits = UNLIMITED) -> PlanningResult:
        """Returns the best plan found within ``limits``, and the lower bounds.

        It is the cheapest one within bytes, and the one of the least peak within seconds. With both, the second search follows
        if the cheapest plan is too slow. With a share, only plans of :meth:`front` count.
        """
        if limits.seconds is not None and limits.peak_bytes is None:
            return self._find_least_peak(limits.seconds)
        found = self._find_cheapest(replace(limits, seconds=None))
        if limits.seconds is None or (found.plan is not None and limits.keeps_time(found.plan)):
            return found
        self.restart()  # the second search has a limit of its own
        least = self._find_least_peak(limits.seconds).plan
        fits = least is not None and limits.peak_bytes is not None and least.peak_bytes <= limits.peak_bytes
        return replace(found, plan=least) if fits else replace(found, least=least)

    def _find_cheapest(self, limits: Limits) -> PlanningResult:
        budget = limits.peak_bytes
        if limits.share is not None:
            fitting = (plan for plan in self._front if limits.keep(self.completed(plan)))
            best = min(fitting, key=_by_cost, default=None)
        elif budget is None:
            best, most = min(self.plans, key=_by_cost), self.limits.peak_bytes
            below = None if most is None else self._cheapest(most, lowers=False)
            if below and below.cost_seconds - best.cost_seconds <= SOFT * self.graph.step_seconds:
                best = below
            self._unlimited = best
        else:
            best = self._cheapest(budget)
        if best is not None:
            self.check(best)
        is_searched = best is None and limits.share is None
        known = (*self.plans, *self.found) if self.limit.interrupted else (self._smallest, *self.plans, *self.found)
        smallest = self._lowest if is_searched else min(known, key=_by_peak)
        seconds = self._least_seconds(budget)
        if best is not None and budget is not None and limits.share is None:
            seconds = min(seconds, best.cost_seconds)
        return self._result(best, smallest, seconds, limits, is_searched)

    def _cheapest(self, budget: int, lowers: bool = True) -> Plan | None:
        """Returns the cheapest plan found within ``budget``. If no start leads to one and it ``lowers``, the lowest may."""
        limit, share = self.limit, settings.search_share
        known = [plan for plan in (*self.plans, *self.found) if plan.peak_bytes <= budget]
        best = min(known, key=_by_cost, default=None)
        if best is not None and best.cost_seconds <= self.least_cost:
            return best
        enough = max(self._least_seconds(budget), self.least_cost) + settings.good_gap * self.graph.step_seconds
        if enough == math.inf:
            return best
        starts = [plan for plan in (*self.plans, *self.found) if not plan.schedule.stays]
        search, found = LocalSearch(self.graph, limit, share), list[Plan]()
        if self.has_forms:
            solved = search.solved(starts, budget, enough, near=1)[:1]
            stays = StaysSearch(self.graph, limit, share, replace(self.limits, peak_bytes=budget))
            found += filter(None, (*solved, stays.run([*starts, *solved], enough)))
        found += filter(None, [search.cheapest(starts, budget, enough)])
        if lowers and not found and best is None and self._lowest.peak_bytes <= budget:
            is_bare = not self._lowest.schedule.stays
            found += filter(None, [search.cheapest([self._lowest], budget, enough) if is_bare else self._lowest])
        self.found += found
        return min((*known, *found), key=_by_cost, default=None)

    def _find_least_peak(self, seconds: float) -> PlanningResult:
        """Returns the plan of the least peak found within ``seconds``, if there is one. Its lower bound is that for its peak.

        Starts are solved for levels of the peak, by bisection, and trials go on from the lowest one within the time.
        """
        known = [plan for plan in (*self.plans, self._unlimited) if plan is not None and plan.predicted_seconds <= seconds]
        best = min(known, key=_by_peak, default=None)
        if best is None:
            bound = self._least_seconds(self._smallest.peak_bytes)
            return self._result(None, self._smallest, bound, Limits(seconds=seconds))
        seconds_of: SecondsOf = attrgetter("predicted_seconds")
        search = LocalSearch(self.graph, self.limit, settings.search_share, seconds_of)
        least, most = self.bounds.within().peak_bytes, best.peak_bytes
        while most - least > max(settings.rough_gap * most, 1):
            budget = (least + most) // 2
            found = next((p for p in search.solved(self.plans, budget, seconds) if seconds_of(p) <= seconds), None)
            if self.has_forms and found is None:
                limits = replace(self.limits, peak_bytes=budget)
                stays = StaysSearch(self.graph, self.limit, settings.search_share, limits, seconds_of)
                found = stays.run(self.plans, seconds, thorough=False)
            if found is not None and seconds_of(found) <= seconds:
                most, best = budget, min(best, found, key=_by_peak)
            else:
                least = budget
        best = best if best.schedule.stays else search.lower(best, seconds)
        self.check(best)
        return self._result(best, self._smallest, self._least_seconds(best.peak_bytes), Limits(seconds=seconds))

    def front(self) -> list[Plan]:
        """Returns plans of many peaks and many amounts of saved bytes, for a graph that shares its budget with others."""
        return [self.completed(plan) for plan in self._front]

    @cached_property
    def _front(self) -> list[Plan]:
        graph, least, whole = self.graph, self._smallest.peak_bytes, self.starts.save_what_constraints_allow()
        steps = range(settings.levels - 1, -1, -1)  # the plans of a level are starts of the next lower one
        levels = [int(least * (whole.peak_bytes / least) ** (step / settings.levels)) for step in steps if least]
        found = [*self.plans, self._smallest]
        with self.limit.beside(1.0) as limit:
            search = LocalSearch(graph, limit)
            for level in levels:
                found += search.solved(found, level)
            # Plans of several amounts of saved bytes are those of a graph with very many open calls, within its budgets.
            many = LocalSearch(graph.with_calls(MANY), limit)
            starts = [Plan.of(many.graph, plan.schedule, plan.label) for plan in self.plans]
            peaks = [plan.peak_bytes for plan in starts]
            for step in range(1, settings.levels):
                level = min(peaks) + (max(peaks) - min(peaks)) * step // settings.levels
                solved = many.solved(starts, level)
                found += [Plan.of(graph, plan.schedule, plan.label) for plan in solved]
            bases = search.front([plan for plan in found if not plan.schedule.stays]) if self.has_forms else []
            for level in levels if bases else ():
                with_stays = StaysSearch(graph, limit, 1.0, replace(self.limits, peak_bytes=level))
                found += filter(None, [with_stays.run(bases, thorough=False)])
            for base in bases:
                if limit.has_passed():
                    break
                with limit.unit(3 * PLACEMENT * len(base.sequence)):
                    found += relieving(base)
        return found

    # -- results -----------------------------------------------------------------------------------------------------------

    def completed(self, plan: Plan) -> Plan:
        return plan

    def judge(self, plan: Plan, budget_bytes: int | None) -> PlanningResult:
        """Returns the result of :meth:`find` as if ``plan`` were the only plan found.

        Without a budget, the lower bound on the cost is that for the plan's own peak.
        """
        limit = self.completed(plan).peak_bytes if budget_bytes is None else budget_bytes
        return self._result(None, plan, self._least_seconds(limit), Limits(limit))

    def _result(
        self, best: Plan | None, smallest: Plan, seconds: float, limits: Limits, is_searched: bool = False
    ) -> PlanningResult:
        """Returns the result with completed plans. One that no longer fits does not count, and the smallest one may fit now."""
        plans = [self.completed(plan) for plan in (best, smallest) if plan is not None]
        fitting = next(filter(limits.keep, plans), None)
        interrupted, least = self.limit.interrupted or self.starts.lacks_cuts, self.bounds.within().peak_bytes
        return PlanningResult(
            fitting, self.baseline, plans[-1], least, seconds, interrupted, self.limit.ended_by_clock,
            is_searched,
        )  # fmt: skip

    def _least_seconds(self, budget: int | None) -> float:
        return self.bounds.within(Limits(budget)).seconds


class BoundForms(Planner):
    """The planner of ``whole``, in whose plans each of ``bound_values`` that crosses has its form, as constraints demand.

    The search may use that form without counting its bytes on the host, which are set aside before. Each plan that leaves the
    planner is completed: what it left on the device is stored as early and loaded as late as the link allows.
    """

    def __init__(self, whole: Graph, bound_values: frozenset[int], limits: Limits, **settings: Any) -> None:
        self.whole, self.bound_values, self.host_bytes = whole, bound_values, limits.host_bytes
        self._completed: dict[int, tuple[Plan, Plan]] = {}
        """By the identity of a plan: the plan, and the completed one."""
        values, held = list(whole.values), 0
        for number in bound_values:
            forms = values[number].forms
            held += sum(form.host_bytes for form in forms) * whole.calls.in_flight
            values[number] = replace(values[number], forms=tuple(replace(form, host_bytes=0) for form in forms))
        left = None if limits.host_bytes is None else max(0, limits.host_bytes - held)
        super().__init__(replace(whole, values=tuple(values)), limits=replace(limits, host_bytes=left), **settings)
        self.baseline = Plan.of(whole, self.baseline.schedule, self.baseline.label)

    def completed(self, plan: Plan) -> Plan:
        """Returns ``plan`` with stays for all bound values that cross. Raises ``OptionsError`` if the host lacks memory."""
        if id(plan) not in self._completed:
            stays = {stay.value: stay for stay in plan.schedule.stays}
            if missing := self.bound_values.intersection(plan.saved).difference(stays):
                only = (replace(v, forms=v.forms if number in missing else ()) for number, v in enumerate(self.whole.values))
                alone = Plan.of(replace(self.whole, values=tuple(only)), plan.schedule.without_stays)
                grouped = GroupedPlan(alone)
                stays |= {one.value: grouped.stay(one, one.made, one.free, one.need) for one in grouped.storables}
                stays |= {stay.value: stay for best in relieving(alone, (1.0,)) for stay in best.schedule.stays}
            schedule = replace(plan.schedule, stays=tuple(stays[value] for value in sorted(stays)))
            found = Plan.of(self.whole, schedule, plan.label)
            if self.host_bytes is not None and found.host_bytes > self.host_bytes:
                values = [self.whole.values[stay.value] for stay in schedule.stays if stay.value in self.bound_values]
                largest = max(values, key=lambda value: value.bytes)
                raise OptionsError(
                    f"`save` keeps {len(values)} tensors on the host, the largest of them {largest.name} "
                    f"({format_bytes(largest.bytes)}): they need {format_bytes(found.host_bytes)} there, and host_memory "
                    f"allows {format_bytes(self.host_bytes)}. Raise host_memory to {found.host_bytes}, or name fewer tensors"
                )
            found.check()
            self._completed[id(plan)] = plan, found
        return self._completed[id(plan)][1]


@dataclass(frozen=True)
class PlanningResult:
    """Result of a search. ``plan`` is None if no plan found fits the budget."""

    plan: Plan | None
    baseline: Plan
    """Plan without recomputation: everything that the backward reads is saved."""
    smallest: Plan
    lower_bound_bytes: int
    """Lower bound on the peak of any plan."""
    lower_bound_seconds: float
    """Lower bound on the cost in seconds of any plan within the budget that keeps the sequence; infinite if none fits."""
    interrupted: bool
    """True if the time limit, as an amount of work, ended the search."""
    ended_by_clock: bool = False
    """True if the clock ended it earlier, or ended one that it builds on: another search may find another plan."""
    least_is_searched: bool = False
    """True if ``smallest`` is the result of a search for the least peak, which only budgets below other plans need."""
    least: Plan | None = None
    """The plan of the least peak found within the limit of seconds, if no plan found keeps to that and to the bytes."""

    def is_converged(self, good_gap: float) -> bool:
        """Returns True if the optimality gap of the plan is at most ``good_gap``, or if the bound shows that no plan fits."""
        step, bound = self.smallest.graph.step_seconds, self.lower_bound_seconds
        most = bound + good_gap * (step + bound) + ROUNDING * step
        return math.isinf(bound) or (self.plan is not None and self.plan.cost_seconds <= most)

    def with_plans(self, plans: list[Plan], budget: int | None, interrupted: bool) -> PlanningResult:
        """Returns the result after adding ``plans``, for a budget in bytes. The best and the smallest plan are checked."""
        known = [*filter(None, (self.plan, self.smallest)), *plans]
        best = min(filter(Limits(budget).keep, known), key=_by_cost, default=None)
        smallest = min(known, key=_by_peak)
        for plan in filter(None, (best, smallest)):
            plan.check()
        return replace(self, plan=best, smallest=smallest, interrupted=self.interrupted or interrupted)


def result_of(plan: Plan, budget: int | None, limit: WorkLimit | None = None) -> PlanningResult:
    """Returns the result of a search that has found ``plan`` alone, with the lower bounds of its graph."""
    bound = LowerBounds(plan.graph, limit).within(Limits(budget))
    found = PlanningResult(None, without_recomputation(plan.graph), plan, bound.peak_bytes, bound.seconds, False)
    return found.with_plans([plan], budget, False)
