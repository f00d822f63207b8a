"""Compiles a graph in attempts of plan, lower and check, until the generated code fits the budget.

Every attempt is checked after Inductor has generated code and before it compiles kernels. If the code needs more than the
budget, the attempt ends and the next one plans with more headroom. If the code leaves memory unused and a looser plan would
save time, one further attempt plans for more memory. If the code of the looser plan does not fit, the first plan is taken.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import fx

from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, causes
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.compiler import records
from autoremat.compiler.cache_key import fingerprint
from autoremat.compiler.overlap_warning import watched
from autoremat.compiler.partitioner import Partitioner, free_device_bytes, infeasible
from autoremat.compiler.records import Record
from autoremat.options.options import Options
from autoremat.passes import before_lowering
from autoremat.planner.multigraph.ledger import Share
from autoremat.report.registry import add_report
from autoremat.report.report import Report
from autoremat.torch_private import compat, lowering
from autoremat.torch_private.autograd import retraces_backwards
from autoremat.torch_private.logs import trace_artifact

log = logging.getLogger("autoremat")

MAX_REPLANS = 4
EAGER_BACKWARD = {"force_non_lazy_backward_lowering": True}
"""Inductor settings that compile the backward together with the forward instead of at its first call. The peak of both halves
is then known while the plan can still change."""
Compiled = Callable[..., Any]
Kind = TypeVar("Kind", bound=BaseException)

LEAST_ROOM, ROOM_USED = 0.03, 0.9
"""Two shares. A looser plan is tried if at least the first share of the budget is unused. It aims to use the second share of
the unused bytes."""

LOOSER = 1.05
"""Peak of a looser plan as a multiple of the minimum peak found. That plan is tried if the code of the plan with the minimum
peak needs far more memory than simulated."""

ESTIMATED = "the peak of the code is an estimate: code that branches, or is split for CUDA graphs, does not show it"

LEAST_GAIN = 0.02
"""Share of the step's seconds that a looser plan must save, by the cost model, to justify generating code again."""


class _PlanAgain(Exception):
    """Ends an attempt whose code would need ``peak_bytes``, so that the loop can replan."""

    def __init__(self, peak_bytes: int, limit_bytes: int = 0) -> None:
        super().__init__(f"the compiled code would need {format_bytes(peak_bytes)}")
        self.peak_bytes, self.limit_bytes = peak_bytes, limit_bytes


class _OverBudget(_PlanAgain):
    """The peak exceeds the budget."""


class _RoomLeft(_PlanAgain):
    """The peak is so far below the budget that a looser plan would save time."""


@dataclasses.dataclass(frozen=True, order=True)
class _Failure:
    """An attempt whose code exceeded the budget.

    ``margin`` is the headroom in bytes that it was planned with. ``whole`` is true if code was generated for both halves, so
    that ``peak_bytes`` is the peak of the step.
    """

    peak_bytes: int
    margin: int
    whole: bool


def with_bytes(options: Options, device: torch.device) -> Options:
    """Returns ``options`` with the bytes that are free on ``device`` now in place of ``"auto"``.

    The cache key and the plan then use the same number.
    """
    if options.memory_budget != "auto":
        return options
    return dataclasses.replace(options, memory_budget=options.resolve_budget(0, free_device_bytes(device)))


@dataclasses.dataclass
class CompileLoop:
    """Compiles one graph with Inductor and replans while its code exceeds the budget, or once if it leaves memory unused."""

    gm: fx.GraphModule
    inputs: Sequence[Any]
    options: Options
    patches: dict[str, Any]

    def __post_init__(self) -> None:
        self.key = fingerprint(self.gm, self.inputs, self.options)
        self.margin = 0
        """Headroom of the next plan below the budget, in bytes; a negative number loosens the plan."""
        self.fitting_margin: int | None = None
        """Headroom of a plan whose code fits, while a looser plan is tried."""
        self.may_loosen = self.loosened = self.last = False
        self.fitting_peak: int | None = None
        """Peak of that plan's code, in bytes, for use if the looser plan does not fit."""
        self.peaks: dict[bool, int] = {}
        """Peaks of the present attempt's forward (False) and backward (True), in bytes, for the halves with generated code."""
        self.seen: dict[int, dict[bool, int]] = {}
        """Peaks of all attempts, by headroom. If a plan is taken again, Inductor's cache may answer without showing its
        code."""
        self.earlier_peaks: dict[bool, int] = {}
        """Largest peak of each half among the earlier attempts that fit. If a half does not change, Inductor's cache answers
        without showing its code."""
        self.estimated = False
        """True if a peak is an estimate, because the code could not be replayed."""
        self.failed: list[_Failure] = []
        self.naming = False
        """True if nothing fits and a further attempt looks for the code with the least memory, for the error or the best
        effort."""

    def attempt(self, partitioner: Partitioner) -> Compiled:
        """Compiles the graph once with ``partitioner`` and returns the compiled callable.

        Raises ``_OverBudget`` if the code exceeds the budget, unless this is the last best effort. Raises ``_RoomLeft`` if the
        code leaves so much memory unused that another attempt is worthwhile.
        """
        self.peaks = {}

        def observe(lowered: lowering.LoweredPeak) -> None:
            peak, limit = lowered.peak_bytes, partitioner.limit_bytes(lowered.is_backward)
            self.peaks[lowered.is_backward] = peak
            self.estimated = self.estimated or lowered.is_estimate
            self.seen.setdefault(self.margin, {})[lowered.is_backward] = peak
            if limit is None:
                return
            # An error message needs the peaks of both halves, so the check waits for the second one.
            ends_in_error = self.options.on_infeasible == "raise" and (partitioner.exhausted or self.last)
            if not ((ends_in_error or self.naming) and len(self.peaks) == 1):
                self.check_peaks(partitioner)
            most = max(self.peaks.values())
            both_halves = len(self.peaks) == 2
            if both_halves and self.may_loosen and self.worth_loosening(partitioner, limit, most):
                raise _RoomLeft(most, limit)

        # Inductor takes ownership of the module, so another attempt needs a fresh one.
        module = fx.GraphModule(self.gm, copy.deepcopy(self.gm.graph))
        module.meta = dict(self.gm.meta)
        patches = {**self.patches, "custom_partitioner_fn": partitioner}
        with (
            lowering.memory_first(lambda: partitioner.memory_first),
            lowering.rewriting_before_lowering(before_lowering),
            lowering.draws_by_place(patches),
            lowering.observe_lowering(lambda: partitioner.replay_context, observe),
        ):
            compiled = compat.compile_with_inductor(module, self.inputs, patches, EAGER_BACKWARD)
        self.check_peaks(partitioner)  # a cache may answer for the second half without calling observe
        return compiled

    def check_peaks(self, partitioner: Partitioner) -> None:
        """Raises ``_OverBudget`` if a half of the present attempt exceeds its limit, unless this is the last best effort."""
        limits = [(peak, partitioner.limit_bytes(half)) for half, peak in self.peaks.items()]
        over = [(peak, limit) for peak, limit in limits if limit is not None and peak > limit]
        if not over:
            return
        least = all(max(self.peaks.values()) <= earlier.peak_bytes for earlier in self.failed)
        best_effort = self.options.on_infeasible == "best_effort"
        settled = (partitioner.exhausted or self.naming) and least and self.margin_of_another(partitioner) is None
        if not (best_effort and (self.last or settled)):
            raise _OverBudget(*max(over))

    def run(self) -> Compiled:
        """Returns the compiled callable after as many attempts as the generated code requires, and publishes the report."""
        record = records.load(self.key)
        self.margin = record.extra_headroom_bytes if record is not None else 0
        caches: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        for replans in range(MAX_REPLANS + 2):  # the last attempt only supplies the numbers of an error
            self.last = self.last or replans >= MAX_REPLANS
            # A looser plan that does not fit costs two attempts.
            self.may_loosen = record is None and not (self.failed or self.loosened) and replans <= MAX_REPLANS - 2
            self.may_loosen = self.may_loosen and not isinstance(self.options.memory_budget, Share)
            partitioner = Partitioner(self.options, self.key, self.margin, must_fit=self.options.on_infeasible == "raise")
            now("tracing", attempt=replans + 1)
            try:
                with caches():
                    compiled = self.attempt(partitioner)
            except Exception as error:
                reason = find_cause(error, _PlanAgain)
                if reason is None or partitioner.report is None:
                    raise
                self.change_margin(partitioner, reason, replans)
                change = f"{format_bytes(abs(self.margin))} {'more' if self.margin < 0 else 'less'} than the budget"
                log.debug("%s: planning again for %s", reason, change)
                continue
            if partitioner.fell_back and partitioner.report is None:
                return compiled
            if partitioner.report is None and record is None:
                if caches is compat.without_caches:  # the graph has no backward, although something requires a gradient
                    records.save(self.key, Record(None))
                    return compiled
                # Torch's caches answered, but the record of this compilation is lost. Compiling without caches restores it.
                caches = compat.without_caches
                continue
            compiled = self.finish(compiled, partitioner, record, replans)
            # Inductor's compiled code keeps a reference to the partitioner, so drop the plans that the search has examined.
            partitioner.planner = partitioner.planning = partitioner.plan = partitioner.report = None
            return compiled
        raise AssertionError("the last attempt returns or raises")

    def change_margin(self, partitioner: Partitioner, reason: _PlanAgain, replans: int) -> None:
        """Sets the headroom of the next attempt. Raises ``BudgetInfeasible`` if no attempt is left."""
        report = partitioner.report
        assert report is not None
        for half, peak in self.peaks.items():
            if peak <= (report.budget_bytes or 0):
                self.earlier_peaks[half] = max(peak, self.earlier_peaks.get(half, 0))
        if isinstance(reason, _RoomLeft):
            self.loosened, self.fitting_margin, self.fitting_peak = True, self.margin, reason.peak_bytes
            self.margin = self.looser_margin(report.budget_bytes or 0, reason.peak_bytes)
            return
        if self.fitting_margin is not None:  # take the first plan again, because the looser one does not fit
            self.margin, self.fitting_margin = self.fitting_margin, None
            return
        whole = len(self.peaks) == 2
        self.failed.append(_Failure(max(self.peaks.values()) if whole else reason.peak_bytes, self.margin, whole))
        if self.options.on_infeasible == "raise" and (partitioner.exhausted or self.last or self.naming):
            self.before_an_error(partitioner)
            return
        if self.options.on_infeasible == "best_effort" and (partitioner.exhausted or self.naming or replans >= MAX_REPLANS - 1):
            self.before_the_best_effort(partitioner, replans)
            return
        if isinstance(self.options.memory_budget, Share):  # add the excess over the limit of the half
            self.margin += reason.peak_bytes - reason.limit_bytes
            return
        # Plan for the budget minus the bytes by which the simulator underestimated this plan.
        excess = reason.peak_bytes - report.predicted_peak_bytes - partitioner.code_headroom_bytes
        self.margin = max(excess, self.margin + 1)
        if replans >= MAX_REPLANS - 1:  # the minimum peak is tried before an error says that nothing fits
            self.margin = max(report.budget_bytes or 0, self.margin)

    def before_an_error(self, partitioner: Partitioner) -> None:
        """Prepares one more attempt if it may lower the minimum that an error names; raises ``BudgetInfeasible`` if it
        cannot."""
        closest = min(self.failed)
        margin = self.margin_of_another(partitioner) if closest.whole else closest.margin
        if margin is None or self.naming:
            raise self.gave_up(partitioner) from None
        self.naming, self.margin = True, margin

    def before_the_best_effort(self, partitioner: Partitioner, replans: int) -> None:
        """Prepares one more attempt with another plan if that may need less memory; else selects the best attempt so far."""
        another = self.margin_of_another(partitioner)
        if another is not None and replans < MAX_REPLANS - 1:
            self.naming, self.margin = True, another
        else:
            self.last, self.margin = True, min(self.failed).margin

    def margin_of_another(self, partitioner: Partitioner) -> int | None:
        """Returns the headroom of a looser plan if the present attempt's code needs far more memory than simulated.

        The large difference may be particular to this plan. Returns None if the code is close to the simulation, or if another
        plan has been tried already.
        """
        planning, report = partitioner.planning, partitioner.report
        if self.naming or planning is None or report is None or len(self.peaks) < 2:
            return None
        other = int(LOOSER * planning.smallest.peak_bytes) + partitioner.code_headroom_bytes
        return (report.budget_bytes or 0) - other if max(self.peaks.values()) > LOOSER * other else None

    def looser_margin(self, budget: int, peak: int) -> int:
        """Returns the headroom of a looser plan, given that code of ``peak`` bytes resulted from the present headroom."""
        return self.margin - int(ROOM_USED * (budget - peak))

    def worth_loosening(self, partitioner: Partitioner, budget: int, peak: int) -> bool:
        """Returns True if a faster plan fits into the memory that code of ``peak`` bytes leaves unused."""
        plan = partitioner.plan
        if plan is None or budget - peak < LEAST_ROOM * budget:
            return False
        looser = partitioner.plan_for(budget - self.looser_margin(budget, peak))
        return looser is not None and plan.cost_seconds - looser.cost_seconds >= LEAST_GAIN * plan.graph.step_seconds

    def finish(self, compiled: Compiled, partitioner: Partitioner, record: Record | None, replans: int) -> Compiled:
        """Saves the record of an accepted attempt and publishes its report."""
        report = self.completed(partitioner, record, replans)
        if partitioner.report is not None and not partitioner.fell_back:  # after a fallback the next process shall warn too
            records.save(self.key, Record(report, partitioner.extra_headroom_bytes))
        return compiled if report is None else published(compiled, report, self.options)

    def completed(self, partitioner: Partitioner, record: Record | None, replans: int) -> Report | None:
        """Returns the report with the peak of the accepted code; None if the graph has no backward."""
        report = partitioner.report
        if report is None:  # torch's caches answered
            return record.report if record is not None else None
        seen = self.peak_seen()
        if seen is None and record is not None and record.report is not None:
            seen = record.report.compiled_peak_bytes
        if seen is not None and self.options.wants_whole_baseline:  # the code of the baseline may exceed its simulation
            report = dataclasses.replace(report, budget_bytes=max(seen, report.budget_bytes or 0))
        completed = report.compiled(seen, replans, self.why_room_is_left(partitioner, report.budget_bytes, seen))
        return dataclasses.replace(completed, notes=(*completed.notes, ESTIMATED)) if self.estimated else completed

    def why_room_is_left(self, partitioner: Partitioner, budget: int | None, peak: int | None) -> str:
        """Returns the reason why code of ``peak`` bytes leaves memory unused; empty if it uses the budget."""
        plan, fastest = partitioner.plan, partitioner.plan_for(None)
        if budget is None or peak is None or plan is None or fastest is None or budget - peak < LEAST_ROOM * budget:
            return ""
        if plan.cost_seconds <= fastest.cost_seconds:
            return "the plan of least time needs no more"
        if self.failed or (self.loosened and self.fitting_margin is None):
            return "the code of a looser plan is over the budget"
        if self.loosened:
            return "the plan was loosened once already"
        return f"a looser plan saves less than {LEAST_GAIN:.0%} of the step"

    def peak_seen(self) -> int | None:
        """Returns the peak of the accepted code in bytes; None if a cache answered for a half that no attempt has generated."""
        if self.fitting_peak is not None and self.fitting_margin is None:
            return self.fitting_peak  # the first plan is taken again
        halves = {**self.earlier_peaks, **self.seen.get(self.margin, {}), **self.peaks}
        return max(halves.values()) if len(halves) == 2 else None

    def gave_up(self, partitioner: Partitioner) -> BudgetInfeasible:
        """Returns the error for a graph whose code exceeds the budget with every plan that was tried."""
        report, planning = partitioner.report, partitioner.planning
        assert report is not None
        assert planning is not None
        least = min((failure.peak_bytes for failure in self.failed if failure.whole), default=min(self.failed).peak_bytes)
        return infeasible(planning, report.budget_bytes or 0, report.device, least, partitioner.plan_file)


def find_cause(error: BaseException, kind: type[Kind]) -> Kind | None:
    """Returns the first exception of that kind among ``error`` and its causes, or None."""
    return next((cause for cause in causes(error) if isinstance(cause, kind)), None)


def published(compiled: Compiled, report: Report, options: Options) -> Compiled:
    """Registers and logs ``report`` and returns ``compiled``.

    The returned callable is watched for other open calls if the graph has a budget of its own. Warns with ``BudgetWarning`` if
    the step exceeds the budget, or if compiled autograd traces its backward anew.
    """
    if report.unknown_workspaces and report.budget_bytes is not None:
        log.warning(
            "the budget may be exceeded by the workspaces of %s, which are not known (of an op of your own, "
            "declare_pure(..., workspace_bytes=...) tells it)",
            ", ".join(report.unknown_workspaces),
        )
    if not report.within_budget and report.budget_bytes is not None:
        warnings.warn(
            f"the step needs {format_bytes(report.peak_bytes)}, over its budget of {format_bytes(report.budget_bytes)}: "
            f'nothing smaller was found, and on_infeasible="best_effort" runs it anyway',
            BudgetWarning,
            stacklevel=2,
        )
    log.info("%s", report.summary())
    trace_artifact("autoremat_report", report.to_json)
    add_report(report)
    if report.budget_bytes is not None and retraces_backwards():
        warnings.warn(
            "compiled autograd traces the backward of this graph anew and compiles it without the plan's order and without a "
            f"look at its peak: the budget of {format_bytes(report.budget_bytes)} does not hold. Switch "
            "torch._dynamo.config.compiled_autograd off",
            BudgetWarning,
            stacklevel=2,
        )
    budget = options.memory_budget
    return watched(compiled, report, isinstance(budget, float)) if isinstance(budget, int | float | str) else compiled
