"""Compiles a graph in attempts of plan, lower and decide, until the generated code fits the budget.

The decision follows code generation and precedes the compilation of kernels. If the code needs more than the budget, the next
attempt plans with more headroom. If the code leaves memory unused and a looser plan would save time, one further attempt plans
for more memory. If the code of the looser plan does not fit, the first plan is taken. See :mod:`autoremat.compiler.attempts`.
"""

import contextlib
import logging
from dataclasses import dataclass, field, replace
from functools import partial

from autoremat.basics.errors import ConstraintWarning
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.capture.capture import device_of_inputs
from autoremat.compiler.attempts import Accept, Again, Infeasible, Rules, Trial, Verdict, next_step
from autoremat.compiler.joint_graph import Partitioner
from autoremat.compiler.lowering import Compiled, Halves, Partitioning, code_peaks, lower
from autoremat.compiler.peers import Peers
from autoremat.compiler.planned_graph import PlannedGraph, code_unsplit_bytes
from autoremat.compiler.planning import no_code_fits, plan_graph
from autoremat.compiler.problem import Problem, Record, fingerprint, load_record, source_hash
from autoremat.compiler.reference import rehearsal
from autoremat.planner.memory.allocations import beside_sizes
from autoremat.report.report import Report
from autoremat.torch_private import compilers
from autoremat.torch_private.dynamo import sharded_inputs
from autoremat.torch_private.inductor_lowering import LoweredPeak

log = logging.getLogger("autoremat")

ESTIMATED = "the peak of the code is an estimate: a wrapper in C++ does not show it"


@dataclass(frozen=True)
class CompiledGraph:
    """The result of a compilation."""

    function: Compiled
    report: Report | None = None
    """None if the graph has no backward, or if torch's partitioner took it (fallback)."""
    key: str = ""
    """Name of the record on disk."""
    record: Record | None = None
    """The record to save; None if a record exists, or if planning failed. After a fallback the next process shall warn too."""


def compile_graph(problem: Problem, peers: Peers | None = None) -> CompiledGraph:
    """Returns the graph compiled by Inductor, or to run uncompiled, with the plan of all ranks that share it.

    ``peers`` are the ranks that compile it together. Raises ``BudgetInfeasible`` if the code exceeds the budget with every plan
    that is tried, and ``AgreementError`` if another rank fails.
    """
    peers, module = peers or Peers(), problem.module
    assert module is not None
    may_repeat = peers.may_repeat_collectives or problem.may_repeat_collectives
    problem = replace(problem, may_repeat_collectives=may_repeat, sharded_inputs=sharded_inputs(module))
    if problem.request.fuses:
        key = fingerprint(problem)
        problem = replace(problem, key=key, record=load_record(key))
    problem = peers.agree(problem, device_of_inputs(module, problem.inputs))
    trials = Trials(problem, peers)
    with rehearsal(problem) as needed:
        while True:
            now(f"tracing, attempt {len(trials.made) + 1}" if trials.made else "tracing")
            plan = partial(plan_graph, extra_headroom_bytes=trials.next.headroom_bytes)
            partitioning = Partitioning(problem, plan, peers, needed)
            if problem.request.fuses:
                identity = source_hash(), problem.key, trials.next.headroom_bytes, problem.request.must_fit, *peers.identity
                with contextlib.nullcontext() if trials.has_caches else compilers.without_caches():
                    code = lower(problem, partitioning, ("autoremat", *identity), partial(trials.decide, partitioning))
            else:
                code = compilers.compile_uncompiled(module, problem.inputs, Partitioner(partitioning)), {}, Accept()
            found = trials.result(partitioning, *code)
            if found is None:
                continue
            again = peers.settled(problem)
            if again is None:
                return found
            problem, trials = again, Trials(again, peers)


@dataclass
class Trials:
    """The attempts at a problem, and the next one."""

    problem: Problem
    peers: Peers
    made: list[Trial] = field(default_factory=list)
    codes: dict[str, LoweredPeak] = field(default_factory=dict)
    """The code of each half, by its hash: a cache may answer for one that an earlier attempt has generated."""
    has_caches: bool = True
    """False to do without the caches of torch."""

    def __post_init__(self) -> None:
        request, record = self.problem.request, self.problem.record
        is_shared = request.limits.step_share is not None
        self.rules = Rules(request.must_fit, record is None and not is_shared, is_shared)
        self.next = Again(0 if record is None else record.extra_headroom_bytes)

    def decide(self, partitioning: Partitioning[PlannedGraph], halves: Halves) -> Verdict | None:
        """Returns the verdict on the present attempt by the code of one or both halves; None to go on with it."""
        planned = partitioning.planned
        if planned is None:
            return None
        trial = self._trial(planned, self._known(partitioning, halves), is_complete=False)
        return next_step([*self.made, trial], self.rules, planned.gain)

    def result(
        self, partitioning: Partitioning[PlannedGraph], function: Compiled | None, halves: Halves, verdict: Verdict | None
    ) -> CompiledGraph | None:
        """Returns the result of the compilation; None if another attempt follows.

        Raises ``BudgetInfeasible`` if the code exceeds the budget with every plan that was tried.
        """
        problem, planned = self.problem, partitioning.planned
        if planned is None:
            assert function is not None
            return self._unplanned(function, partitioning.fell_back)
        log.debug("%s", planned.report.summary())
        known = self._known(partitioning, halves)
        self.made.append(self._trial(planned, known, is_complete=function is not None))
        verdict = verdict or next_step(self.made, self.rules, planned.gain)
        if isinstance(verdict, Infeasible):
            raise no_code_fits(planned, verdict.minimum_bytes)
        if isinstance(verdict, Again):
            log.debug("planning again for %s of headroom: %s", format_bytes(verdict.headroom_bytes), verdict.purpose.value)
            self.next = verdict
            return None
        assert function is not None
        report = self._completed(planned, any(half.is_estimate for half in known.values()))
        report = replace(report, assumed_sizes=partitioning.facts.assumed_sizes)
        is_saved = bool(problem.key) and not partitioning.fell_back
        record = Record(report, self.next.headroom_bytes, self.peers.agreement) if is_saved else None
        return CompiledGraph(function, report, problem.key, record)

    def _unplanned(self, function: Compiled, fell_back: bool) -> CompiledGraph | None:
        """Returns the result without a plan: the graph has no backward, it fell back, or torch's caches answered."""
        problem, record = self.problem, self.problem.record
        if fell_back or not problem.key:
            return CompiledGraph(function)
        if record is not None:  # torch's caches answered
            for message in () if record.report is None else record.report.constraint_warnings:
                warn_user(message, ConstraintWarning)
            return CompiledGraph(function, record.report, problem.key)
        if not self.has_caches:  # the graph has no backward, although something requires a gradient
            return CompiledGraph(function, None, problem.key, Record(None, agreement=self.peers.agreement))
        self.has_caches = False  # they answered, but the record of this compilation is lost: compiling again restores it
        return None

    def _known(self, partitioning: Partitioning[PlannedGraph], halves: Halves) -> Halves:
        """Returns all that is known of the code of both halves, by this attempt and by earlier ones."""
        hashes = partitioning.facts.hashes
        self.codes.update({hashes[is_backward]: half for is_backward, half in halves.items()})
        return {half: self.codes[hashes[half]] for half in (False, True) if hashes[half] in self.codes}

    def _trial(self, planned: PlannedGraph, halves: Halves, is_complete: bool) -> Trial:
        """Returns the facts about an attempt that decisions depend on.

        Peaks count all else that is allocated beside the code. Blocks of CUDA count whole.
        """
        pool = max((half.pool_bytes for half in halves.values() if half.pool_bytes is not None), default=None)
        timeline, peaks = planned.plan.timeline, code_peaks(halves)
        for is_backward, half in halves.items():
            peaks[is_backward] += timeline.beside_bytes
            if planned.priced.captured.runs_on == "cuda" and half.allocations is not None:
                run = {one: code.allocations for one, code in halves.items() if code.allocations and one <= is_backward}
                peaks[is_backward] += code_unsplit_bytes(run, beside_sizes(timeline))
        return Trial(
            headroom_bytes=self.next.headroom_bytes,
            purpose=self.next.purpose,
            code_peaks=peaks,
            pool_bytes=pool,
            limits=planned.limits,
            slacks=planned.slacks,
            is_complete=is_complete,
            budget_bytes=planned.budget.bytes or 0,
            simulated_bytes=planned.plan.peak_bytes + planned.budget.code_headroom_bytes,
            minimum_bytes=planned.planning.smallest.peak_bytes,
            code_headroom_bytes=planned.budget.code_headroom_bytes,
            is_last_plan=planned.is_last_plan,
        )

    def _completed(self, planned: PlannedGraph, is_estimate: bool) -> Report:
        """Returns the report with the peak of the accepted code."""
        report, record, last = planned.report, self.problem.record, self.made[-1]
        plan, peak, pool, budget = report.plan, last.code_peak_bytes, last.pool_bytes, planned.budget.bytes
        if peak is None and record is not None and record.report is not None:
            peak, pool = record.report.compiled_peak_bytes, record.report.graph_pool_bytes
        if peak is not None and self.problem.request.limits.takes_whole_reference:  # its code may exceed its simulation
            plan = replace(plan, budget_bytes=max(peak, budget or 0))
        by_clock = self.problem.searches.ended_by_clock  # also of a search behind code generation
        return replace(
            report,
            plan=replace(plan, interrupted=True) if by_clock else plan,
            ended_by_clock=by_clock or report.ended_by_clock,
            compiled_peak_bytes=peak,
            replans=len(self.made) - 1,
            graph_pool_bytes=pool,
            notes=(*report.notes, ESTIMATED) if is_estimate else report.notes,
        )
