"""A graph with its plan: what the later stages ask about it, and its report before code is generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.capture.capture import Capture
from autoremat.capture.communication import GLOO_THREADS, held_bytes
from autoremat.compiler.joint_graph import PricedGraph, note_on_sizes
from autoremat.compiler.problem import Problem, Reference
from autoremat.planner.constraints.constraints import ConstrainedGraph
from autoremat.planner.cost.datasheets import device_memory
from autoremat.planner.cost.durations import ROUNDING
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import SHARDS, Constraint, Form, Role, Value
from autoremat.planner.memory.allocations import HalfAllocations, joined, unsplit_bytes
from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.planner.plans.limits import Limits, PlanPoint, border_bytes, point_of
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner, PlanningResult
from autoremat.report.peak_snapshot import peak_of, profile_of
from autoremat.report.report import Report
from autoremat.torch_private import compilers
from autoremat.torch_private.allocator import settings_of_process
from autoremat.torch_private.higher_order import chunked_by
from autoremat.workspaces.formulas import SMALL

WORTH = 0.05
"""Share of the step's seconds or of its peak above which a hint is worth its line."""


@dataclass(frozen=True)
class Budget:
    """The bytes that the plans of one attempt may take. Here a share has become bytes."""

    bytes: int | None
    """What the step may take; None for no limit."""
    code_headroom_bytes: int
    """Bytes that generated code may need above the simulated peak."""
    extra_headroom_bytes: int = 0
    """Bytes by which the code of an earlier plan needed more memory than simulated. A negative number loosens the plan."""
    soft_bytes: int | None = None
    """Peak that a plan without a budget stays below, unless that costs much time."""
    reference: Reference | None = None
    """The reference peak, of which the budget is a share; None if it is none."""

    @property
    def limit_bytes(self) -> int | None:
        """The most bytes of the simulated peak; None for no limit."""
        return None if self.bytes is None else self.bytes - self.code_headroom_bytes - self.extra_headroom_bytes


@dataclass(frozen=True, eq=False)
class PlannedGraph:
    """A priced graph, as it is or rewritten, with its plan under a budget."""

    priced: PricedGraph
    budget: Budget
    planner: Planner
    constrained: ConstrainedGraph
    planning: PlanningResult
    """Result of the search."""
    plan: Plan
    """The plan found; if none fits, that of the minimum peak."""
    plan_file: str | None = None
    """Name of the plan file that is applied instead of a search."""
    free_seconds: float | None = None
    """Predicted seconds of the step without a budget, beyond which a budget of time allows a share; None without one."""
    whole: PlannedGraph | None = None
    """The graph without a chunked loss; None if it was not planned."""
    remedy: str = ""
    """How the user makes the loss chunkable, if it is not."""
    seconds: float = 0.0
    """The time that planning took."""

    @property
    def problem(self) -> Problem:
        """What is asked of the graph."""
        return self.priced.problem

    @property
    def keeps_time(self) -> bool:
        """True if the plan keeps to the budget of time, if there is one."""
        return limits_of(self.priced, self.budget, self.free_seconds).keeps_time(self.plan)

    @property
    def fits(self) -> bool:
        """True if the plan keeps to all budgets."""
        return self.planning.plan is not None and self.keeps_time

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """What is least for the best graph of several: the seconds if a plan fits, else the peak."""
        limits = self.problem.request.limits
        by_peak = self.planning.plan is None or (not limits.bounds_peak and limits.is_bounded)
        return not self.fits, self.planning.plan is None, self.plan.peak_bytes if by_peak else self.plan.predicted_seconds

    @property
    def is_last_plan(self) -> bool:
        """True if no other plan can be tried: the plan is stored, or has the minimum peak because none fits in simulation."""
        return self.plan_file is not None or self.planning.plan is None

    @property
    def fastest(self) -> Plan | None:
        """The plan of least time; None if no other plans are known."""
        return None if self.plan_file is not None else self.planner.fastest(limits_of(self.priced, self.budget))

    @property
    def is_binding(self) -> bool:
        """True if the plan costs more than the fastest plan, so that the budget decides."""
        fastest = self.fastest
        return fastest is not None and self.plan.cost_seconds > fastest.cost_seconds

    def gain(self, headroom_bytes: int) -> float:
        """Returns the share of the step's seconds that the plan for another headroom saves.

        That search has a time limit of its own, because code was generated since the last one.
        """
        if self.plan_file is not None or self.budget.bytes is None:
            return 0.0
        self.planner.restart()
        looser = replace(self.budget, extra_headroom_bytes=headroom_bytes).limit_bytes
        plan = self.planner.find(replace(limits_of(self.priced, self.budget), peak_bytes=looser)).plan
        return 0.0 if plan is None else (self.plan.cost_seconds - plan.cost_seconds) / self.plan.graph.step_seconds

    @property
    def slacks(self) -> dict[bool, int]:
        """Bytes by which each half stays below its share of a step's budget, by ``is_backward``; empty without a share."""
        share = self.priced.share
        if share is None:
            return {}
        point = counted(self.plan, self.priced)
        return {
            False: share.forward_peak_bytes - point.forward_peak_bytes,
            True: share.backward_peak_bytes - point.backward_peak_bytes,
        }

    @property
    def limits(self) -> dict[bool, int | None]:
        """The limits in bytes on the code of both halves, by ``is_backward``; None for no limit."""
        share = self.priced.share
        if self.problem.request.limits.takes_whole_reference:
            return {False: None, True: None}
        if share is None:
            return {False: self.budget.bytes, True: self.budget.bytes}
        at_borders = border_bytes(self.plan, self.priced.kept_inputs)
        return {False: share.forward_peak_bytes, True: share.backward_peak_bytes - at_borders}

    @cached_property
    def report(self) -> Report:
        """The report of the plan, before code is generated."""
        now("describing the plan")
        problem, planning, budget, captured = self.problem, self.planning, self.budget, self.priced.captured
        limits, joint, whole, least = problem.request.limits, self.priced.joint, self.whole, planning.least
        notes = (note_on_settings(captured.runs_on), note_on_sizes(joint.module.graph),
                 _note_on_memory(budget.bytes, captured.device.name))  # fmt: skip
        plan = replace(
            self.plan,
            budget_bytes=budget.bytes,
            host_budget_bytes=limits.host_bytes,
            lower_bound_bytes=planning.lower_bound_bytes,
            lower_bound_seconds=planning.lower_bound_seconds,
            interrupted=planning.interrupted,
        )
        return Report(
            plan=plan,
            compiler=problem.request.options.compiler,
            device=captured.device.name,
            planning_seconds=self.seconds,
            ended_by_clock=planning.ended_by_clock,
            baseline_peak_bytes=planning.baseline.peak_bytes,
            peak_before=peak_of(planning.baseline),
            profile_before=profile_of(planning.baseline),
            fastest_seconds=((whole or self).fastest or planning.baseline).predicted_seconds,
            smallest_peak_bytes=planning.smallest.peak_bytes,
            minimum_is_searched=planning.least_is_searched,
            loss_chunks=joint.chunks,
            loss_chunked_by=chunked_by(joint.module),
            minimum_unchunked_bytes=None if whole is None else whole.planning.smallest.peak_bytes,
            tiles=joint.tiles,
            tiled_stretches=joint.stretches,
            accumulated_bytes=self.priced.accumulated_bytes,
            unused_forms=self.priced.unused_forms,
            constraint_warnings=self.constrained.warnings,
            ranks=problem.ranks,
            notes=tuple(filter(None, notes)),
            hints=hints_of(plan, planning, self.priced),
            code_headroom_bytes=budget.code_headroom_bytes,
            unknown_workspaces=captured.unknown_workspaces,
            limit_bytes=self._limit_bytes,
            soft_budget_bytes=budget.soft_bytes,
            device_ledger=limits.ledger,
            max_slowdown=None if self.free_seconds is None else limits.max_slowdown,
            seconds_without_budget=self.free_seconds,
            timed_minimum_bytes=None if least is None else least.peak_bytes,
            **self._figures_of_share,
            **asdict(captured.pricing),
        )

    @property
    def _figures_of_share(self) -> dict[str, Any]:
        """The figures of a budget that is a share of a reference; none of any other."""
        reference, limits = self.budget.reference, self.problem.request.limits
        if reference is None:
            return {}
        return {
            "budget_share": limits.reference_share,
            "reference_bytes": reference.bytes,
            "reference_source": reference.source,
            "reference_saved_bytes": reference.saved_bytes,
            "granted_bytes": limits.granted_bytes or None,
        }

    @property
    def _limit_bytes(self) -> int | None:
        """The bound on the simulated peak that the plan keeps to; None if there is none."""
        if self.budget.bytes is not None:
            return self.budget.limit_bytes
        soft, peak = self.budget.soft_bytes, self.plan.peak_bytes
        return peak if self.free_seconds is not None else soft if peak <= (soft or 0) else None


def _note_on_memory(budget: int | None, device: str) -> str:
    """Returns a note on a budget that exceeds the memory of the device, by its data sheet; empty if there is none."""
    memory = device_memory(device)
    if budget is None or memory is None or budget <= memory:
        return ""
    return f"the budget is {format_bytes(budget)}, and {device} has {format_bytes(memory)} of memory"


def hints_of(plan: Plan, planning: PlanningResult, priced: PricedGraph) -> tuple[str, ...]:
    """Returns the hints for a plan, each with the figures of this step."""
    request = priced.problem.request
    options, limits = request.options, request.limits
    hints = []
    if not any((limits.is_bounded, options.plan, options.policy, options.recompute)):
        least = "" if planning.least_is_searched else "at most "
        least += format_bytes(planning.smallest.peak_bytes)
        hints.append(f"no memory_budget is set: this plan needs {format_bytes(plan.peak_bytes)}, the least possible is {least}")
    forced = [op for op in plan.recomputed if priced.graph.ops[op].constraint is Constraint.RECOMPUTE]
    seconds = sum(priced.graph.ops[op].seconds for op in forced)
    if plan.graph.step_seconds and seconds > WORTH * plan.graph.step_seconds:
        free = max(0, (plan.budget_bytes or 0) - plan.peak_bytes)
        unused = f", while {format_bytes(free)} of the budget stay unused" if free else ""
        hints.append(
            f"the model checkpoints parts of itself: they run again whatever the budget, {len(forced)} ops for "
            f"{format_seconds(seconds)}{unused}. Leave that off (HF: gradient_checkpointing=False), and the planner chooses"
        )
    if request.returned_bytes > WORTH * plan.peak_bytes:
        hints.append(request.returned)
    return tuple(hints)


# -- what plans must keep to -----------------------------------------------------------------------------------------------


def limits_of(priced: PricedGraph, budget: Budget, free_seconds: float | None = None) -> Limits:
    """Returns what the plans of a graph must keep to, where a budget of time is a share beyond ``free_seconds``."""
    slowdown, share, seconds = priced.problem.request.limits.max_slowdown, priced.share, None
    if free_seconds is not None and slowdown is not None:
        seconds = free_seconds * (1.0 + slowdown + ROUNDING)
    if share is not None:
        share = share.less(headroom_of(priced) + budget.extra_headroom_bytes)
    return Limits(budget.limit_bytes, None, seconds, share, priced.kept_inputs)


def counted(plan: Plan, priced: PricedGraph) -> PlanPoint:
    """Returns ``plan`` as a point in the ledger of its step, with the bytes that generated code may need beside its buffers."""
    return point_of(plan, priced.kept_inputs).with_more(headroom_of(priced))


def headroom_of(priced: PricedGraph) -> int:
    """Returns the bytes to keep free of the budget: those of generated code, and tensors that a collective holds too long.

    Generated code also makes copies into the memory of CUDA graphs.
    """
    captured, held = priced.captured, held_too_long_bytes(priced.captured)
    if not priced.problem.request.fuses:
        return held
    held += code_headroom_bytes(captured.graph)
    copied = _copied_inputs(priced)
    if copied is None:
        return held
    return held + sum(copied.values()) + sum(one.bytes for one in captured.graph.values if one.role is Role.TANGENT)


# -- what generated code allocates -------------------------------------------------------------------------------------------

WITHOUT_RULE = ("roundup_power2_divisions", "max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb")
"""Settings of the allocator that change blocks and that no rule here follows."""


def code_headroom_bytes(graph: Graph) -> int:
    """Returns the code headroom in bytes: memory that generated code may allocate at any time beside its buffers."""
    return SMALL + (SMALL if any(op.target.startswith("aten.convolution") and op.workspace_bytes for op in graph.ops) else 0)


def _fixed_strides(tensor: object) -> tuple[int, ...] | None:
    """Returns the strides of the dimensions longer than 1 of an image or a convolution weight (four dimensions).

    Returns None for other tensors and for symbolic sizes.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.dim() != 4:
        return None
    pairs = list(zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(step for size, step in pairs if size != 1) if all(type(n) is int for pair in pairs for n in pair) else None


def _copied_inputs(priced: PricedGraph) -> dict[str, int] | None:
    """Returns the bytes by name of the inputs that CUDA graphs copy; None without CUDA graphs."""
    captured = priced.captured
    if captured.runs_on != "cuda" or not compilers.records_cuda_graphs():
        return None
    found = {number: captured.value_nodes[number] for number in priced.kept_inputs}
    return {node.name: captured.graph.values[number].bytes for number, node in found.items() if node is not None}


def held_too_long_bytes(captured: Capture) -> int:
    """Returns the most bytes that finished collectives may still hold at any time."""
    held = [held_bytes(node, captured.runs_on) for node in captured.op_nodes]
    for value, form in _shards(captured.graph):
        if form.load.temporary_bytes:
            held.append(form.device_bytes + value.bytes + form.load.temporary_bytes)
    return GLOO_THREADS * max(held, default=0)


def _shards(graph: Graph) -> Iterator[tuple[Value, Form]]:
    return ((value, form) for value in graph.values for form in value.forms if form.name == SHARDS)


def replay_context(priced: PricedGraph) -> ReplayContext:
    """Returns the context for the replay."""
    captured, graph, held = priced.captured, priced.graph, {}
    for number in graph.forward_outputs:
        holder = captured.value_nodes[number]
        held[holder.name if holder is not None else graph.values[number].name] = graph.values[number].bytes
    workspaces: dict[str, dict[int, int]] = {}
    for target, sizes in graph.workspaces().items():
        parts = target.split(".")  # as in "aten.mm.default"; names of higher-order ops and of custom kernels differ
        if len(parts) == 3:
            known = workspaces.setdefault(parts[1], {})
            known.update({made: max(size, known.get(made, 0)) for made, size in sizes.items()})
    for value, form in _shards(graph):
        workspaces.setdefault("all_gather_into_tensor", {})[value.bytes] = form.load.temporary_bytes
    inputs = captured.joint.graph.find_nodes(op="placeholder")
    return ReplayContext(
        held,
        captured.device.allocation_bytes,
        workspaces,
        code_headroom_bytes(graph) + held_too_long_bytes(captured),
        {n.name: strides for n in inputs if (strides := _fixed_strides(n.meta.get("val"))) is not None},
        _copied_inputs(priced),
        captured.runs_on,
    )


def code_unsplit_bytes(halves: Mapping[bool, HalfAllocations], beside: Sequence[int]) -> int:
    """Returns the bytes of blocks beside the tensors in them at the peak of generated code, of which one half may be missing.

    Further allocations of the bytes ``beside`` are live. With both halves, it is the peak of the backward.
    """
    step = joined(halves[False], halves[True]) if len(halves) == 2 else next(iter(halves.values()))
    is_expandable = "expandable_segments:True" in settings_of_process().replace(" ", "")
    return unsplit_bytes(step.beside(beside), is_expandable)


def note_on_settings(device_type: str) -> str:
    """Returns a note on the settings of the allocator that no rule here follows; empty if there are none."""
    text = settings_of_process() if device_type == "cuda" else ""
    ignored = [name for name in WITHOUT_RULE if name in text]
    return f"blocks of memory are counted without {', '.join(ignored)}" if ignored else ""
