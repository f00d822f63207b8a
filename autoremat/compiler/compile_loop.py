"""The closed loop: what Inductor makes of a plan is checked before any kernel is compiled.

If the generated code needs more than the budget, the compilation stops there and starts again with a plan made for so much
less. If it leaves room that would save time, it starts again once with a plan made for so much more; should that not fit, the
first plan's code is taken.
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
"""The backward is compiled with the forward, not at its first call, so that its peak is known while there is a choice."""
Compiled = Callable[..., Any]
Kind = TypeVar("Kind", bound=BaseException)

LEAST_ROOM, ROOM_USED = 0.03, 0.9
"""Shares: of the budget that must be left for a looser plan to be tried, and of what is left that it is made for."""

LOOSER = 1.05
"""By how much a plan is looser that is tried where the code of that of least memory needs so much more than simulated."""

ESTIMATED = "the peak of the code is an estimate: code that branches, or is split for CUDA graphs, does not show it"

LEAST_GAIN = 0.02
"""So much of the step a looser plan has to save, by the cost model, to be worth generating code again."""


class _PlanAgain(Exception):
    """Ends a compilation whose code would need ``peak_bytes``, so that another plan can be made."""

    def __init__(self, peak_bytes: int, limit_bytes: int = 0) -> None:
        super().__init__(f"the compiled code would need {format_bytes(peak_bytes)}")
        self.peak_bytes, self.limit_bytes = peak_bytes, limit_bytes


class _OverBudget(_PlanAgain):
    """That is more than the budget."""


class _RoomLeft(_PlanAgain):
    """That is so much less than the budget that a looser plan would save time."""


@dataclasses.dataclass(frozen=True, order=True)
class _Failure:
    """An attempt whose code was over the budget: its peak, its margin, and whether code was generated for both halves, so that
    the peak is that of the step."""

    peak_bytes: int
    margin: int
    whole: bool


def with_bytes(options: Options, device: torch.device) -> Options:
    """``options`` with the bytes that are free on ``device`` now in the place of ``"auto"``, for the key and the plan alike."""
    if options.memory_budget != "auto":
        return options
    return dataclasses.replace(options, memory_budget=options.resolve_budget(0, free_device_bytes(device)))


@dataclasses.dataclass
class CompileLoop:
    """One graph through Inductor, planned again while its code turns out over budget, and once if it leaves room."""

    gm: fx.GraphModule
    inputs: Sequence[Any]
    options: Options
    patches: dict[str, Any]

    def __post_init__(self) -> None:
        self.key = fingerprint(self.gm, self.inputs, self.options)
        self.margin = 0
        """By how many bytes less than the budget to plan; below zero: by how many more."""
        self.fitting_margin: int | None = None
        """The margin of a plan whose code fits, while a looser one is tried."""
        self.may_loosen = self.loosened = self.last = False
        self.fitting_peak: int | None = None
        """The peak of its code, once the looser one turned out not to fit."""
        self.peaks: dict[bool, int] = {}
        """The peaks of the present attempt's forward (False) and backward (True), as far as code was generated for them."""
        self.seen: dict[int, dict[bool, int]] = {}
        """The same of all attempts, by margin: a plan that is taken up again may come from Inductor's cache, unseen."""
        self.earlier_peaks: dict[bool, int] = {}
        """The largest of earlier attempts that fit: a half that is the same again comes from Inductor's cache, unseen."""
        self.estimated = False
        """Whether a peak is an estimate, because the code could not be replayed."""
        self.failed: list[_Failure] = []
        self.naming = False
        """Whether nothing fits and an attempt was made to learn what the code that needs least needs."""

    def attempt(self, partitioner: Partitioner) -> Compiled:
        """Compile once; raises ``_OverBudget`` if the code needs too much, unless this is the last best effort, and
        ``_RoomLeft`` if it needs so little that it is worth another attempt."""
        self.peaks = {}

        def observe(lowered: lowering.LoweredPeak) -> None:
            peak, limit = lowered.peak_bytes, partitioner.limit_bytes(lowered.is_backward)
            self.peaks[lowered.is_backward] = peak
            self.estimated = self.estimated or lowered.is_estimate
            self.seen.setdefault(self.margin, {})[lowered.is_backward] = peak
            if limit is None:
                return
            # An error is to name what both halves need.
            ends_in_error = self.options.on_infeasible == "raise" and (partitioner.exhausted or self.last)
            if not ((ends_in_error or self.naming) and len(self.peaks) == 1):
                self.check_peaks(partitioner)
            most = max(self.peaks.values())
            both_halves = len(self.peaks) == 2
            if both_halves and self.may_loosen and self.worth_loosening(partitioner, limit, most):
                raise _RoomLeft(most, limit)

        # Inductor takes ownership of the module; another attempt needs a fresh one.
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
        self.check_peaks(partitioner)  # the second half may come from a cache, unseen
        return compiled

    def check_peaks(self, partitioner: Partitioner) -> None:
        """Raise ``_OverBudget`` if a half of the present attempt needs too much, unless it is the last best effort."""
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
        """Compile, plan again where the code asks for it, and publish the report."""
        record = records.load(self.key)
        self.margin = record.extra_headroom_bytes if record is not None else 0
        caches: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        for replans in range(MAX_REPLANS + 2):  # the last is made only for what an error has to name
            self.last = self.last or replans >= MAX_REPLANS
            # A looser plan that does not fit takes two attempts.
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
                if caches is compat.without_caches:  # no backward after all, whatever requires a gradient
                    records.save(self.key, Record(None))
                    return compiled
                # Torch's caches answered, but our record of the compilation is gone: compile afresh to have it again.
                caches = compat.without_caches
                continue
            compiled = self.finish(compiled, partitioner, record, replans)
            # What Inductor compiled keeps the partitioner for as long as it lives; all plans that were looked at need not stay.
            partitioner.planner = partitioner.planning = partitioner.plan = partitioner.report = None
            return compiled
        raise AssertionError("the last attempt returns or raises")

    def change_margin(self, partitioner: Partitioner, reason: _PlanAgain, replans: int) -> None:
        """Choose the margin of the next attempt. Raises ``BudgetInfeasible`` if there is none to try."""
        report = partitioner.report
        assert report is not None
        for half, peak in self.peaks.items():
            if peak <= (report.budget_bytes or 0):
                self.earlier_peaks[half] = max(peak, self.earlier_peaks.get(half, 0))
        if isinstance(reason, _RoomLeft):
            self.loosened, self.fitting_margin, self.fitting_peak = True, self.margin, reason.peak_bytes
            self.margin = self.looser_margin(report.budget_bytes or 0, reason.peak_bytes)
            return
        if self.fitting_margin is not None:  # the looser plan does not fit
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
        if isinstance(self.options.memory_budget, Share):  # what is over a half's own limit
            self.margin += reason.peak_bytes - reason.limit_bytes
            return
        # For the budget less what the simulator underestimated this plan by.
        excess = reason.peak_bytes - report.predicted_peak_bytes - partitioner.code_headroom_bytes
        self.margin = max(excess, self.margin + 1)
        if replans >= MAX_REPLANS - 1:  # the plan of least memory, before an error says that nothing fits
            self.margin = max(report.budget_bytes or 0, self.margin)

    def before_an_error(self, partitioner: Partitioner) -> None:
        """One more attempt for what an error names, if that may be less than is known; else raises ``BudgetInfeasible``."""
        closest = min(self.failed)
        margin = self.margin_of_another(partitioner) if closest.whole else closest.margin
        if margin is None or self.naming:
            raise self.gave_up(partitioner) from None
        self.naming, self.margin = True, margin

    def before_the_best_effort(self, partitioner: Partitioner, replans: int) -> None:
        """One more attempt with another plan, if that may need less; else the best that was seen."""
        another = self.margin_of_another(partitioner)
        if another is not None and replans < MAX_REPLANS - 1:
            self.naming, self.margin = True, another
        else:
            self.last, self.margin = True, min(self.failed).margin

    def margin_of_another(self, partitioner: Partitioner) -> int | None:
        """The margin of a looser plan, if all of the present attempt's code needs far more than was simulated: that may be this
        plan's misfortune. None if it does not, or if another has been tried."""
        planning, report = partitioner.planning, partitioner.report
        if self.naming or planning is None or report is None or len(self.peaks) < 2:
            return None
        other = int(LOOSER * planning.smallest.peak_bytes) + partitioner.code_headroom_bytes
        return (report.budget_bytes or 0) - other if max(self.peaks.values()) > LOOSER * other else None

    def looser_margin(self, budget: int, peak: int) -> int:
        """The margin that leaves the code less room: code of ``peak`` bytes came of the present one."""
        return self.margin - int(ROOM_USED * (budget - peak))

    def worth_loosening(self, partitioner: Partitioner, budget: int, peak: int) -> bool:
        """Whether code of ``peak`` bytes leaves room in which a plan would be faster."""
        plan = partitioner.plan
        if plan is None or budget - peak < LEAST_ROOM * budget:
            return False
        looser = partitioner.plan_for(budget - self.looser_margin(budget, peak))
        return looser is not None and plan.cost_seconds - looser.cost_seconds >= LEAST_GAIN * plan.graph.step_seconds

    def finish(self, compiled: Compiled, partitioner: Partitioner, record: Record | None, replans: int) -> Compiled:
        """Remember the report of a compilation that stands, and publish it."""
        report = self.completed(partitioner, record, replans)
        if partitioner.report is not None and not partitioner.fell_back:  # else the next process is to warn as well
            records.save(self.key, Record(report, partitioner.extra_headroom_bytes))
        return compiled if report is None else published(compiled, report, self.options)

    def completed(self, partitioner: Partitioner, record: Record | None, replans: int) -> Report | None:
        """The report with what the code that stands needs; None if there is no backward."""
        report = partitioner.report
        if report is None:  # answered by torch's caches
            return record.report if record is not None else None
        seen = self.peak_seen()
        if seen is None and record is not None and record.report is not None:
            seen = record.report.compiled_peak_bytes
        if seen is not None and self.options.wants_whole_baseline:  # code without recomputation may need more than simulated
            report = dataclasses.replace(report, budget_bytes=max(seen, report.budget_bytes or 0))
        completed = report.compiled(seen, replans, self.why_room_is_left(partitioner, report.budget_bytes, seen))
        return dataclasses.replace(completed, notes=(*completed.notes, ESTIMATED)) if self.estimated else completed

    def why_room_is_left(self, partitioner: Partitioner, budget: int | None, peak: int | None) -> str:
        """Why code of ``peak`` bytes uses so much less than the budget; empty if it does not."""
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
        """The peak of the code that stands; None if a cache held a half that no attempt has generated."""
        if self.fitting_peak is not None and self.fitting_margin is None:
            return self.fitting_peak  # the first plan's, taken up again
        halves = {**self.earlier_peaks, **self.seen.get(self.margin, {}), **self.peaks}
        return max(halves.values()) if len(halves) == 2 else None

    def gave_up(self, partitioner: Partitioner) -> BudgetInfeasible:
        """The error for a graph whose code needs more than the budget whatever the plan."""
        report, planning = partitioner.report, partitioner.planning
        assert report is not None
        assert planning is not None
        least = min((failure.peak_bytes for failure in self.failed if failure.whole), default=min(self.failed).peak_bytes)
        return infeasible(planning, report.budget_bytes or 0, report.device, least, partitioner.plan_file)


def find_cause(error: BaseException, kind: type[Kind]) -> Kind | None:
    """The exception of that kind that ``error`` is or was raised from, if any."""
    return next((cause for cause in causes(error) if isinstance(cause, kind)), None)


def published(compiled: Compiled, report: Report, options: Options) -> Compiled:
    """``compiled``, with its report made known; watched, if it has a budget that nobody has shared out."""
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
