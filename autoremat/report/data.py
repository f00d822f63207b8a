"""Data of a report: the plan of one graph in figures, readable by people and programs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoremat.basics.codec import Codec, plain
from autoremat.planner.graph.graph import Graph
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.report.binding import Part, parts_of_peak
from autoremat.report.decisions import OF_FORM, Decision, ForwardValue, explain_values, module_class, op_name
from autoremat.report.peak_snapshot import PeakSnapshot, Profile, peak_of, profile_of
from autoremat.report.stored import StoredTensors

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class SavedTensor:
    """A storage that the forward saves for the backward."""

    name: str
    bytes: int
    op: str
    module: str
    source: str


@dataclass(frozen=True)
class Total:
    """Sums over forward values of one class of modules or of one op. Seconds are estimates of the cost model."""

    name: str
    values: int
    saved_bytes: int
    recomputed_bytes: int
    fused_bytes: int
    """Bytes of values that are never materialised."""
    seconds: float
    """Seconds of one execution of the ops."""
    added_seconds: float
    """Seconds of recomputation."""
    stored_bytes: int = 0
    """Bytes of saved values that are kept in another form than on the device."""

    @classmethod
    def of(cls, name: str, values: Sequence[ForwardValue]) -> Total:
        """Returns the sums over ``values``."""

        def size(decision: Decision) -> int:
            return sum(value.bytes for value in values if value.decision is decision)

        seconds, added = sum(v.seconds for v in values), sum(v.added_seconds for v in values)
        stored = sum(map(size, OF_FORM.values()))
        sizes = (size(Decision.SAVED), size(Decision.RECOMPUTED), size(Decision.FUSED))
        return cls(name, len(values), *sizes, seconds, added, stored)


@dataclass(frozen=True, repr=False)
class ReportData:
    """The plan of one graph in figures. Bytes are peaks above the bytes that were live at the start of the step. Seconds are
    estimates of the cost model, except ``planning_seconds``."""

    budget_bytes: int | None
    predicted_peak_bytes: int
    """Simulated peak, before code generation."""
    baseline_peak_bytes: int
    """Simulated peak without recomputation."""
    minimum_peak_bytes: int
    """Minimum peak found over all plans: with code its peak, if that plan has any, else with the code headroom."""
    lower_bound_bytes: int
    """Lower bound on the peak of any plan."""
    saved_bytes: int
    recomputed_ops: int
    recompute_seconds: float
    forward_seconds: float
    planning_seconds: float
    ops: int
    compiler: str
    device: str
    strategy: str
    """Where the search found the plan: its segments, its saved set ("cut 6": number 6 of the minimum cuts), and "filled" or
    "recreated" if ops were taken out of its recomputation afterwards. Or the stored plan or the policy that it is."""
    saved: tuple[SavedTensor, ...]
    """Saved tensors, the largest first."""
    compiled_peak_bytes: int | None = None
    """Peak of the generated code, after fusion. None if no code was generated (``compiler="aot_eager"``)."""
    replans: int = 0
    """Number of further attempts, with a tighter plan, because the generated code was over the budget."""
    time_limited: bool = False
    """True if the time limit ended the search, as an amount of work or by the clock."""
    ended_by_clock: bool = False
    """True if the clock ended it before its work was done, so that another run may find another plan."""
    step_seconds: float = 0.0
    """Seconds of forward and backward without recomputation, each op by itself. Shares of the step refer to them."""
    predicted_seconds: float = 0.0
    """Predicted seconds of forward and backward under the plan: kernels as fused, with recomputation and stalls."""
    saving_seconds: float = 0.0
    """Seconds of the memory traffic of saved tensors, beside what fused kernels move in any case."""
    lower_bound_seconds: float | None = 0.0
    """Lower bound on the seconds of recomputation, stalls and saving of any plan within the budget that keeps the order of the
    backward. None if no plan fits by the simulator."""
    cost_model: str = "roofline"
    calibrated_share: float = 0.0
    """Share of the step's estimated seconds that comes from the measured rates of the device."""
    assumed_share: float = 1.0
    """Share of the step's estimated seconds that comes from data sheets, or from the rates of other classes of ops."""
    interconnect: str = ""
    """Rates of the process groups that communicate in the step, with their sources: given, measured or assumed."""
    budget_share: float | None = None
    """The budget as the user gave it, if that is a share of the reference peak."""
    reference_bytes: int | None = None
    """Reference peak: what the step needs without this package, with code headroom. None unless the budget is a share of it."""
    reference_saved_bytes: int | None = None
    """Bytes that the plan with the reference peak saves for the backward."""
    granted_bytes: int | None = None
    """The budget of an earlier graph of the function, if a share is to be no less (see ``budget_share``)."""
    reference_source: str = ""
    """The plan that has the reference peak."""
    soft_budget_bytes: int | None = None
    """Soft budget: the simulated peak of torch's own partition, used if no budget is given."""
    values: tuple[ForwardValue, ...] = ()
    """Decision and reason for every forward value. Empty in reports of earlier versions."""
    peak_before: PeakSnapshot | None = None
    """Live tensors at the peak without recomputation."""
    peak_after: PeakSnapshot | None = None
    """Live tensors at the peak of the plan."""
    parts_after: tuple[Part, ...] = ()
    """Bytes at the peak of the plan by kind, the largest first: what binds the plan, with remedies."""
    profile_before: Profile | None = None
    """Memory over the step without recomputation."""
    profile_after: Profile | None = None
    """Memory over the step with the plan."""
    notes: tuple[str, ...] = ()
    """Further remarks on these figures."""
    constraint_warnings: tuple[str, ...] = ()
    """Messages of the ``ConstraintWarning`` of this graph. A process that takes its code from torch's caches warns again."""
    assumed_sizes: tuple[tuple[int, int], ...] = ()
    """For sizes that depend on data and have no upper bound: the place among the numbers that the forward saves for the
    backward, and the largest value for which the plan holds."""
    others: tuple[Self, ...] = ()
    """Reports of the other graphs after graph breaks, in the sequence of the graphs; from :func:`autoremat.explain`."""
    plan: Plan | None = field(default=None, compare=False, repr=False)
    """The plan itself, which the JSON omits; :meth:`Plan.save` writes it. None if the report was read from JSON, or if
    :func:`reports` has a hundred later ones."""

    code_headroom_bytes: int = 0
    """Bytes that the plan leaves free below the budget, not part of the predicted peak. They serve small
    allocations of the generated code, and what it copies for CUDA graphs."""
    gradient_bytes: int = 0
    """Bytes of all gradients that the backward returns. No recomputation lowers the peak below them."""
    loss_chunks: int = 1
    """Number of chunks of the projection and the loss (see the option ``chunk_loss``)."""
    tiles: int = 1
    """Number of tiles of each stretch of ops that compute row by row (see the option ``tiles``)."""
    tiled_stretches: int = 0
    """Number of stretches that are tiled."""
    loss_chunked_by: str = ""
    """What computes the loss in chunks instead of autoremat: a function of torch or a setting of Inductor. Empty if nothing
    does."""
    minimum_unchunked_bytes: int | None = None
    """Minimum peak found without chunking the loss. None if no such plan was searched."""
    room_left_because: str = ""
    """Reason why the compiled code needs much less than the budget. Empty if it does not, or if no code was generated."""
    ranks: tuple[int, ...] = ()
    """Ranks of a distributed job that share this plan. Empty if the process planned by itself."""
    unknown_workspaces: tuple[str, ...] = ()
    """Kernels that may need more memory than counted, because their workspace is unknown and cannot be measured."""
    graph_pool_bytes: int | None = None
    """Bytes that the pool of CUDA graphs keeps from its recording on, between steps too. They are part of
    ``compiled_peak_bytes``. None without CUDA graphs."""

    device_ledger: DeviceBudget | None = None
    """The ledger of the whole device. None unless the budget is a device budget, or "auto" with a live optimizer."""
    in_flight: int = 1
    """Number of calls of the graph that are open at once. All peaks count the others' saved tensors and outputs."""
    held_bytes: int = 0
    """Bytes that an open call holds between its forward and its backward: saved tensors and outputs."""
    resident_bytes: int = 0
    """Part of all peaks that is live beside the open calls: gradients of earlier micro-batches, outputs of finished calls."""
    accumulated_bytes: int = 0
    """Bytes of the gradients of parameters. Later micro-batches of a step find them live."""

    max_slowdown: float | None = None
    """Budget of time: the share by which the step may take longer than under its plan without a budget. None if there is
    none, as for the next two figures."""
    slowdown: float | None = None
    """Share by which the step takes longer than under its plan without a budget, by the cost model."""
    seconds_without_budget: float | None = None
    """Seconds of the step under its plan without a budget, by the cost model."""
    binding_budget: str = ""
    """The budget that decides on the plan beside a budget of time, "max_slowdown" or "memory_budget"; empty if neither does."""

    minimum_is_searched: bool = False
    """True if ``minimum_peak_bytes`` is the least that a search for it finds. Other budgets make none, and less may fit."""
    timed_minimum_bytes: int | None = None
    """Simulated minimum peak found within ``max_slowdown``, if that exceeds the budget of memory."""

    host_memory_bytes: int | None = None
    """The bound on the bytes of saved tensors on the host; None if none may be there."""
    unused_forms: tuple[str, ...] = ()
    """For each form that the options ask for and that no value of this graph can have, the option and the reason."""
    stored: StoredTensors | None = None
    """Figures of the saved tensors that are kept in other forms than on the device. None if there are none."""

    @property
    def gap(self) -> float | None:
        """Optimality gap: seconds of recomputation, stalls and saving above the lower bound, as a share of the step with the
        fewest possible. None if no plan fits by the simulator."""
        if self.lower_bound_seconds is None or not self.step_seconds:
            return None
        excess = self.recompute_seconds + self.saving_seconds + self.stall_seconds - self.lower_bound_seconds
        return max(0.0, excess) / (self.step_seconds + self.lower_bound_seconds)

    @property
    def stall_seconds(self) -> float:
        """Seconds that the step waits for transfers of saved tensors, by the cost model."""
        return 0.0 if self.stored is None else self.stored.stall_seconds

    @property
    def host_peak_bytes(self) -> int:
        """Bytes of saved tensors on the host, of all open calls together."""
        return 0 if self.stored is None else self.stored.host_peak_bytes

    @property
    def peak_bytes(self) -> int:
        """Best-known peak: that of the generated code, else the simulated one."""
        return self.predicted_peak_bytes if self.compiled_peak_bytes is None else self.compiled_peak_bytes

    @property
    def within_budget(self) -> bool:
        """True if the peak is within the budget. Unknown workspaces are ignored."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    @property
    def keeps_time(self) -> bool:
        """True if the predicted time of the step keeps to ``max_slowdown``, if that is given."""
        return self.max_slowdown is None or self.slowdown is None or self.slowdown <= self.max_slowdown + TIME_TOLERANCE

    @property
    def fits(self) -> bool:
        """True if the step is known to stay within the budget: the best-known peak fits, and all workspaces are known."""
        return self.budget_bytes is None or (
            self.within_budget
            and not self.unknown_workspaces
            and (self.device_ledger is None or self.device_ledger.holds(self.predicted_device_bytes or 0))
        )

    @property
    def predicted_device_bytes(self) -> int | None:
        """Predicted peak of the whole device over all steps, the optimizer's included. None without a ledger of the device."""
        if self.device_ledger is None:
            return None
        kept = max(0, (self.graph_pool_bytes or 0) - self.gradient_bytes)  # a pool stays, and gradients are part of it
        return max(self.device_ledger.device_bytes(self.peak_bytes), self.device_ledger.update_bytes + kept)

    @classmethod
    def of(cls, planning: PlanningResult, plan: Plan, extra_headroom_bytes: int = 0, **fields: Any) -> Self:
        """Returns the report of ``plan``, which was found for a budget that was ``extra_headroom_bytes`` smaller.

        ``fields`` are the figures that a plan lacks: budget, times, device.
        """
        graph, budget = plan.graph, fields.get("budget_bytes")
        ceiling = fields.get("soft_budget_bytes")
        held_to = ceiling if ceiling is not None and plan.peak_bytes <= ceiling else None
        held_to = held_to if fields.get("max_slowdown") is None else plan.peak_bytes
        plan = dataclasses.replace(
            plan,
            budget_bytes=budget,
            host_budget_bytes=fields.get("host_memory_bytes"),
            lower_bound_bytes=planning.lower_bound_bytes,
            lower_bound_seconds=planning.lower_bound_seconds,
            interrupted=planning.interrupted,
        )
        return cls(
            plan=plan,
            predicted_peak_bytes=plan.peak_bytes,
            baseline_peak_bytes=planning.baseline.peak_bytes,
            minimum_peak_bytes=min(planning.smallest.peak_bytes, plan.peak_bytes),
            minimum_is_searched=planning.least_is_searched,
            lower_bound_bytes=planning.lower_bound_bytes,
            saved_bytes=plan.saved_bytes,
            recomputed_ops=len(plan.recomputed),
            recompute_seconds=plan.recompute_seconds,
            saving_seconds=plan.cost_seconds - plan.added_seconds,
            stored=StoredTensors.of(plan),
            forward_seconds=graph.forward_seconds,
            ops=len(graph.ops),
            strategy=plan.label,
            saved=_saved_tensors(graph, plan),
            time_limited=planning.interrupted,
            ended_by_clock=planning.ended_by_clock,
            step_seconds=graph.step_seconds,
            predicted_seconds=plan.predicted_seconds,
            in_flight=graph.in_flight,
            held_bytes=plan.timeline.held_bytes,
            resident_bytes=graph.resident_bytes,
            gradient_bytes=sum(graph.values[v].bytes for v in graph.backward_outputs),
            lower_bound_seconds=planning.lower_bound_seconds if planning.lower_bound_seconds < math.inf else None,
            values=explain_values(plan, held_to if budget is None else budget - extra_headroom_bytes),
            peak_before=peak_of(planning.baseline),
            peak_after=peak_of(plan),
            parts_after=parts_of_peak(plan),
            profile_before=profile_of(planning.baseline),
            profile_after=profile_of(plan),
            **fields,
        )

    def compiled(self, peak_bytes: int | None, replans: int, room_left_because: str = "") -> Self:
        """Returns the report with the results of code generation."""
        minimum = self.minimum_peak_bytes + self.code_headroom_bytes
        if peak_bytes is not None:
            minimum = peak_bytes if self.predicted_peak_bytes <= self.minimum_peak_bytes else min(minimum, peak_bytes)
        return dataclasses.replace(
            self, compiled_peak_bytes=peak_bytes, minimum_peak_bytes=minimum, replans=replans,
            room_left_because=room_left_because,
        )  # fmt: skip

    def to_json(self) -> str:
        """Returns all fields except ``plan`` as JSON, for :meth:`from_json`."""
        fields = plain(dataclasses.replace(self, plan=None, others=()))
        del fields["plan"]
        return json.dumps(fields | {"others": [json.loads(other.to_json()) for other in self.others]})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the report that :meth:`to_json` of this or an earlier version wrote. Raises ``ValueError`` for any other
        text."""
        try:
            found: Self = CODEC.read(cls, json.loads(text))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"not a report of this version of autoremat: {error}") from error
        return found

    def totals(self, by: str = "module") -> tuple[Total, ...]:
        """Returns sums over ``values`` by module or op, the most saved bytes first.

        ``by`` is ``"module"`` (module paths with ``*`` for numbers) or ``"op"``. Raises ``ValueError`` for any other ``by``.
        """
        if by not in ("module", "op"):
            raise ValueError(f'totals(by={by!r}) is not accepted. Accepted: "module", "op"')
        groups: dict[str, list[ForwardValue]] = {}
        for value in self.values:
            key = module_class(value.module) if by == "module" else op_name(value.op)
            groups.setdefault(key, []).append(value)
        found = (Total.of(name, values) for name, values in groups.items())
        return tuple(sorted(found, key=lambda total: (-total.saved_bytes, -total.added_seconds, total.name)))

    @property
    def overhead(self) -> float:
        """Seconds of recomputation as a share of the forward's seconds."""
        return self.recompute_seconds / self.forward_seconds if self.forward_seconds else 0.0


def _saved_tensors(graph: Graph, plan: Plan) -> tuple[SavedTensor, ...]:
    values = sorted(plan.saved, key=lambda v: (-graph.values[v].bytes, v))
    found = []
    for number in values:
        value = graph.values[number]
        op = graph.ops[value.producer].target if value.producer is not None else ""
        found.append(SavedTensor(value.name, value.bytes, op, value.module, value.source))
    return tuple(found)


TIME_TOLERANCE = 1e-6
"""Slow-down that counts as none."""

CODEC = Codec(signed=True)
