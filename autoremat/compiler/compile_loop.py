"""Compiles a graph in attempts of plan, lower and decide, until the generated code fits the budget.

The decision follows code generation and precedes the compilation of kernels. If the code needs more than the budget, the next
attempt plans with more headroom. If the code leaves memory unused and a looser plan would save time, one further attempt plans
for more memory. If the code of the looser plan does not fit, the first plan is taken. See :mod:`autoremat.compiler.attempts`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from autoremat.basics.errors import ConstraintWarning
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.capture.capture import device_of_inputs
from autoremat.compiler import records
from autoremat.compiler.attempts import (
    Again,
    Attempt,
    Infeasible,
    Rules,
    Verdict,
    code_peak_bytes,
    pool_bytes,
    unused_reason,
    verdict_on,
)
from autoremat.compiler.cache_key import fingerprint, source_hash
from autoremat.compiler.counting import Codes, code_unsplit_bytes
from autoremat.compiler.dynamic_shapes import note_on_sizes
from autoremat.compiler.forms import host_remedy
from autoremat.compiler.infeasibility import infeasible
from autoremat.compiler.joint_graph import PlanningContext, Reference
from autoremat.compiler.lowering import Compiled, GraphSource, Lowered, lower
from autoremat.compiler.partitioner import Partitioner
from autoremat.compiler.partitioning import Partitioning
from autoremat.compiler.peers import Peers
from autoremat.compiler.plain_code import reference_by_code
from autoremat.compiler.planning import BudgetedGraph, EarlierSearches
from autoremat.compiler.records import Record
from autoremat.compiler.reference import CODE
from autoremat.planner.memory.allocations import HalfAllocations, beside_sizes
from autoremat.report.report import Report
from autoremat.request.request import Request
from autoremat.torch_private import compilers
from autoremat.torch_private.dynamo import sharded_inputs

log = logging.getLogger("autoremat")

ESTIMATED = "the peak of the code is an estimate: a C++ wrapper that branches does not show it"


@dataclass(frozen=True)
class CompiledGraph:
    """The result of a compilation."""

    function: Compiled
    report: Report | None
    """None if the graph has no backward, or if torch's partitioner took it (fallback)."""
    key: str
    """Name of the record on disk."""
    record: Record | None = None
    """The record to save; None if a record exists, or if planning failed. After a fallback the next process shall warn too."""


def compile_graph(source: GraphSource, request: Request, peers: Peers | None = None) -> CompiledGraph:
    """Returns the graph compiled by Inductor, with the plan of all ranks that share it.

    ``peers`` are the ranks that compile it together. Raises ``BudgetInfeasible`` if the code exceeds the budget with every plan
    that is tried, and ``AgreementError`` if another rank fails.
    """
    peers = peers or Peers()
    may_repeat = peers.may_repeat_collectives or source.may_repeat_collectives
    key = fingerprint(source.module, source.inputs, request, may_repeat)
    request = peers.agree(request, device_of_inputs(source.module, source.inputs), records.load(key))
    while True:
        found = _compile_in_attempts(source, request, key, peers, may_repeat)
        if peers.settled():
            return found


def _compile_in_attempts(source: GraphSource, request: Request, key: str, peers: Peers, may_repeat: bool) -> CompiledGraph:
    record = peers.record
    is_shared = request.limits.step_share is not None
    rules = Rules(request.must_fit, record is None and not is_shared, is_shared)
    step = Again(0 if record is None else record.extra_headroom_bytes)
    caches: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    earlier = EarlierSearches()
    attempts: list[Attempt] = []
    codes = Codes()
    is_estimate = False
    reference = _reference(source, request, record, may_repeat)
    while True:
        now(f"tracing, attempt {len(attempts) + 1}" if attempts else "tracing")
        context = PlanningContext(
            request,
            step.headroom_bytes,
            cuda_name=source.cuda_name,
            sharded_inputs=sharded_inputs(source.module),
            may_repeat_collectives=may_repeat,
            reference=reference,
            rates=peers.rates,
            host_link=peers.host_link,
        )
        partitioning = Partitioning(context, partial(peers.plan, earlier=earlier), peers.fail)
        identity = ("autoremat", source_hash(), key, step.headroom_bytes, request.must_fit, *peers.identity)
        decide = _decision(attempts, rules, partitioning, step, codes)
        with caches():
            function, lowered, verdict = lower(source, partitioning, identity, decide)
        is_estimate = is_estimate or lowered.is_estimate
        planned = partitioning.planned
        if planned is None:
            assert function is not None
            if partitioning.fell_back:
                return CompiledGraph(function, None, key)
            if record is not None:  # torch's caches answered
                return CompiledGraph(function, _known_report(record), key)
            if caches is compilers.without_caches:  # the graph has no backward, although something requires a gradient
                return CompiledGraph(function, None, key, Record(None, agreement=peers.agreement))
            # Torch's caches answered, but the record of this compilation is lost. Compiling without caches restores it.
            caches = compilers.without_caches
            continue
        log.debug("%s", planned.report.summary())
        attempts.append(attempt_of(planned, step, lowered, codes, is_complete=function is not None))
        verdict = verdict or verdict_on(attempts, rules, planned.gain)
        if isinstance(verdict, Infeasible):
            raise _error(planned, verdict)
        if not isinstance(verdict, Again):
            assert function is not None
            report = _completed(planned, attempts, earlier, record, is_estimate)
            report = dataclasses.replace(report, assumed_sizes=partitioning.assumed_sizes)
            saved = None if partitioning.fell_back else Record(report, step.headroom_bytes, peers.agreement)
            return CompiledGraph(function, report, key, saved)
        log.debug("planning again for %s of headroom: %s", format_bytes(verdict.headroom_bytes), verdict.purpose.value)
        step = verdict


def compile_uncompiled(source: GraphSource, request: Request, peers: Peers | None = None) -> CompiledGraph:
    """Returns a callable that runs the halves of the planned graph as FX graphs, without generated code."""
    now("tracing")
    peers = peers or Peers()
    request = peers.agree(request, device_of_inputs(source.module, source.inputs))
    context = PlanningContext(
        request,
        rates=peers.rates,
        host_link=peers.host_link,
        may_repeat_collectives=peers.may_repeat_collectives,
        sharded_inputs=sharded_inputs(source.module),
    )
    while True:
        partitioning = Partitioning(context, peers.plan, peers.fail)
        function = compilers.compile_uncompiled(source.module, source.inputs, Partitioner(partitioning))
        if peers.settled():
            planned = partitioning.planned
            if planned is None:
                return CompiledGraph(function, None, "")
            report = dataclasses.replace(planned.report, assumed_sizes=partitioning.assumed_sizes)
            return CompiledGraph(function, report, "")


def _reference(source: GraphSource, request: Request, record: Record | None, may_repeat: bool) -> Reference | None:
    """Returns the reference peak by Inductor's own code; None without a share. A record of an earlier process knows it."""
    known = None if record is None else record.report
    if known is not None and known.reference_bytes is not None and known.reference_source == CODE:
        return Reference(known.reference_bytes, CODE, known.reference_saved_bytes or 0)
    context = PlanningContext(
        request,
        cuda_name=source.cuda_name,
        sharded_inputs=sharded_inputs(source.module),
        may_repeat_collectives=may_repeat,
    )
    return reference_by_code(source, context)


def _known_report(record: Record) -> Report | None:
    """Returns the report of an earlier process, and repeats its warnings."""
    for message in () if record.report is None else record.report.constraint_warnings:
        warn_user(message, ConstraintWarning)
    return record.report


def attempt_of(planned: BudgetedGraph, step: Again, lowered: Lowered, codes: Codes, is_complete: bool) -> Attempt:
    """Returns the facts about an attempt that decisions depend on. Adds the allocations of its code to ``codes``."""
    known = codes.note(step.headroom_bytes, lowered.allocations)
    return Attempt(
        headroom_bytes=step.headroom_bytes,
        purpose=step.purpose,
        code_peaks=_code_peaks(planned, lowered.code_peaks, known),
        pool_bytes=lowered.pool_bytes,
        limits={half: planned.limit_bytes(half) for half in (False, True)},
        slacks=planned.slacks,
        is_complete=is_complete,
        budget_bytes=planned.report.budget_bytes or 0,
        simulated_bytes=planned.report.predicted_peak_bytes + planned.code_headroom_bytes,
        minimum_bytes=planned.planning.smallest.peak_bytes,
        code_headroom_bytes=planned.code_headroom_bytes,
        is_last_plan=planned.is_last_plan,
    )


def _code_peaks(planned: BudgetedGraph, replayed: Mapping[bool, int], known: Mapping[bool, HalfAllocations]) -> dict[bool, int]:
    """Returns the peaks of the halves with generated code, beside all else that is allocated. Blocks of CUDA count whole."""
    timeline, unsplit = planned.plan.timeline, dict[bool, int]()
    if planned.priced.captured.runs_on == "cuda":
        beside = beside_sizes(timeline)
        for half in replayed.keys() & known.keys():
            have_run = known if half else {False: known[False]}
            unsplit[half] = code_unsplit_bytes(have_run, beside)
    return {half: peak + timeline.beside_bytes + unsplit.get(half, 0) for half, peak in replayed.items()}


def _decision(
    attempts: list[Attempt], rules: Rules, partitioning: Partitioning[BudgetedGraph], step: Again, codes: Codes
) -> Callable[[Lowered], Verdict | None]:
    """Returns the function that decides, from the code of one or both halves, on the present attempt."""

    def decide(lowered: Lowered) -> Verdict | None:
        planned = partitioning.planned
        if planned is None:
            return None
        tried = [*attempts, attempt_of(planned, step, lowered, codes, is_complete=False)]
        return verdict_on(tried, rules, planned.gain)

    return decide


def _completed(
    planned: BudgetedGraph,
    attempts: list[Attempt],
    earlier: EarlierSearches,
    record: Record | None,
    is_estimate: bool,
) -> Report:
    """Returns the report with the peak of the accepted code."""
    report, peak, pool = planned.report, code_peak_bytes(attempts), pool_bytes(attempts)
    if peak is None and record is not None and record.report is not None:
        peak, pool = record.report.compiled_peak_bytes, record.report.graph_pool_bytes
    if peak is not None and planned.context.request.limits.takes_whole_reference:  # its code may exceed its simulation
        plan = dataclasses.replace(report.plan, budget_bytes=max(peak, report.budget_bytes or 0))
        report = dataclasses.replace(report, plan=plan)
    reason = "" if report.budget_bytes is None or planned.planner is None else unused_reason(attempts, not planned.is_binding)
    if earlier.ended_by_clock:  # also of a search behind code generation
        report = dataclasses.replace(report, plan=dataclasses.replace(report.plan, interrupted=True), ended_by_clock=True)
    return dataclasses.replace(
        report,
        compiled_peak_bytes=peak,
        replans=len(attempts) - 1,
        room_left_because=reason,
        graph_pool_bytes=pool,
        notes=(*report.notes, ESTIMATED) if is_estimate else report.notes,
    )


def _error(planned: BudgetedGraph, verdict: Infeasible) -> Exception:
    """Returns the error for a graph whose code exceeds the budget with every plan that was tried."""
    report, planning = planned.report, planned.planning
    request, card = planned.context.request, planned.context.cuda_name
    room = (report.budget_bytes or 0) - max(0, verdict.minimum_bytes - planning.smallest.peak_bytes)
    sizes = note_on_sizes(planned.priced.joint.module.graph)
    remedies = (sizes, host_remedy(planned.priced.captured, planning.smallest, request, card, room))
    budget, least = report.budget_bytes or 0, verdict.minimum_bytes
    error = infeasible(planning, request, budget, report.device, least, remedies, plan_file=planned.plan_file)
    return error.asked_as(report.budget_share, report.reference_bytes)
