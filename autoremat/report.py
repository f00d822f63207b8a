"""What was planned for a compiled graph, for people and for programs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import threading
from dataclasses import dataclass
from typing import Any

from autoremat.graph import Graph
from autoremat.plans import Plan
from autoremat.solvers import Planning
from autoremat.units import format_bytes, format_seconds

SAVED_TENSORS_SHOWN = 10


@dataclass(frozen=True)
class SavedTensor:
    """One storage that the forward keeps for the backward."""

    name: str
    bytes: int
    op: str
    module: str
    source: str


@dataclass(frozen=True)
class Report:
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
    inner: str
    device: str
    strategy: str
    saved: tuple[SavedTensor, ...]
    """What is saved, largest first."""
    compiled_peak_bytes: int | None = None
    """By the code generator's own schedule, after fusion; None where it was not seen (``inner="aot_eager"``)."""
    replans: int = 0
    """How often the plan was tightened because the code generator's schedule was over the budget."""
    time_limited: bool = False
    step_seconds: float = 0.0
    """Forward and backward without recomputation."""
    lower_bound_seconds: float | None = 0.0
    """No plan within the budget recomputes for less time; None if the simulator says that none fits."""
    cost_model: str = "roofline"
    measured_share: float = 0.0
    """Of the step's estimated seconds, the share of ops that were timed themselves."""
    calibrated_share: float = 0.0
    """The share that comes from the measured rates of the device."""
    assumed_share: float = 1.0
    """The share that comes from data sheets, or from ops of other classes."""
    untimed_ops: int = 0
    """Ops that ``cost_model="profile"`` was to time and could not."""
    plan: Plan | None = dataclasses.field(default=None, compare=False, repr=False)
    """The plan itself, no part of the JSON: :meth:`Plan.save` writes it. None if the report was read from JSON."""

    @property
    def gap(self) -> float | None:
        """How far from optimal the plan may be: its recomputation over the bound, as a share of the step with the least
        recomputation possible. None if no plan fits by the simulator's count."""
        if self.lower_bound_seconds is None or not self.step_seconds:
            return None
        excess = self.recompute_seconds - self.lower_bound_seconds
        return max(0.0, excess) / (self.step_seconds + self.lower_bound_seconds)

    @property
    def fits(self) -> bool:
        """Whether the best-known peak is within the budget."""
        peak = self.predicted_peak_bytes if self.compiled_peak_bytes is None else self.compiled_peak_bytes
        return self.budget_bytes is None or peak <= self.budget_bytes

    @classmethod
    def of(cls, planning: Planning, plan: Plan, **fields: Any) -> Report:
        """Sum up ``plan``; ``fields`` are what a plan does not know of itself (budget, times, device ...)."""
        graph = plan.graph
        plan = dataclasses.replace(
            plan,
            budget_bytes=fields.get("budget_bytes"),
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
            lower_bound_seconds=planning.lower_bound_seconds if planning.lower_bound_seconds < math.inf else None,
            **fields,
        )

    def compiled(self, peak_bytes: int | None, replans: int) -> Report:
        """The report with what code generation has shown: where it needs more than simulated, so will the smallest plan."""
        excess = max(0, (peak_bytes or 0) - self.predicted_peak_bytes)
        minimum = min(self.minimum_peak_bytes + excess, peak_bytes or self.minimum_peak_bytes + excess)
        return dataclasses.replace(self, compiled_peak_bytes=peak_bytes, minimum_peak_bytes=minimum, replans=replans)

    def to_json(self) -> str:
        """All fields but the plan as JSON; :meth:`from_json` reads it back."""
        record = dataclasses.asdict(dataclasses.replace(self, plan=None))
        del record["plan"]
        return json.dumps(record, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote. Raises ``ValueError`` on anything else."""
        try:
            fields = json.loads(text)
            fields["saved"] = tuple(SavedTensor(**tensor) for tensor in fields["saved"])
            return cls(**fields | {"plan": None})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a report of this version of autoremat: {error}") from error

    def summary(self) -> str:
        """One line, for logs."""
        budget = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        gap = "" if self.gap is None else f" (at most {self.gap:.1%} of the step over the optimum)"
        peak = self.predicted_peak_bytes if self.compiled_peak_bytes is None else self.compiled_peak_bytes
        return (
            f"{budget}: peak {format_bytes(self.baseline_peak_bytes)} -> {format_bytes(peak)}, "
            f"recomputation {self.overhead:.1%} of the forward{gap}, planned in {format_seconds(self.planning_seconds)}"
        )

    @property
    def overhead(self) -> float:
        """Seconds of recomputation as a share of the forward's seconds."""
        return self.recompute_seconds / self.forward_seconds if self.forward_seconds else 0.0

    def __str__(self) -> str:
        return _render(self)


def _saved_tensors(graph: Graph, plan: Plan) -> tuple[SavedTensor, ...]:
    values = sorted(plan.saved, key=lambda v: (-graph.values[v].bytes, v))
    found = []
    for number in values:
        value = graph.values[number]
        op = graph.ops[value.producer].target if value.producer is not None else ""
        found.append(SavedTensor(value.name, value.bytes, op, value.module, value.source))
    return tuple(found)


def _figures(report: Report) -> list[tuple[str, str]]:
    budget = "none" if report.budget_bytes is None else format_bytes(report.budget_bytes)
    share = report.predicted_peak_bytes / report.baseline_peak_bytes if report.baseline_peak_bytes else 1.0
    rows = [
        ("budget", budget),
        ("predicted peak", f"{format_bytes(report.predicted_peak_bytes)} ({share:.0%} of no recomputation)"),
        ("without recomputation", format_bytes(report.baseline_peak_bytes)),
        ("smallest found", f"{format_bytes(report.minimum_peak_bytes)} (bound {format_bytes(report.lower_bound_bytes)})"),
        ("saved for the backward", f"{format_bytes(report.saved_bytes)} in {len(report.saved)} tensors"),
        ("recomputed", f"{report.recomputed_ops} ops, {format_seconds(report.recompute_seconds)} estimated "
                       f"({report.overhead:.1%} of the forward)"),
        ("distance from the optimum", "unknown" if report.gap is None else f"at most {report.gap:.1%} of the step's time"),
        ("seconds by", _basis(report)),
        ("planned", f"{report.ops} ops in {format_seconds(report.planning_seconds)}; {report.strategy}"),
    ]  # fmt: skip
    if report.compiled_peak_bytes is not None:
        rows.insert(2, ("peak of the compiled code", format_bytes(report.compiled_peak_bytes)))
    return rows


def _basis(report: Report) -> str:
    """The cost model, and what its seconds rest on."""
    shares = {"measured": report.measured_share, "calibrated": report.calibrated_share, "assumed": report.assumed_share}
    untimed = f"; {report.untimed_ops} ops not timed" if report.untimed_ops else ""
    return f"{report.cost_model}: " + ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share) + untimed


def _render(report: Report) -> str:
    from rich.console import Console, Group
    from rich.table import Table

    figures = Table(show_header=False, box=None, pad_edge=False)
    figures.add_column(style="bold", no_wrap=True)
    figures.add_column()
    for name, text in _figures(report):
        figures.add_row(name, text)
    tensors = Table(title="largest saved tensors", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    tensors.add_column("bytes", justify="right", no_wrap=True)
    for column in ("op", "module", "source"):
        tensors.add_column(column, overflow="fold")
    for tensor in report.saved[:SAVED_TENSORS_SHOWN]:
        tensors.add_row(format_bytes(tensor.bytes), tensor.op, tensor.module, _short(tensor.source))
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=False).print(Group(figures, "", tensors) if report.saved else figures)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _short(source: str) -> str:
    """The last three parts of a path."""
    return "/".join(source.replace("\\", "/").split("/")[-3:])


_reports: list[Report] = []
_lock = threading.Lock()


def add_report(report: Report) -> None:
    """Append to this process's reports."""
    with _lock:
        _reports.append(report)


def reports() -> list[Report]:
    """A report for each graph with a backward that was compiled in this process, oldest first."""
    with _lock:
        return list(_reports)
