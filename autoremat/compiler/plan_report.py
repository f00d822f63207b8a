"""The report of a plan, before code is generated."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.compiler.counting import note_on_settings
from autoremat.compiler.dynamic_shapes import note_on_sizes
from autoremat.compiler.hints import hints_of
from autoremat.compiler.joint_graph import PlanningContext, Reference
from autoremat.compiler.loss_chunking import ChunkingChoice
from autoremat.planner.cost.datasheets import device_memory
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.report.peak_snapshot import peak_of, profile_of
from autoremat.report.report import Report
from autoremat.torch_private.higher_order import chunked_by


@dataclass(frozen=True)
class ReportedPlan:
    """The facts about a plan that its report states."""

    choice: ChunkingChoice
    plan: Plan
    planning: PlanningResult
    code_headroom_bytes: int
    reference: Reference | None
    """The reference peak, of which the budget is a share; None if the budget is none."""
    budget: int | None
    soft_budget: int | None


def report_of(facts: ReportedPlan, context: PlanningContext, start: float) -> Report:
    """Returns the report of the plan, before code is generated. ``start`` is the time at which planning began."""
    now("describing the plan")
    taken, whole, planning = facts.choice.taken, facts.choice.whole, facts.planning
    priced, limits, baseline = taken.priced, context.request.limits, planning.baseline
    share, captured = priced.step_share(limits), priced.captured
    notes = ("" if share is None else share.note, note_on_settings(captured.runs_on), note_on_sizes(priced.joint.module.graph),
             _note_on_memory(facts.budget, captured.device.name))  # fmt: skip
    plan = dataclasses.replace(
        facts.plan,
        budget_bytes=facts.budget,
        host_budget_bytes=limits.host_bytes,
        lower_bound_bytes=planning.lower_bound_bytes,
        lower_bound_seconds=planning.lower_bound_seconds,
        interrupted=planning.interrupted,
    )
    shares: dict[str, Any] = {}
    if (reference := facts.reference) is not None:
        shares = {
            "budget_share": limits.reference_share,
            "reference_bytes": reference.bytes,
            "reference_source": reference.source,
            "reference_saved_bytes": reference.saved_bytes,
            "granted_bytes": limits.granted_bytes or None,
        }
    return Report(
        plan=plan,
        compiler=context.request.options.compiler,
        device=captured.device.name,
        planning_seconds=time.perf_counter() - start,
        ended_by_clock=planning.ended_by_clock,
        baseline_peak_bytes=baseline.peak_bytes,
        peak_before=peak_of(baseline),
        profile_before=profile_of(baseline),
        smallest_peak_bytes=planning.smallest.peak_bytes,
        minimum_is_searched=planning.least_is_searched,
        loss_chunks=taken.chunks,
        loss_chunked_by=chunked_by(priced.joint.module),
        minimum_unchunked_bytes=None if whole is None else whole.planning.smallest.peak_bytes,
        tiles=priced.joint.tiles,
        tiled_stretches=priced.joint.stretches,
        accumulated_bytes=priced.accumulated_bytes,
        unused_forms=priced.unused_forms,
        constraint_warnings=taken.constrained.warnings,
        notes=tuple(filter(None, notes)),
        hints=hints_of(plan, planning, priced, context),
        code_headroom_bytes=facts.code_headroom_bytes,
        unknown_workspaces=captured.unknown_workspaces,
        limit_bytes=_limit_on(plan, facts, context),
        soft_budget_bytes=facts.soft_budget,
        device_ledger=limits.ledger,
        max_slowdown=None if taken.time is None else taken.time.max_slowdown,
        seconds_without_budget=None if taken.time is None else taken.time.seconds,
        timed_minimum_bytes=None if taken.least is None else taken.least.peak_bytes,
        **shares,
        **dataclasses.asdict(priced.captured.pricing),
    )


def _limit_on(plan: Plan, facts: ReportedPlan, context: PlanningContext) -> int | None:
    """Returns the bound on the simulated peak that ``plan`` keeps to; None if there is none."""
    if facts.budget is not None:
        return facts.budget - facts.code_headroom_bytes - context.extra_headroom_bytes
    if facts.choice.taken.time is not None:
        return plan.peak_bytes
    return facts.soft_budget if facts.soft_budget is not None and plan.peak_bytes <= facts.soft_budget else None


def _note_on_memory(budget: int | None, device: str) -> str:
    """Returns a note on a budget that exceeds the memory of the device, by its data sheet; empty if there is none."""
    memory = device_memory(device)
    if budget is None or memory is None or budget <= memory:
        return ""
    return f"the budget is {format_bytes(budget)}, and {device} has {format_bytes(memory)} of memory"
