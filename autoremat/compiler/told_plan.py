"""The plan that a leader sends to the other ranks, and its application to their own graph."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

from autoremat.basics.codec import Codec, plain
from autoremat.basics.errors import AgreementError
from autoremat.compiler.counting import Count
from autoremat.compiler.headroom import headroom_of
from autoremat.compiler.infeasibility import infeasible
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.compiler.loss_chunking import ChunkingCandidate, ChunkingChoice, with_chunks
from autoremat.compiler.planning import BudgetedGraph, EarlierSearches, ReportedPlan, planner_of, report_of
from autoremat.compiler.reference import Reference
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_file import difference, graph_hash
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.time_budget import TimeBudget
from autoremat.report.report import Report

TOLD = Codec(signed=True)


@dataclass(frozen=True)
class ToldPlan:
    """A plan of another rank, with the figures of its search."""

    plan: str
    """The text of the plan, which holds the seconds of that rank's cost model."""
    chunks: int
    """Number of chunks of the loss."""
    fits: bool
    """True if the simulated peak keeps to the budget on that rank."""
    budget_bytes: int | None
    soft_budget_bytes: int | None
    reference_bytes: int | None
    reference_source: str
    reference_saved_bytes: int
    lower_bound_bytes: int
    lower_bound_seconds: float
    candidates: int
    interrupted: bool
    ended_by_clock: bool = False
    fastest_seconds: float | None = None
    """Seconds of the step under the fastest plan; None without a budget of time."""

    def to_json(self) -> str:
        """Returns this as JSON text."""
        return json.dumps(plain(self))

    @classmethod
    def of_report(cls, report: Report) -> ToldPlan:
        """Returns the plan of an earlier compilation's report, which must have one."""
        assert report.plan is not None
        return cls(
            plan=report.plan.dumps(),
            chunks=report.loss_chunks,
            fits=True,
            budget_bytes=report.budget_bytes,
            soft_budget_bytes=report.soft_budget_bytes,
            reference_bytes=report.reference_bytes,
            reference_source=report.reference_source,
            reference_saved_bytes=report.reference_saved_bytes or 0,
            lower_bound_bytes=report.lower_bound_bytes,
            lower_bound_seconds=report.lower_bound_seconds or 0.0,
            candidates=1,
            interrupted=report.time_limited,
            ended_by_clock=report.ended_by_clock,
            fastest_seconds=report.fastest_seconds,
        )


def told(planned: BudgetedGraph) -> ToldPlan:
    """Returns the plan of ``planned`` in the form in which other ranks receive it."""
    report, planning = planned.report, planned.planning
    return ToldPlan(
        plan=planned.plan.dumps(),
        chunks=report.loss_chunks,
        fits=planning.plan is not None,
        budget_bytes=report.budget_bytes,
        soft_budget_bytes=report.soft_budget_bytes,
        reference_bytes=report.reference_bytes,
        reference_source=report.reference_source,
        reference_saved_bytes=report.reference_saved_bytes or 0,
        lower_bound_bytes=planning.lower_bound_bytes,
        lower_bound_seconds=planning.lower_bound_seconds,
        candidates=planning.candidates,
        interrupted=planning.interrupted,
        ended_by_clock=planning.ended_by_clock,
        fastest_seconds=report.fastest_seconds,
    )


def plan_as_told(
    priced: PricedGraph, context: PlanningContext, message: ToldPlan, earlier: EarlierSearches | None = None
) -> BudgetedGraph:
    """Returns the graph with another rank's plan, checked and simulated on this rank's graph.

    Seconds are those of the other rank, so all reports are alike. Raises ``BudgetInfeasible`` if this rank's own peak exceeds
    the budget, and ``PlanInvalid`` if the plan breaks a rule of this rank's graph.
    """
    start, earlier = time.perf_counter(), earlier or EarlierSearches()
    theirs = Plan.loads(message.plan, "the plan of another rank")
    form = priced if message.chunks == 1 else with_chunks(priced, context, message.chunks)
    whole, _ = planner_of(priced, context, message.soft_budget_bytes, earlier)
    planner, constrained = planner_of(form, context, message.soft_budget_bytes, earlier)
    graph = _with_seconds_of(theirs.graph, planner.graph)
    plan = Plan.of(graph, theirs.schedule, theirs.label)
    plan.check()
    planning = PlanningResult(
        plan=plan if message.fits else None,
        baseline=whole.baseline,
        smallest=plan,
        lower_bound_bytes=message.lower_bound_bytes,
        lower_bound_seconds=message.lower_bound_seconds,
        candidates=message.candidates,
        interrupted=message.interrupted,
        ended_by_clock=message.ended_by_clock,
    )
    headroom = headroom_of(priced, context)
    budget = message.budget_bytes
    if budget is not None and context.request.must_fit and not context.decided_by_code and plan.peak_bytes + headroom > budget:
        raise infeasible(planning, context.request.limits, budget, form.captured.device.name, plan.peak_bytes + headroom)
    count = Count.of(priced, context, headroom)
    reference = (
        None
        if message.reference_bytes is None
        else Reference(message.reference_bytes, message.reference_source, message.reference_saved_bytes)
    )
    allowed, fastest = context.request.limits.max_slowdown, message.fastest_seconds
    time_budget = None if allowed is None or fastest is None else TimeBudget(fastest, allowed)
    candidate = ChunkingCandidate(form, planner, constrained, planning, message.chunks, time=time_budget)
    choice = ChunkingChoice(candidate, None)
    facts = ReportedPlan(choice, plan, planning, headroom, count, reference, budget, message.soft_budget_bytes)
    report = report_of(facts, context, start)
    return BudgetedGraph(form, context, plan, None, planning, report, headroom, not message.fits, count)


def _with_seconds_of(theirs: Graph, ours: Graph) -> Graph:
    """Returns ``ours`` with the seconds of ``theirs``. Raises ``AgreementError`` if their structures differ."""
    if graph_hash(theirs) != graph_hash(ours):
        raise AgreementError(f"the plan of another rank is for another graph:\n{difference(theirs, ours)}")
    ops = tuple(
        replace(own, seconds=other.seconds, memory_bound_seconds=other.memory_bound_seconds)
        for own, other in zip(ours.ops, theirs.ops, strict=True)
    )
    return replace(ours, ops=ops, saving_seconds_per_byte=theirs.saving_seconds_per_byte)
