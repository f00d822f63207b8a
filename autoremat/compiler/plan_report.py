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
from autoremat.compiler.joint_graph import PlanningContext, Reference
from autoremat.compiler.loss_chunking import ChunkingChoice
from autoremat.planner.cost import device_memory
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import ROUNDING, PlanningResult
from autoremat.report.report import Report
from autoremat.request.limits import Limits
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
    taken, whole, reference = facts.choice.taken, facts.choice.whole, facts.reference
    captured, limits = taken.priced.captured, context.request.limits
    share = taken.priced.step_share(limits)
    notes = ["" if share is None else share.note, note_on_settings(captured.runs_on)]
    notes += [note_on_sizes(taken.priced.joint.module.graph), _note_on_memory(facts.budget, captured.device.name)]
    return Report.of(
        facts.planning,
        facts.plan,
        facts.code_headroom_bytes + context.extra_headroom_bytes,
        budget_bytes=facts.budget,
        budget_share=None if reference is None else limits.reference_share,
        reference_bytes=None if reference is None else reference.bytes,
        reference_source="" if reference is None else reference.source,
        reference_saved_bytes=None if reference is None else reference.saved_bytes,
        granted_bytes=None if reference is None else limits.granted_bytes or None,
        soft_budget_bytes=facts.soft_budget,
        planning_seconds=time.perf_counter() - start,
        compiler=context.request.options.compiler,
        device=captured.device.name,
        loss_chunks=taken.chunks,
        tiles=taken.priced.joint.tiles,
        tiled_stretches=taken.priced.joint.stretches,
        loss_chunked_by=chunked_by(taken.priced.joint.module),
        code_headroom_bytes=facts.code_headroom_bytes,
        minimum_unchunked_bytes=None if whole is None else whole.planning.smallest.peak_bytes,
        unknown_workspaces=captured.unknown_workspaces,
        accumulated_bytes=taken.priced.accumulated_bytes,
        constraint_warnings=taken.constrained.warnings,
        device_ledger=limits.ledger,
        host_memory_bytes=limits.host_bytes,
        unused_forms=taken.priced.unused_forms,
        notes=tuple(filter(None, notes)),
        **time_figures(facts, limits),
        **dataclasses.asdict(taken.priced.pricing),
    )


def time_figures(facts: ReportedPlan, limits: Limits) -> dict[str, Any]:
    """Returns the fields of a report on the budget of time; empty if there is none."""
    time, least = facts.choice.taken.time, facts.choice.taken.least
    if time is None:
        return {}
    slowdown = time.slowdown(facts.plan)
    if not limits.bounds_memory:
        binding = "max_slowdown" if facts.plan.peak_bytes > facts.planning.smallest.peak_bytes else ""
    else:
        binding = "memory_budget" if slowdown > ROUNDING else ""
    return {
        "max_slowdown": time.max_slowdown,
        "slowdown": slowdown,
        "seconds_without_budget": time.seconds,
        "binding_budget": binding,
        "timed_minimum_bytes": None if least is None else least.peak_bytes,
    }


def _note_on_memory(budget: int | None, device: str) -> str:
    """Returns a note on a budget that exceeds the memory of the device, by its data sheet; empty if there is none."""
    memory = device_memory(device)
    if budget is None or memory is None or budget <= memory:
        return ""
    return f"the budget is {format_bytes(budget)}, and {device} has {format_bytes(memory)} of memory"
