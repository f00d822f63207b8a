"""What was planned for a graph, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import PlanningResult
from autoremat.report.decisions import Decision, ForwardValue, Reason, explain_values, module_class, op_name
from autoremat.report.peak_snapshot import LiveTensor, PeakSnapshot, Profile, TensorCategory, peak_of, profile_of

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class SavedTensor:
    """One storage that the forward keeps for the backward."""

    name: str
    bytes: int
    op: str
    module: str
    source: str


@dataclass(frozen=True)
class Total:
    """Sums over the forward's values of one class of modules or one op. Seconds are estimates of the cost model."""

    name: str
    values: int
    saved_bytes: int
    recomputed_bytes: int
    fused_bytes: int
    """Bytes of what is never materialised."""
    seconds: float
    """One run of the ops."""
    added_seconds: float
    """Recomputation."""

    @classmethod
    def of(cls, name: str, values: Sequence[ForwardValue]) -> Total:
        """Sum up ``values``."""

        def size(decision: Decision) -> int:
            return sum(value.bytes for value in values if value.decision is decision)

        seconds, added = sum(v.seconds for v in values), sum(v.added_seconds for v in values)
        return cls(name, len(values), size(Decision.SAVED), size(Decision.RECOMPUTED), size(Decision.FUSED), seconds, added)


@dataclass(frozen=True, repr=False)
class ReportData:
    """The plan of one graph in figures. Bytes are peaks beyond what was live when the step began; seconds are estimates
    of the cost model, except ``planning_seconds``."""

    budget_bytes: int | None
    predicted_peak_bytes: int
    """By the simulator, before code generation."""
    baseline_peak_bytes: int
    """The same without any recomputation."""
    minimum_peak_bytes: int
    """The smallest peak that any plan found reaches."""
    lower_bound_bytes: int
    """No plan has a smaller peak than this."""
    saved_bytes: int
    recomputed_ops: int
    recompute_seconds: float
    forward_seconds: float
    planning_seconds: float
    ops: int
    compiler: str
    device: str
    strategy: str
    saved: tuple[SavedTensor, ...]
    """What is saved, largest first."""
    compiled_peak_bytes: int | None = None
    """By the code generator's own schedule, after fusion; None where it was not seen (``compiler="aot_eager"``)."""
    replans: int = 0
    """How often the plan was tightened because the code generator's schedule was over the budget."""
    time_limited: bool = False
    step_seconds: float = 0.0
    """Forward and backward without recomputation."""
    lower_bound_seconds: float | None = 0.0
    """No plan within the budget recomputes for less time; None if the simulator says that none fits."""
    cost_model: str = "roofline"
    calibrated_share: float = 0.0
    """The share of the step's estimated seconds that comes from the measured rates of the device."""
    assumed_share: float = 1.0
    """The share that comes from data sheets, or from ops of other classes."""
    soft_budget_bytes: int | None = None
    """What stood for a budget where none was given: the simulated peak of torch's own partition."""
    values: tuple[ForwardValue, ...] = ()
    """What becomes of every value of the forward, and why; empty in reports of versions that did not look."""
    peak_before: PeakSnapshot | None = None
    """Where memory is fullest without recomputation, and what is alive there."""
    peak_after: PeakSnapshot | None = None
    """The same with the plan."""
    profile_before: Profile | None = None
    """Memory over the step without recomputation."""
    profile_after: Profile | None = None
    """The same with the plan."""
    notes: tuple[str, ...] = ()
    """What else should be known of these figures."""
    others: tuple[Self, ...] = ()
    """After graph breaks, of :func:`autoremat.explain`: the reports of the other graphs, in their order."""
    plan: Plan | None = field(default=None, compare=False, repr=False)
    """The plan itself, no part of the JSON: :meth:`Plan.save` writes it. None if the report was read from JSON, or is one of
    :func:`reports` with a hundred after it."""

    code_headroom_bytes: int = 0
    """Beside the predicted peak: copies of images and weights in other layouts, and what code may allocate at any time. Of the
    budget so much is kept back from the plan."""
    gradient_bytes: int = 0
    """All gradients that the backward returns together: of the peak, a floor that no recomputation lowers."""
    loss_chunks: int = 1
    """In how many parts the projection and the loss are computed (see the option ``chunk_loss``)."""
    minimum_unchunked_bytes: int | None = None
    """The smallest peak that any plan found reaches with the loss in one part; None if none was looked for."""
    room_left_because: str = ""
    """Why the compiled code uses so much less than the budget; empty if it does not, or was not seen."""
    unknown_workspaces: tuple[str, ...] = ()
    """Kernels that may need more memory than is counted, because their workspace is not known and cannot be measured."""

    def __getattr__(self, name: str) -> Any:
        if name not in RENAMED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        new = RENAMED[name]
        warnings.warn(
            f"Report.{name} is deprecated and goes with the next release; use {new}", DeprecationWarning, stacklevel=2
        )
        return getattr(self, new)

    @property
    def gap(self) -> float | None:
        """How far from optimal the plan may be: its recomputation over the bound, as a share of the step with the least
        recomputation possible. None if no plan fits by the simulator's count."""
        if self.lower_bound_seconds is None or not self.step_seconds:
            return None
        excess = self.recompute_seconds - self.lower_bound_seconds
        return max(0.0, excess) / (self.step_seconds + self.lower_bound_seconds)

    @property
    def peak_bytes(self) -> int:
        """The best-known peak: that of the generated code, or the simulated one."""
        return self.predicted_peak_bytes if self.compiled_peak_bytes is None else self.compiled_peak_bytes

    @property
    def within_budget(self) -> bool:
        """Whether the best-known peak is within the budget, unknown workspaces left out."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether the step is known to stay within the budget: its peak does, and all workspaces are known."""
        return self.budget_bytes is None or (self.within_budget and not self.unknown_workspaces)

    @classmethod
    def of(cls, planning: PlanningResult, plan: Plan, extra_headroom_bytes: int = 0, **fields: Any) -> Self:
        """Returns the report of ``plan``, which was made for ``extra_headroom_bytes`` less than its budget.

        ``fields`` are the figures that a plan lacks: budget, times, device.
        """
        graph, budget = plan.graph, fields.get("budget_bytes")
        ceiling = fields.get("soft_budget_bytes")
        held_to = ceiling if ceiling is not None and plan.peak_bytes <= ceiling else None
        plan = dataclasses.replace(
            plan,
            budget_bytes=budget,
            lower_bound_bytes=planning.lower_bound_bytes,
            lower_bound_seconds=planning.lower_bound_seconds,
            interrupted=planning.interrupted,
        )
        return cls(
            plan=plan,
            predicted_peak_bytes=plan.peak_bytes,
            baseline_peak_bytes=planning.baseline.peak_bytes,
            minimum_peak_bytes=min(planning.smallest.peak_bytes, plan.peak_bytes),
            lower_bound_bytes=planning.lower_bound_bytes,
            saved_bytes=plan.saved_bytes,
            recomputed_ops=len(plan.recomputed),
            recompute_seconds=plan.added_seconds,
            forward_seconds=graph.forward_seconds,
            ops=len(graph.ops),
            strategy=plan.label,
            saved=_saved_tensors(graph, plan),
            time_limited=planning.interrupted,
            step_seconds=graph.step_seconds,
            gradient_bytes=sum(graph.values[v].bytes for v in graph.backward_outputs),
            lower_bound_seconds=planning.lower_bound_seconds if planning.lower_bound_seconds < math.inf else None,
            values=explain_values(plan, held_to if budget is None else budget - extra_headroom_bytes),
            peak_before=peak_of(planning.baseline),
            peak_after=peak_of(plan),
            profile_before=profile_of(planning.baseline),
            profile_after=profile_of(plan),
            **fields,
        )

    def compiled(self, peak_bytes: int | None, replans: int, room_left_because: str = "") -> Self:
        """The report with what code generation has shown: where it needs more than simulated, so will the smallest plan."""
        excess = max(0, (peak_bytes or 0) - self.predicted_peak_bytes)
        minimum = min(self.minimum_peak_bytes + excess, peak_bytes or self.minimum_peak_bytes + excess)
        return dataclasses.replace(
            self, compiled_peak_bytes=peak_bytes, minimum_peak_bytes=minimum, replans=replans,
            room_left_because=room_left_because,
        )  # fmt: skip

    def to_json(self) -> str:
        """All fields but ``plan`` as JSON; :meth:`from_json` reads it back."""
        return json.dumps(_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that :meth:`to_json` wrote, this version's or an earlier one's. Raises ``ValueError`` on anything else."""
        try:
            return cls(**_parsed(json.loads(text), cls))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a report of this version of autoremat: {error}") from error

    def totals(self, by: str = "module") -> tuple[Total, ...]:
        """Sums over ``values`` by ``"module"`` (its path, numbers replaced by ``*``) or ``"op"``, most saved bytes first."""
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


RENAMED = {
    "inner": "compiler",
    "loss_parts": "loss_chunks",
    "minimum_in_one_part_bytes": "minimum_unchunked_bytes",
    "ceiling_bytes": "soft_budget_bytes",
    "reserved_bytes": "code_headroom_bytes",
}
"""Fields by the names that earlier versions gave them."""

DROPPED = ("measured_share", "untimed_ops")
"""Fields that earlier versions had: of the cost model "profile", which is gone."""


def _plain(report: ReportData) -> dict[str, Any]:
    """The fields as JSON data."""
    own = dataclasses.replace(report, plan=None, others=())
    fields = dataclasses.asdict(own) | {"others": [_plain(other) for other in report.others]}
    del fields["plan"]
    return fields


def _parsed(fields: dict[str, Any], kind: type[ReportData]) -> dict[str, Any]:
    """Returns the fields of a report of class ``kind`` as Python values.

    Raises ``TypeError``, ``KeyError`` or ``ValueError`` if they are no report's.
    """
    plan = fields.pop("plan", None)
    if plan is not None:
        raise TypeError("a plan is no part of a report's JSON")
    fields = {RENAMED.get(name, name): value for name, value in fields.items() if name not in DROPPED}
    fields["saved"] = tuple(SavedTensor(**tensor) for tensor in fields["saved"])
    fields["values"] = tuple(_forward_value(value) for value in fields.get("values", ()))
    for name in ("peak_before", "peak_after"):
        fields[name] = _moment(fields.get(name))
    for name in ("profile_before", "profile_after"):
        fields[name] = _profile(fields.get(name))
    fields["notes"] = tuple(fields.get("notes", ()))
    fields["unknown_workspaces"] = tuple(fields.get("unknown_workspaces", ()))
    fields["others"] = tuple(kind(**_parsed(other, kind)) for other in fields.get("others", ()))
    return fields


def _forward_value(fields: dict[str, Any]) -> ForwardValue:
    decision = fields.pop("fate", None) or fields["decision"]  # an earlier version called it so
    return ForwardValue(**fields | {"decision": Decision(decision), "reason": Reason(fields["reason"])})


def _moment(fields: Mapping[str, Any] | None) -> PeakSnapshot | None:
    if fields is None:
        return None
    alive = tuple(LiveTensor(**tensor | {"sort": TensorCategory(tensor["sort"])}) for tensor in fields["alive"])
    by_sort = tuple((TensorCategory(sort), int(size)) for sort, size in fields["by_sort"])
    return PeakSnapshot(**{**fields, "alive": alive, "by_sort": by_sort})


def _profile(fields: Mapping[str, Any] | None) -> Profile | None:
    if fields is None:
        return None
    bands = tuple(tuple(map(int, band)) for band in fields["bytes"])
    return Profile(tuple(fields["groups"]), tuple(map(float, fields["seconds"])), int(fields["border"]), bands)
