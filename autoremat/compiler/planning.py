"""The stage that plans: from a priced graph to the plan for the budget of the options."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

from autoremat.basics.errors import PlanFileError
from autoremat.basics.units import format_bytes
from autoremat.compiler.infeasibility import no_plan_fits
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph, Reference
from autoremat.compiler.loss_chunking import ChunkingCandidate, ChunkingChoice
from autoremat.compiler.plan_report import ReportedPlan, report_of
from autoremat.compiler.reference import budget_of, find_soft_budget, layout_copies_bytes, plan_without_us, reference_of
from autoremat.compiler.shares import acceptance, counted, headroom_of, slacks
from autoremat.compiler.tiling import choose_parts
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.constraints import ConstrainedGraph, Constraints
from autoremat.planner.multigraph.fronts import border_bytes
from autoremat.planner.multigraph.ledger import pareto
from autoremat.planner.multigraph.step import StepGraph
from autoremat.planner.plans import plan_file
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.bound_forms import BoundForms, PlanSource, set_aside
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.time_budget import TimeBudget
from autoremat.report.report import Report

OPTIMISM = 0.5
"""Excess of the simulated peak over the budget, as a share of the budget, up to which a plan's code is still generated.
Generated code often reuses more buffers than simulated, above all in unrolled loops."""

QUICK_OPS = 2000
"""Number of ops up to which code is generated whatever the budget, so that an error names bytes that suffice."""


@dataclass
class EarlierSearches:
    """The searches of earlier attempts of a compilation. An attempt on an equal graph continues with them."""

    searches: list[tuple[object, PlanSource]] = field(default_factory=list)
    """Each search after what it was begun for: graph, given schedules and soft budget."""
    torchs_plans: list[Plan] = field(default_factory=list)
    """Torch's own partitions, which are the references of shares."""

    @property
    def ended_by_clock(self) -> bool:
        """True if the clock has ended a search of any attempt, so that another compilation may choose another plan."""
        return any(planner.ended_by_clock for _, planner in self.searches)


@dataclass(frozen=True)
class PlannedGraph:
    """A priced graph with its plan."""

    priced: PricedGraph
    context: PlanningContext
    plan: Plan
    planner: PlanSource | None
    """Finds plans for other budgets; None if the plan is read from a file, or another rank's."""

    @property
    def fastest(self) -> Plan | None:
        """The plan of least time; None if no other plans are known."""
        return None if self.planner is None else self.planner.fastest(acceptance(self.priced, self.context))

    @property
    def is_binding(self) -> bool:
        """True if the plan costs more than the fastest plan, so that the budget decides."""
        fastest = self.fastest
        return fastest is not None and self.plan.cost_seconds > fastest.cost_seconds


@dataclass(frozen=True)
class SmallestGraph(PlannedGraph):
    """A graph with its plan of the minimum peak, before the budget of its step is shared out."""

    planner: PlanSource
    plan_without_us: Plan | None
    """The plan that the graph has without this package; None if it was not asked for."""

    def in_step(self, key: str) -> StepGraph:
        """Returns the facts that the ledger of a step needs, for one call."""
        planner, priced, context = self.planner, self.priced, self.context
        source = next((op.source for op in self.priced.graph.ops if op.source), "")
        plans = (planner.baseline, self.plan_without_us or planner.baseline)
        baseline, reference = (counted(plan, priced, context) for plan in plans)
        copies = layout_copies_bytes(self.priced, plans[-1])
        return StepGraph(
            key,
            source,
            1,
            pareto(counted(plan, priced, context) for plan in planner.front()),
            baseline,
            self.priced.graph.step_seconds,
            reference=reference.with_more(copies, copies),
            ended_by_clock=planner.ended_by_clock,
        )


@dataclass(frozen=True)
class BudgetedGraph(PlannedGraph):
    """A graph with its plan for the budget, and everything that the later stages ask about plans."""

    planning: PlanningResult
    """Result of the search."""
    report: Report
    """The report before code is generated."""
    code_headroom_bytes: int
    """Bytes that generated code may need above the simulated peak."""
    is_last_plan: bool
    """True if no other plan can be tried: the plan is stored, or it has the minimum peak because none fits in simulation."""
    plan_file: str | None = None
    """Name of the plan file that is applied instead of a search."""

    def gain(self, headroom_bytes: int) -> float:
        """Returns the share of the step's seconds that the plan for another headroom saves.

        That search has a time limit of its own, because code was generated since the last one.
        """
        if self.planner is None or self.report.budget_bytes is None:
            return 0.0
        self.planner.restart()
        limit = self.report.budget_bytes - headroom_bytes - self.code_headroom_bytes
        looser = self.planner.find(limit, acceptance(self.priced, self.context)).plan
        return 0.0 if looser is None else (self.plan.cost_seconds - looser.cost_seconds) / self.plan.graph.step_seconds

    @property
    def slacks(self) -> dict[bool, int]:
        """Bytes by which each half stays below its share of a step's budget, by ``is_backward``; empty without a share."""
        share = self.priced.step_share(self.context.request.limits)
        return {} if share is None else slacks(self.plan, self.priced, self.context, share)

    def limit_bytes(self, is_backward: bool) -> int | None:
        """Returns the limit in bytes on the code of one half; None for no limit."""
        if self.context.request.limits.takes_whole_reference:
            return None
        share = self.priced.step_share(self.context.request.limits)
        if share is None:
            return self.report.budget_bytes
        if not is_backward:
            return share.forward_peak_bytes
        return share.backward_peak_bytes - border_bytes(self.plan, self.priced.kept_inputs)


def plan_graph(priced: PricedGraph, context: PlanningContext, earlier: EarlierSearches | None = None) -> BudgetedGraph:
    """Returns the graph with its plan for the budget, and with the report of the plan.

    Raises ``BudgetInfeasible`` if no plan fits, unless the options ask for the best effort or the generated code may still fit.
    """
    start = time.perf_counter()
    earlier = earlier or EarlierSearches()
    soft_budget = find_soft_budget(priced, context)  # torch's partitioner has no time limit, so it is not part of the planner's
    for _, planner in earlier.searches:  # of an attempt before, since which the graph was traced again
        planner.restart()
    planner, _ = planner_of(priced, context, soft_budget, earlier)
    headroom = headroom_of(priced, context)
    reference = reference_of(priced, context, planner, headroom, earlier.torchs_plans)
    budget = budget_of(context, reference)
    candidates = _CandidateSearch(context, soft_budget, budget, headroom, earlier, reference)
    choice = choose_parts(priced, context, candidates.candidate)
    chosen = choice.taken
    by_clock = earlier.ended_by_clock or (context.told is not None and context.told.ended_by_clock)
    planning = dataclasses.replace(
        chosen.planning,
        baseline=planner.baseline,
        interrupted=chosen.planning.interrupted or by_clock,
        ended_by_clock=by_clock,
    )
    plan = _plan_within(candidates, choice)
    facts = ReportedPlan(choice, plan, planning, headroom, reference, budget, soft_budget)
    return BudgetedGraph(
        priced=chosen.priced,
        context=context,
        plan=plan,
        planning=planning,
        report=report_of(facts, context, start),
        planner=None if chosen.plan_file is not None else chosen.planner,
        code_headroom_bytes=headroom,
        is_last_plan=chosen.plan_file is not None or chosen.planning.plan is None,
        plan_file=chosen.plan_file,
    )


@dataclass(frozen=True)
class _CandidateSearch:
    """Finds the best plan of a graph, with and without a chunked loss, under the same limits."""

    context: PlanningContext
    soft_budget: int | None
    budget: int | None
    headroom: int
    """Bytes of the budget that stay free for generated code."""
    earlier: EarlierSearches
    reference: Reference | None
    """The reference peak, of which the budget is a share; None if the budget is none."""

    def candidate(self, priced: PricedGraph, chunks: int, first: ChunkingCandidate | None = None) -> ChunkingCandidate:
        """Returns ``priced``, whose loss has so many ``chunks``, with its best plan within the limits.

        The ``first`` candidate that was planned, if there is one, sets the budget of time.
        """
        planner, constrained = planner_of(priced, self.context, self.soft_budget, self.earlier)
        time = self._time(planner, priced) if first is None else first.time
        stored = stored_plan(priced, self.context, planner)
        if stored is None:
            return self._searched(priced, chunks, planner, constrained, time)
        file_name, plan = stored
        found = planner.judge(plan, self.budget)
        return ChunkingCandidate(priced, planner, constrained, found, chunks, file_name, time=time)

    def _time(self, planner: PlanSource, priced: PricedGraph) -> TimeBudget | None:
        """Returns the budget of time; None for a nested region, because the surrounding graph may recompute it whole."""
        allowed = self.context.request.limits.max_slowdown
        if allowed is None or priced.joint.is_region:
            return None
        return TimeBudget(planner.choose(None) or planner.baseline, allowed)

    def _searched(
        self, priced: PricedGraph, chunks: int, planner: PlanSource, constrained: ConstrainedGraph, time: TimeBudget | None
    ) -> ChunkingCandidate:
        limit = None if self.budget is None else self.budget - self.headroom - self.context.extra_headroom_bytes
        found, least = search(priced, self.context, planner, constrained, limit, time), None
        if time is not None and limit is not None:
            found, least = _within_both(planner, found, limit, time)
        return ChunkingCandidate(priced, planner, constrained, found, chunks, time=time, least=least)


def _plan_within(candidates: _CandidateSearch, choice: ChunkingChoice) -> Plan:
    """Returns the plan of the candidate that is taken; if none fits, the plan of the minimum peak found.

    Raises ``BudgetInfeasible`` if no plan fits, unless the options ask for the best effort or the generated code may still fit.
    """
    chosen, context = choice.taken, candidates.context
    plan = chosen.planning.plan
    if plan is not None and (chosen.keeps_time or chosen.plan_file is not None):
        return plan
    assert candidates.budget is not None
    is_too_slow = plan is not None
    plan = plan or chosen.planning.smallest
    if context.request.must_fit and not chosen.priced.joint.is_region:
        if is_too_slow or not _may_fit(plan, chosen, context, candidates.budget):
            error = no_plan_fits(choice, context, candidates.budget, candidates.headroom)
            reference = candidates.reference
            raise error.asked_as(context.request.limits.reference_share, None if reference is None else reference.bytes)
    return plan


def plan_for_minimum_peak(priced: PricedGraph, context: PlanningContext, compares: bool = True) -> SmallestGraph:
    """Returns the graph with the plan of the minimum peak found, whatever the budget.

    With ``compares``, it also has the plan without this package, for budgets that are shares.
    """
    planner, _ = planner_of(priced, context, None, EarlierSearches())
    without_us = plan_without_us(priced, context, planner)[1] if compares else None
    return SmallestGraph(priced, context, planner.smallest, planner, without_us)


def planner_of(
    priced: PricedGraph, context: PlanningContext, soft_budget: int | None, earlier: EarlierSearches
) -> tuple[PlanSource, ConstrainedGraph]:
    """Returns a planner of the graph under the constraints of the request, and the constrained graph.

    A planner of an earlier attempt on an equal graph starts afresh, with its starts.
    """
    request = context.request
    priced.name_planning(request.options.time_limit)
    policy = policies.parse(request.options.policy)
    options, is_exact = request.options, not request.limits.is_bounded
    constrained = Constraints(options.save, options.recompute, policy, exact=is_exact).apply(priced.graph)
    given = () if constrained.candidate is None else (constrained.candidate,)
    bound = constrained.bound_values
    wanted = (constrained.graph, bound, [plan.schedule for plan in given], soft_budget)
    known = next((planner for begun_for, planner in earlier.searches if begun_for == wanted), None)
    if known is not None:
        return known, constrained
    host, graph = request.limits.host_bytes, constrained.graph
    inner, left = set_aside(graph, bound, host) if bound else (graph, host)
    searched = Planner(inner, options.time_limit, given=given, soft_budget_bytes=soft_budget, host_bytes=left)
    planner = BoundForms(searched, graph, bound, host) if bound else searched
    earlier.searches.append((wanted, planner))
    return planner, constrained


def stored_plan(priced: PricedGraph, context: PlanningContext, planner: PlanSource) -> tuple[str, Plan] | None:
    """Returns the plan that another rank, an earlier process or the options have for this graph, with the name of its file.

    Returns None if there is none. Raises ``PlanFileError`` if a stored plan does not fit the graph.
    """
    files = context.request.options.plan if context.told is None else (context.told.file,)
    if not files or priced.joint.is_region:
        return None
    file, plan = plan_file.fitted(files, planner.graph)
    allowed, held = context.request.limits.host_bytes or 0, plan.timeline.host_bytes
    if held > allowed:
        raise PlanFileError(
            f"the plan in {file.name} keeps {format_bytes(held)} on the host, and host_memory allows {format_bytes(allowed)}: "
            f'raise it to "{held}B", or leave out the option `plan`'
        )
    return file.name, plan


def search(
    priced: PricedGraph,
    context: PlanningContext,
    planner: PlanSource,
    constrained: ConstrainedGraph,
    limit: int | None,
    time: TimeBudget | None = None,
) -> PlanningResult:
    """Returns the best plan found with a simulated peak of at most ``limit`` bytes.

    With a budget of time alone, it has the least peak within that time. Without a budget, a policy's plan is taken.
    """
    if time is not None and limit is None:
        return planner.least_peak(time)
    if not context.request.limits.is_bounded and constrained.candidate is not None:
        constrained.candidate.check()
        return planner.judge(constrained.candidate, None)
    return planner.find(limit, acceptance(priced, context))


def _may_fit(plan: Plan, chosen: ChunkingCandidate, context: PlanningContext, budget: int) -> bool:
    """Returns True if Inductor's code for ``plan`` may fit, although the simulated peak exceeds the budget."""
    accepts = acceptance(chosen.priced, context)
    accepted = chosen.keeps_time_with(plan) and (accepts is None or accepts(plan))
    is_tried = plan.peak_bytes <= budget * (1 + OPTIMISM) or len(plan.graph.ops) <= QUICK_OPS
    return context.decided_by_code and accepted and is_tried


def _within_both(
    planner: PlanSource, found: PlanningResult, limit: int, time: TimeBudget
) -> tuple[PlanningResult, Plan | None]:
    """Returns the result for both budgets and, if the plan found for the bytes takes too long, the least peak within the time.

    That search may find a plan that keeps to both. It has a time limit of its own.
    """
    if found.plan is not None and time.keeps(found.plan):
        return found, None
    planner.restart()
    least = planner.least_peak(time).plan
    if least is not None and least.peak_bytes <= limit:
        return dataclasses.replace(found, plan=least), None
    return found, least
