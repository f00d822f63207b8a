"""Data of a report: a plan, the facts that it lacks, and the figures that follow from both."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from autoremat.basics.codec import Codec, plain
from autoremat.planner.cost.device import Pricing
from autoremat.planner.cost.durations import ROUNDING
from autoremat.planner.graph.op import Value
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_json import FORMAT
from autoremat.report.decisions import ForwardValue, Total, explain_values, totals_of
from autoremat.report.peak_snapshot import PeakSnapshot, Profile, parts_of_peak, peak_of, profile_of

if TYPE_CHECKING:
    from typing_extensions import Self

CODEC = Codec(signed=True)
TIME_TOLERANCE = 1e-6
"""Slow-down that counts as none."""


T = TypeVar("T")


class Figure(cached_property[T]):
    """A number that follows from the plan and the facts of a report. Programs find it in the JSON."""


@dataclass(frozen=True, repr=False, kw_only=True)
class ReportData(Pricing):
    """The plan of one graph with the facts of its planning, its budget and its code. All other figures follow from these.

    Bytes are peaks above the bytes that were live at the start of the step. Seconds are estimates of the cost model, except
    ``planning_seconds``.
    """

    plan: Plan
    """The plan itself; :meth:`Plan.save` writes it for the option ``plan``."""
    others: tuple[Self, ...] = ()
    """Reports of the other graphs after graph breaks, in the sequence of the graphs; from :func:`autoremat.explain`."""

    # -- what was planned ------------------------------------------------------------------------------------------------

    compiler: str
    device: str
    planning_seconds: float
    ended_by_clock: bool = False
    """True if the clock ended the search before its work was done, so that another run may find another plan."""
    baseline_peak_bytes: int
    """Simulated peak without recomputation."""
    peak_before: PeakSnapshot | None = None
    """Live tensors at the peak without recomputation."""
    profile_before: Profile | None = None
    """Memory over the step without recomputation."""
    fastest_seconds: float = 0.0
    """Predicted seconds of the step under its fastest plan, whatever the memory."""
    smallest_peak_bytes: int
    """Minimum simulated peak found over all plans."""
    minimum_is_searched: bool = False
    """True if ``minimum_peak_bytes`` is the least that a search for it finds. Other budgets make none, and less may fit."""
    loss_chunks: int = 1
    """Number of chunks of the projection and the loss (see the option ``chunk_loss``)."""
    loss_chunked_by: str = ""
    """What computes the loss in chunks instead of autoremat: a function of torch or a setting of Inductor. Empty if nothing
    does."""
    minimum_unchunked_bytes: int | None = None
    """Minimum peak found without chunking the loss. None if no such plan was searched."""
    tiles: int = 1
    """Number of tiles of each stretch of ops that compute row by row (see the option ``tiles``)."""
    tiled_stretches: int = 0
    """Number of stretches that are tiled."""
    accumulated_bytes: int = 0
    """Bytes of the gradients of parameters. Later micro-batches of a step find them live."""
    unused_forms: tuple[str, ...] = ()
    """For each form that the options ask for and that no value of this graph can have, the option and the reason."""
    constraint_warnings: tuple[str, ...] = ()
    """Messages of the ``ConstraintWarning`` of this graph. A process that takes its code from torch's caches warns again."""
    ranks: tuple[int, ...] = ()
    """Ranks of a distributed job that share this plan. Empty if the process planned by itself."""
    notes: tuple[str, ...] = ()
    """Further remarks on these figures."""
    hints: tuple[str, ...] = ()
    """What may have been overlooked: no budget, checkpoints left on in the model, outputs beside the loss."""

    # -- what was asked for ----------------------------------------------------------------------------------------------

    limit_bytes: int | None = None
    """The bound on the simulated peak that the plan keeps to: the budget without all headroom, or the soft budget."""
    budget_share: float | None = None
    """The budget as the user gave it, if that is a share of the reference peak."""
    reference_bytes: int | None = None
    """Reference peak: what the step needs without this package; None unless the budget is a share of it."""
    reference_saved_bytes: int | None = None
    """Bytes that the plan with the reference peak saves for the backward."""
    reference_source: str = ""
    """The plan that has the reference peak."""
    granted_bytes: int | None = None
    """The budget of an earlier graph of the function, if a share is to be no less (see ``budget_share``)."""
    soft_budget_bytes: int | None = None
    """Soft budget: the simulated peak of torch's own partition, used if no budget is given."""
    device_ledger: DeviceBudget | None = None
    """The ledger of the whole device. None unless the budget is a device budget, or "auto" with a live optimizer."""
    max_slowdown: float | None = None
    """Budget of time: the share by which the step may take longer than under its plan without a budget. None without one."""
    seconds_without_budget: float | None = None
    """Seconds of the step under its plan without a budget, by the cost model. None without a budget of time."""
    timed_minimum_bytes: int | None = None
    """Simulated minimum peak found within ``max_slowdown``, if that exceeds the budget of memory."""

    # -- what the generated code needs -----------------------------------------------------------------------------------

    code_headroom_bytes: int = 0
    """Bytes that the plan leaves free below the budget, not part of the predicted peak. They serve small
    allocations of the generated code, and what it copies for CUDA graphs."""
    compiled_peak_bytes: int | None = None
    """Peak of the generated code, after fusion. None if no code was generated (``compiler="aot_eager"``)."""
    replans: int = 0
    """Number of further attempts, with a tighter plan, because the generated code was over the budget."""
    graph_pool_bytes: int | None = None
    """Bytes that the pool of CUDA graphs keeps from its recording on, between steps too. They are part of
    ``compiled_peak_bytes``. None without CUDA graphs."""
    unknown_workspaces: tuple[str, ...] = ()
    """Kernels that may need more memory than counted, because their workspace is unknown and cannot be measured."""
    assumed_sizes: tuple[tuple[int, int], ...] = ()
    """For sizes that depend on data and have no upper bound: the place among the numbers that the forward saves for the
    backward, and the largest value for which the plan holds."""

    # -- memory --------------------------------------------------------------------------------------------------------

    budget_bytes = Figure[int | None](lambda report: report.plan.budget_bytes)
    """The budget of memory; None without one."""
    predicted_peak_bytes = Figure[int](lambda report: report.plan.peak_bytes)
    """Simulated peak, before code generation."""

    @Figure
    def peak_bytes(self) -> int:
        """Best-known peak: that of the generated code, else the simulated one."""
        return self.predicted_peak_bytes if self.compiled_peak_bytes is None else self.compiled_peak_bytes

    @Figure
    def minimum_peak_bytes(self) -> int:
        """Minimum peak found over all plans: with code its peak, if that plan has any, else with the code headroom."""
        simulated, compiled = min(self.smallest_peak_bytes, self.predicted_peak_bytes), self.compiled_peak_bytes
        if compiled is None:
            return simulated
        return compiled if self.predicted_peak_bytes <= simulated else min(simulated + self.code_headroom_bytes, compiled)

    lower_bound_bytes = Figure[int](lambda report: report.plan.lower_bound_bytes)
    """Lower bound on the peak of any plan."""
    within_budget = Figure[bool](lambda report: report.budget_bytes is None or report.peak_bytes <= report.budget_bytes)
    """True if the peak is within the budget. Unknown workspaces are ignored."""

    @Figure
    def fits(self) -> bool:
        """True if the step is known to stay within the budget: the best-known peak fits, and all workspaces are known."""
        holds = self.device_ledger is None or self.device_ledger.holds(self.predicted_device_bytes or 0)
        return self.budget_bytes is None or (self.within_budget and not self.unknown_workspaces and holds)

    @Figure
    def predicted_device_bytes(self) -> int | None:
        """Predicted peak of the whole device over all steps, the optimizer's included. None without a ledger of the device."""
        if self.device_ledger is None:
            return None
        kept = max(0, (self.graph_pool_bytes or 0) - self.gradient_bytes)  # a pool stays, and gradients are part of it
        return max(self.device_ledger.device_bytes(self.peak_bytes), self.device_ledger.update_bytes + kept)

    @cached_property
    def compared(self) -> tuple[str, int]:
        """The peak without this package, with its words: plain Inductor's, an estimate of it, or that of saving everything."""
        if self.reference_bytes is not None:
            return "plain Inductor" if self.compiler == "inductor" else "torch alone", self.reference_bytes
        if self.soft_budget_bytes is not None:
            return "plain Inductor about", self.soft_budget_bytes
        return "saving all", self.baseline_peak_bytes

    saved_bytes = Figure[int](lambda report: report.plan.saved_bytes)
    """Bytes on the device that cross from the forward into the backward."""

    @Figure
    def gradient_bytes(self) -> int:
        """Bytes of all gradients that the backward returns. No recomputation lowers the peak below them."""
        graph = self.plan.graph
        return sum(graph.values[v].bytes for v in graph.backward_outputs)

    in_flight = Figure[int](lambda report: report.plan.graph.calls.in_flight)
    """Number of calls of the graph that are open at once. All peaks count the others' saved tensors and outputs."""
    held_bytes = Figure[int](lambda report: report.plan.timeline.held_bytes)
    """Bytes that an open call holds between its forward and its backward: saved tensors and outputs."""
    resident_bytes = Figure[int](lambda report: report.plan.graph.calls.resident_bytes)
    """Part of all peaks beside the open calls: gradients of earlier micro-batches, outputs of finished calls."""
    host_memory_bytes = Figure[int | None](lambda report: report.plan.host_budget_bytes)
    """The bound on the bytes of saved tensors on the host; None if none may be there."""
    host_peak_bytes = Figure[int](lambda report: report.plan.host_bytes)
    """Bytes of saved tensors on the host, of all open calls together."""

    # -- time ----------------------------------------------------------------------------------------------------------

    step_seconds = Figure[float](lambda report: report.plan.graph.step_seconds)
    """Seconds of forward and backward without recomputation, each op by itself. Shares of the step refer to them."""
    predicted_seconds = Figure[float](lambda report: report.plan.predicted_seconds)
    """Predicted seconds of forward and backward under the plan: kernels as fused, with recomputation and stalls."""
    recompute_seconds = Figure[float](lambda report: report.plan.recompute_seconds)
    """Seconds of recomputation."""

    @Figure
    def added_share(self) -> float:
        """Share by which the plan takes longer than ``fastest_seconds``."""
        return self.predicted_seconds / self.fastest_seconds - 1.0 if self.fastest_seconds else 0.0

    @Figure
    def overhead(self) -> float:
        """Seconds of recomputation as a share of the forward's seconds."""
        forward = self.plan.graph.forward_seconds
        return self.recompute_seconds / forward if forward else 0.0

    stall_seconds = Figure[float](lambda report: report.plan.stall_seconds)
    """Seconds that the step waits for transfers of saved tensors, by the cost model."""

    @Figure
    def lower_bound_seconds(self) -> float | None:
        """Lower bound on the seconds of recomputation, stalls and saving of any plan within the budget that keeps the order of
        the backward. None if no plan fits by the simulator."""
        return None if math.isinf(self.plan.lower_bound_seconds) else self.plan.lower_bound_seconds

    @Figure
    def gap(self) -> float | None:
        """Optimality gap: seconds of recomputation, stalls and saving above the lower bound, as a share of the step with the
        fewest possible. None if no plan fits by the simulator."""
        return None if self.lower_bound_seconds is None or not self.step_seconds else self.plan.gap

    @Figure
    def slowdown(self) -> float | None:
        """Share by which the step takes longer than under its plan without a budget; None without a budget of time."""
        if self.seconds_without_budget is None:
            return None
        if self.seconds_without_budget:
            return self.predicted_seconds / self.seconds_without_budget - 1.0
        return math.inf if self.predicted_seconds else 0.0

    @Figure
    def keeps_time(self) -> bool:
        """True if the predicted time of the step keeps to ``max_slowdown``, if that is given."""
        return self.max_slowdown is None or self.slowdown is None or self.slowdown <= self.max_slowdown + TIME_TOLERANCE

    @Figure
    def binding_budget(self) -> str:
        """The budget that decides on the plan under a budget of time: "max_slowdown", "memory_budget", or empty."""
        if self.slowdown is None:
            return ""
        if self.budget_bytes is None:
            return "max_slowdown" if self.predicted_peak_bytes > self.smallest_peak_bytes else ""
        return "memory_budget" if self.slowdown > ROUNDING else ""

    # -- the plan in detail --------------------------------------------------------------------------------------------

    ops = Figure[int](lambda report: len(report.plan.graph.ops))
    """Number of ops of the graph."""
    recomputed_ops = Figure[int](lambda report: len(report.plan.recomputed))
    """Number of executions of forward ops beyond the first ones."""
    strategy = Figure[str](lambda report: report.plan.label)
    """Where the search found the plan, or the stored plan or the policy that it is."""
    time_limited = Figure[bool](lambda report: report.plan.interrupted and (report.ended_by_clock or report.gap != 0.0))
    """True if the time limit ended the search, as an amount of work or by the clock, and a better plan is possible."""

    @cached_property
    def saved(self) -> tuple[Value, ...]:
        """Values of the graph that the forward saves for the backward, the largest first."""
        values = self.plan.graph.values
        return tuple(values[v] for v in sorted(self.plan.saved, key=lambda v: (-values[v].bytes, v)))

    moved_bytes = cached_property[int](lambda report: report.host_peak_bytes // report.in_flight)
    """Bytes that one call copies to the host, and as many back."""

    values = cached_property[tuple[ForwardValue, ...]](lambda report: explain_values(report.plan, report.limit_bytes))
    """Decision and reason for every forward value."""

    def totals(self, by: str = "module") -> tuple[Total, ...]:
        """Returns sums over ``values`` by module or op, the most saved bytes first.

        ``by`` is ``"module"`` (module paths with ``*`` for numbers) or ``"op"``. Raises ``ValueError`` for any other ``by``.
        """
        return totals_of(self.values, by)

    peak_after = cached_property[PeakSnapshot | None](lambda report: peak_of(report.plan))
    """Live tensors at the peak of the plan."""
    parts_after = cached_property[tuple[tuple[str, int], ...]](lambda report: parts_of_peak(report.plan))
    """Kinds of bytes at the peak of the plan, each with its bytes, the largest first: what binds the plan."""
    profile_after = cached_property[Profile | None](lambda report: profile_of(report.plan))
    """Memory over the step with the plan."""

    # -- as JSON -------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the plan, the facts and the figures that follow from them as JSON, for programs and :meth:`from_json`."""
        return json.dumps(self.to_data())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the report that :meth:`to_json` wrote. Raises ``ValueError`` for any other text."""
        try:
            return cls.from_data(json.loads(text))
        except (TypeError, KeyError, ValueError) as error:
            if text.startswith(f'{{"format":"{FORMAT}"'):
                raise ValueError("this is a stored plan, not a report: the option `plan` applies it") from error
            raise ValueError(f"not a report of this version of autoremat: {error}") from error

    def to_data(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        return {name: plain(getattr(self, name)) for name in (*FIGURES, *(field.name for field in fields(self)))}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Self:
        """Returns the report of JSON data. Raises ``TypeError``, ``KeyError`` or ``ValueError`` for anything else."""
        readers = CODEC.readers(cls, [name for name in dict(data) if name not in FIGURES])
        return cls(**{name: read(data[name]) for name, read in readers.items()})


FIGURES = tuple(name for name, member in vars(ReportData).items() if isinstance(member, Figure))
