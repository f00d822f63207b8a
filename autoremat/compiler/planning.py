"""The stage that plans: from a priced graph to the plan for the budget of the options."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from autoremat.basics.progress import now
from autoremat.compiler.counting import Count, find_within, judged
from autoremat.compiler.headroom import headroom_of, with_code
from autoremat.compiler.infeasibility import memory_notes, no_plan_fits
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.compiler.loss_chunking import ChunkingCandidate, ChunkingChoice, choose_chunking
from autoremat.compiler.reference import Reference, budget_of, find_soft_budget, plan_without_us, reference_of
from autoremat.compiler.shares import acceptance, bytes_at_borders, slacks
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.constraints import ConstrainedGraph, Constraints
from autoremat.planner.multigraph.fronts import front_of, point_of
from autoremat.planner.multigraph.ledger import KnownBorders
from autoremat.planner.multigraph.step_profile import StepGraph
from autoremat.planner.plans import plan_file
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import ROUNDING, Planner, PlanningResult
from autoremat.planner.search.time_budget import TimeBudget, least_peak, least_peak_result
from autoremat.report.report import Report

OPTIMISM = 0.5
"""Excess of the simulated peak over the budget, as a share of the budget, up to which a plan's code is still generated.
Generated code often reuses more buffers than simulated, above all in unrolled loops."""

QUICK_OPS = 2000
"""Number of ops up to which code is generated whatever the budget, so that an error names bytes that suffice."""


@dataclass(frozen=True)
class PlannedGraph:
    """A priced graph with its plan, and everything that the later stages ask about plans."""

    priced: PricedGraph
    context: PlanningContext
    plan: Plan
    planner: Planner | None
    """Finds plans for other budgets; None if the plan is read from a file."""
    reference: Reference | None = None
    """The reference peak, of which the budget is a share; None if the budget is none."""
    plan_without_us: Plan | None = None
    """The plan that the graph has without this package, as a graph of a step; None if it was not asked for."""
    code_headroom_bytes: int = 0
    """Bytes that generated code may need above the simulated peak."""
    planning: PlanningResult | None = None
    """Result of the search; None if the plan was taken without regard to a budget."""
    report: Report | None = None
    """The report before code is generated; None together with ``planning``."""
    is_last_plan: bool = False
    """True if no other plan can be tried: the plan is stored, or it has the minimum peak because none fits in simulation."""
    plan_file: str | None = None
    """Name of the plan file that is applied instead of a search."""
    count: Count | None = None
    """Counts reserved bytes; None on other devices than CUDA."""
    fragmentation_bytes: int = 0
    """Bytes by which the plan stays below a budget on reserved bytes, because more is reserved than allocated."""

    @property
    def bounds_reserved(self) -> bool:
        """True if the budget bounds reserved bytes."""
        return self.count is not None and self.count.is_bounded

    @property
    def is_binding(self) -> bool:
        """True if the plan costs more than the fastest plan, so that the budget decides."""
        fastest = self.plan_for(None)
        return fastest is not None and self.plan.cost_seconds > fastest.cost_seconds

    def plan_for(self, simulated_bytes: int | None) -> Plan | None:
        """Returns the plan for a simulated peak of at most ``simulated_bytes``, code headroom included (None: no limit).

        Returns None if no plan fits.
        """
        if self.planner is None:
            return None
        accepts = acceptance(self.priced, self.context)
        if simulated_bytes is None:
            return self.planner.fastest(accepts)
        return self.planner.choose(simulated_bytes - self.code_headroom_bytes, accepts=accepts)

    def gain(self, headroom_bytes: int) -> float:
        """Returns the share of the step's seconds that the plan for another headroom saves.

        That search has a time limit of its own, because code was generated since the last one.
        """
        budget = self.report.budget_bytes if self.report is not None else None
        if self.planner is not None:
            self.planner.restart()
        looser = None if budget is None else self.plan_for(budget - headroom_bytes)
        return 0.0 if looser is None else (self.plan.cost_seconds - looser.cost_seconds) / self.plan.graph.step_seconds

    @property
    def slacks(self) -> dict[bool, int]:
        """Bytes by which each half stays below its share of a step's budget, by ``is_backward``; empty without a share."""
        share = self.priced.share_in(self.context.options)
        return {} if share is None else slacks(self.plan, self.priced, self.context, share)

    def limit_bytes(self, is_backward: bool) -> int | None:
        """Returns the limit in bytes on the code of one half; None for no limit."""
        if self.report is None or self.context.options.wants_whole_reference:
            return None
        share = self.priced.share_in(self.context.options)
        if share is None:
            return self.report.budget_bytes
        if not is_backward:
            return share.forward_peak_bytes
        return share.backward_peak_bytes - bytes_at_borders(self.plan, self.priced, share)

    def in_step(self, key: str, known: KnownBorders | None = None) -> StepGraph:
        """Returns the facts that the ledger of a step needs, for one call. ``known`` are the holders of values at borders."""
        planner, kept = self.planner, self.priced.kept_inputs
        assert planner is not None
        source = next((op.source for op in self.priced.graph.ops if op.source), "")
        plans = (planner.baseline, self.plan_without_us or planner.baseline)
        points = (*front_of(planner, kept, known), *(point_of(plan, kept, known) for plan in plans))
        *front, baseline, reference = (with_code(point, self.priced, self.context) for point in points)
        return StepGraph(key, source, 1, tuple(front), baseline, self.priced.graph.step_seconds, reference=reference)


def plan_graph(priced: PricedGraph, context: PlanningContext) -> PlannedGraph:
    """Returns the graph with its plan for the budget, and with the report of the plan.

    Raises ``BudgetInfeasible`` if no plan fits, unless the options ask for the best effort or the generated code may still fit.
    """
    start = time.perf_counter()
    soft_budget = find_soft_budget(priced, context)  # torch's partitioner has no time limit, so it is not part of the planner's
    doing = f"planning {len(priced.graph.ops):,} ops, at most {context.options.time_limit:g} s"
    now(doing)
    for earlier in context.planners:  # of an attempt before, since which the graph was traced again
        earlier.restart()
    planner, _ = planner_of(priced, context, soft_budget)
    headroom = headroom_of(priced, context)
    count = Count.of(priced, context, headroom)
    bounded = count if count is not None and count.is_bounded else None
    counted = bounded.plan_bytes if bounded is not None else lambda plan: plan.peak_bytes + headroom
    reference = reference_of(priced, context, planner, counted)
    now(doing)
    budget = budget_of(priced, context, reference)
    limits = _Limits(context, soft_budget, budget, headroom, bounded)
    choice = choose_chunking(priced, context, limits.candidate)
    chosen = choice.taken
    planned = PlannedGraph(
        priced=chosen.priced,
        context=context,
        plan=_plan_within(limits, choice),
        planner=None if chosen.plan_file is not None else chosen.planner,
        reference=reference,
        code_headroom_bytes=headroom,
        planning=dataclasses.replace(chosen.planning, baseline=planner.baseline),
        is_last_plan=chosen.plan_file is not None or chosen.planning.plan is None,
        plan_file=chosen.plan_file,
        count=count,
        fragmentation_bytes=chosen.fragmentation_bytes,
    )
    return dataclasses.replace(planned, report=report_of(planned, choice, budget, soft_budget, start))


@dataclass
class _Limits:
    """The limits on the plans of a graph. They hold for all its forms, with and without a chunked loss."""

    context: PlanningContext
    soft_budget: int | None
    budget: int | None
    headroom: int
    """Bytes of the budget that stay free for generated code."""
    bounded: Count | None
    """Counts the bytes of a budget on reserved bytes; None for a budget on allocated bytes."""
    times: list[TimeBudget | None] = field(default_factory=list)
    """The budget of time that the first form sets; empty before."""

    def candidate(self, form: PricedGraph, chunks: int) -> ChunkingCandidate:
        """Returns ``form``, whose loss has so many ``chunks``, with its best plan within the limits."""
        planner, constrained = planner_of(form, self.context, self.soft_budget)
        if not self.times:
            allowed = self.context.options.allowed_slowdown
            # A nested region has no budget of time, because the surrounding graph may recompute it whole.
            self.times.append(None if allowed is None or form.joint.is_region else TimeBudget.of(planner, allowed))
        stored = stored_plan(form, self.context, planner)
        if stored is None:
            return self._searched(form, chunks, planner, constrained, self.times[0])
        file_name, plan = stored
        found = planner.judge(plan, self.budget)
        if self.bounded is not None and self.budget is not None:
            found = judged(self.bounded, self.budget, found)
        return ChunkingCandidate(form, planner, constrained, found, chunks, file_name, time=self.times[0])

    def _searched(
        self, form: PricedGraph, chunks: int, planner: Planner, constrained: ConstrainedGraph, time: TimeBudget | None
    ) -> ChunkingCandidate:
        """Returns ``form`` with the best plan that a search finds within the limits."""
        budget, bounded, extra = self.budget, self.bounded, self.context.extra_headroom_bytes
        limit = None if budget is None else budget - self.headroom - extra
        least, fragmentation = None, 0
        # A later attempt has a headroom that the code of an earlier one has shown.
        if bounded is None or budget is None or limit is None or extra:
            found = search(form, self.context, planner, constrained, limit, time)
            if time is not None and limit is not None:
                found, least = _within_both(planner, found, limit, time)
        else:
            found, fragmentation = find_within(
                bounded, budget, limit, lambda limit: search(form, self.context, planner, constrained, limit)
            )
        return ChunkingCandidate(
            form, planner, constrained, found, chunks, fragmentation_bytes=fragmentation, time=time, least=least
        )


def _plan_within(limits: _Limits, choice: ChunkingChoice) -> Plan:
    """Returns the plan of the candidate that is taken; if none fits, the plan of the minimum peak found.

    Raises ``BudgetInfeasible`` if no plan fits, unless the options ask for the best effort or the generated code may still fit.
    """
    chosen, context = choice.taken, limits.context
    plan = chosen.planning.plan
    if plan is not None and (chosen.keeps_time or chosen.plan_file is not None):
        return plan
    assert limits.budget is not None
    is_too_slow = plan is not None
    plan = plan or chosen.planning.smallest
    if context.must_fit and not chosen.priced.joint.is_region:
        if is_too_slow or not _may_fit(plan, chosen, context, limits.budget):
            raise no_plan_fits(choice, context, limits.budget, limits.headroom, limits.bounded)
    return plan


def report_of(
    planned: PlannedGraph, choice: ChunkingChoice, budget: int | None, soft_budget: int | None, start: float
) -> Report:
    """Returns the report of the plan, before code is generated. ``start`` is the time at which planning began."""
    assert planned.planning is not None
    now("describing the plan")
    captured, context = planned.priced.captured, planned.context
    share, reference = planned.priced.share_in(context.options), planned.reference
    return Report.of(
        planned.planning,
        planned.plan,
        planned.code_headroom_bytes + context.extra_headroom_bytes + planned.fragmentation_bytes,
        budget_bytes=budget,
        budget_share=None if reference is None else context.options.memory_budget,
        reference_bytes=None if reference is None else reference.bytes,
        reference_source="" if reference is None else reference.source,
        reference_saved_bytes=None if reference is None else reference.saved_bytes,
        granted_bytes=None if reference is None else context.options.granted_bytes,
        soft_budget_bytes=soft_budget,
        planning_seconds=time.perf_counter() - start,
        compiler=context.options.compiler,
        device=captured.device.name,
        loss_chunks=choice.taken.chunks,
        code_headroom_bytes=planned.code_headroom_bytes,
        minimum_unchunked_bytes=None if choice.whole is None else choice.whole.planning.smallest.peak_bytes,
        unknown_workspaces=captured.unknown_workspaces,
        accumulated_bytes=planned.priced.accumulated_bytes,
        constraint_warnings=choice.taken.constrained.warnings,
        reserved=None if planned.count is None else planned.count.plan_report(planned.plan),
        count="reserved" if planned.bounds_reserved else "allocated",
        device_ledger=context.options.device_ledger,
        notes=(
            *((share.note,) if share is not None and share.note else ()),
            *_notes_on(planned.count),
            *memory_notes(budget, captured.device.name),
        ),
        **time_figures(planned, choice.taken.time, choice.taken.least),
        **dataclasses.asdict(planned.priced.pricing),
    )


def _notes_on(count: Count | None) -> tuple[str, ...]:
    """Returns a note on the settings of the allocator that the count of reserved bytes ignores; empty if there are none."""
    ignored = () if count is None else count.settings.ignored
    return (f"reserved bytes are counted without {', '.join(ignored)}",) if ignored else ()


def time_figures(planned: PlannedGraph, time: TimeBudget | None, least: Plan | None) -> dict[str, Any]:
    """Returns the fields of a report on the budget of time; empty if there is none.

    ``least`` has the minimum peak within the time, if no plan keeps to both budgets.
    """
    if time is None:
        return {}
    assert planned.planning is not None
    slowdown = time.slowdown(planned.plan)
    if planned.context.options.memory_budget is None:
        binding = "max_slowdown" if planned.plan.peak_bytes > planned.planning.smallest.peak_bytes else ""
    else:
        binding = "memory_budget" if slowdown > ROUNDING else ""
    return {
        "max_slowdown": time.max_slowdown,
        "slowdown": slowdown,
        "fastest_seconds": time.fastest_seconds,
        "binding_budget": binding,
        "timed_minimum_bytes": None if least is None else least.peak_bytes,
    }


def plan_for_minimum_peak(priced: PricedGraph, context: PlanningContext, compares: bool = True) -> PlannedGraph:
    """Returns the graph with the plan of the minimum peak found, whatever the budget.

    With ``compares``, it also has the plan without this package, for budgets that are shares.
    """
    planner, _ = planner_of(priced, context, None)
    without_us = plan_without_us(priced, context, planner)[1] if compares else None
    now(f"planning {len(priced.graph.ops):,} ops, at most {context.options.time_limit:g} s")
    return PlannedGraph(priced, context, planner.search.smallest, planner, plan_without_us=without_us)


def planner_of(priced: PricedGraph, context: PlanningContext, soft_budget: int | None) -> tuple[Planner, ConstrainedGraph]:
    """Returns a planner of the graph under the constraints of the options, and the constrained graph.

    A planner of an earlier attempt on an equal graph starts afresh, with its candidates.
    """
    options = context.options
    policy = policies.parse(options.policy)
    constrained = Constraints(options.save, options.recompute, policy, exact=not options.is_bounded).apply(priced.graph)
    given = () if constrained.candidate is None else (constrained.candidate,)
    for planner in context.planners:
        same_candidates = [c.plan.schedule for c in planner.given] == [c.plan.schedule for c in given]
        if planner.graph == constrained.graph and same_candidates and planner.soft_budget_bytes == soft_budget:
            return planner, constrained
    planner = Planner(constrained.graph, options.time_limit, given=given, soft_budget_bytes=soft_budget)
    context.planners.append(planner)
    return planner, constrained


def stored_plan(priced: PricedGraph, context: PlanningContext, planner: Planner) -> tuple[str, Plan] | None:
    """Returns the plan that another rank, an earlier process or the options have for this graph, with the name of its file.

    Returns None if there is none. Raises ``PlanFileError`` if a stored plan does not fit the graph.
    """
    files = context.options.plan if context.told is None else (context.told.file,)
    if not files or priced.joint.is_region:
        return None
    file, plan = plan_file.fitted(files, planner.graph)
    return file.name, plan


def search(
    priced: PricedGraph,
    context: PlanningContext,
    planner: Planner,
    constrained: ConstrainedGraph,
    limit: int | None,
    time: TimeBudget | None = None,
) -> PlanningResult:
    """Returns the best plan found with a simulated peak of at most ``limit`` bytes.

    With a budget of time alone, it has the least peak within that time. Without a budget, a policy's plan is taken.
    """
    if time is not None and limit is None:
        return least_peak_result(planner, time)
    if not context.options.is_bounded and constrained.candidate is not None:
        constrained.candidate.plan.check()
        return planner.judge(constrained.candidate.plan, None)
    return planner.find(limit, acceptance(priced, context))


def _may_fit(plan: Plan, chosen: ChunkingCandidate, context: PlanningContext, budget: int) -> bool:
    """Returns True if Inductor's code for ``plan`` may fit, although the simulated peak exceeds the budget."""
    accepts = acceptance(chosen.priced, context)
    accepted = chosen.keeps_time_with(plan) and (accepts is None or accepts(plan))
    is_tried = plan.peak_bytes <= budget * (1 + OPTIMISM) or len(plan.graph.ops) <= QUICK_OPS
    return context.decided_by_code and accepted and is_tried


def _within_both(planner: Planner, found: PlanningResult, limit: int, time: TimeBudget) -> tuple[PlanningResult, Plan | None]:
    """Returns the result for both budgets and, if the plan found for the bytes takes too long, the least peak within the time.

    That search may find a plan that keeps to both. It has a time limit of its own.
    """
    if found.plan is not None and time.keeps(found.plan):
        return found, None
    planner.restart()
    least = least_peak(planner, time)
    if least is not None and least.peak_bytes <= limit:
        return dataclasses.replace(found, plan=least), None
    return found, least
