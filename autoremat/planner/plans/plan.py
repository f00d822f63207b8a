"""Defines plans: a schedule with its simulation, its cost and its lower bounds."""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autoremat.basics.disk_cache import read_regular_text
from autoremat.basics.display import PlainTable, Shown, named_figures
from autoremat.basics.errors import PlanFileError, PlanInvalid
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.cost.durations import durations
from autoremat.planner.cost.fused_traffic import traffic_of
from autoremat.planner.cost.stalls import Stalls, stalls_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.simulator import Timeline, simulate, sizes_on_device
from autoremat.planner.plans import plan_json
from autoremat.planner.plans.check import check_constraints, check_executions, check_figures, check_stays

FORMAT, VERSION = "autoremat plan", 4
READABLE = (3, VERSION)
"""Versions of plan files that are read. Files of version 3 have every field."""

FACTS = ("label", "budget_bytes", "host_budget_bytes", "lower_bound_bytes", "lower_bound_seconds", "interrupted")
"""Fields of a plan that a file has beside its graph and its schedule. All other figures follow from these."""

OPTIMAL_SHARE = 1e-9
"""Optimality tolerance: a plan this close to its lower bound, as a share of the bound or of the step, counts as optimal. Bounds
are rounded down."""


class Status(str, enum.Enum):
    """The status of a plan: its fit to the budget, and its known optimality."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    """The peak exceeds the budget, or the bytes on the host exceed theirs."""
    TIME_LIMIT = "time limit"
    """Feasible; the time limit cut the search short."""


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """A schedule for ``graph`` with its simulated timeline, its budget and the lower bounds.

    Bytes are ints, times are in seconds.
    """

    graph: Graph
    schedule: Schedule
    timeline: Timeline = field(compare=False)  # follows from the two
    label: str = ""
    """The origin of the plan, for logs: segments, nesting, price."""
    budget_bytes: int | None = None
    """The bound on the peak for which the plan was made, or None."""
    host_budget_bytes: int | None = None
    """The bound on the bytes on the host for which the plan was made, or None."""
    lower_bound_seconds: float = 0.0
    """No plan within the budget costs fewer seconds (``cost_seconds``). Infinite if no plan fits."""
    lower_bound_bytes: int = 0
    """No plan has a lower peak, in bytes."""
    interrupted: bool = False
    """True if the time limit cut the search short."""

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, label: str = "") -> Plan:
        """Returns the plan of a simulated ``schedule``.

        Raises ``PlanInvalid`` if an execution reads a value that was not computed before, and for a stay that breaks a rule.
        """
        return cls(graph, schedule, simulate(graph, schedule), label)

    @property
    def sequence(self) -> tuple[int, ...]:
        """The op numbers in the sequence in which they run."""
        return self.schedule.sequence

    @property
    def peak_bytes(self) -> int:
        """The simulated peak in bytes."""
        return self.timeline.peak_bytes

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Values that cross from the forward into the backward."""
        return self.schedule.saved(self.graph)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes on the device that cross from the forward into the backward. A value with a stay counts those of its form."""
        return sum(sizes_on_device(self.graph, self.schedule, self.saved))

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the values that have a stay: stored in a form in the forward, and loaded in the backward."""
        return sum(self.graph.values[stay.value].bytes for stay in self.schedule.stays)

    @property
    def host_bytes(self) -> int:
        """The most bytes on the host that the forms of stored values take, in all open calls together."""
        return self.timeline.host_bytes

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Executions of forward ops beyond the first one, in sequence."""
        return self.schedule.recomputed(self.graph)

    @cached_property
    def recompute_seconds(self) -> float:
        """Seconds that recomputation adds to the step, by the cost model."""
        return sum(map(traffic_of(self.graph).recompute_seconds.__getitem__, self.recomputed))

    @cached_property
    def stalls(self) -> Stalls:
        """The waits for the transfers of stays, by the cost model."""
        return stalls_of(self.graph, self.schedule)

    @property
    def stall_seconds(self) -> float:
        """Seconds that the step waits for transfers of stays, by the cost model."""
        return self.stalls.seconds

    @cached_property
    def added_seconds(self) -> float:
        """Seconds that recomputation and stalls add to the step, by the cost model."""
        return self.recompute_seconds + self.stall_seconds

    @cached_property
    def cost_seconds(self) -> float:
        """Seconds by which plans are compared: recomputation, stalls, and the memory traffic of saved tensors."""
        return self.added_seconds + float(traffic_of(self.graph).saving_seconds[list(self.saved)].sum())

    @cached_property
    def predicted_seconds(self) -> float:
        """Predicted seconds of the whole step under the plan: its kernels as fused, with recomputation, and its stalls."""
        return float(durations(self.graph, self.schedule).sum()) + self.stall_seconds

    @cached_property
    def gap(self) -> float:
        """The optimality gap: the cost in seconds above the lower bound, as a share of the step at the least possible cost.
        Infinite if no plan fits.
        """
        if math.isinf(self.lower_bound_seconds):
            return math.inf
        excess = max(0.0, self.cost_seconds - self.lower_bound_seconds)
        return excess / (self.graph.step_seconds + self.lower_bound_seconds) if excess else 0.0

    @cached_property
    def status(self) -> Status:
        """The status of the plan: infeasible over a budget, else optimal, feasible or cut short by the time limit."""
        bounds = ((self.peak_bytes, self.budget_bytes), (self.host_bytes, self.host_budget_bytes))
        if any(budget is not None and taken > budget for taken, budget in bounds):
            return Status.INFEASIBLE
        if self.cost_seconds <= self.lower_bound_seconds * (1 + OPTIMAL_SHARE) + self.graph.step_seconds * OPTIMAL_SHARE:
            return Status.OPTIMAL
        return Status.TIME_LIMIT if self.interrupted else Status.FEASIBLE

    def line(self) -> str:
        """Returns the line that a prompt shows."""
        budget = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        return (
            f"{self.status.value}, {budget}, peak {format_bytes(self.peak_bytes)}, {len(self.graph.ops)} ops, "
            f"{len(self.recomputed)} recomputed in {format_seconds(self.added_seconds)}"
        )

    def tables(self) -> Sequence[PlainTable]:
        """Returns the table that ``print`` shows."""
        graph, bound = self.graph, self.lower_bound_seconds
        least = "no plan fits" if math.isinf(bound) else f"no plan adds less than {format_seconds(bound)}"
        figures = [
            ("status", self.status.value),
            ("budget", "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)),
            ("peak", f"{format_bytes(self.peak_bytes)} (no plan needs less than {format_bytes(self.lower_bound_bytes)})"),
            ("recomputed", f"{len(self.recomputed)} ops, {format_seconds(self.added_seconds)} of a step of "
                           f"{format_seconds(graph.step_seconds)} ({least})"),
            ("saved", f"{format_bytes(self.saved_bytes)} in {len(self.saved)} values"),
            ("stored", f"{format_bytes(self.stored_bytes)} in {len(self.schedule.stays)} values, "
                       f"{format_bytes(self.host_bytes)} on the host"),
            ("graph", f"{len(graph.ops)} ops, {graph.num_forward} of them forward"),
            ("found by", self.label or "unknown"),
        ]  # fmt: skip
        return [named_figures([one for one in figures if one[0] != "stored" or self.schedule.stays])]

    @cached_property
    def frees(self) -> tuple[tuple[int, ...], ...]:
        """For each execution of ``sequence``, the values of which a live range ends after it.

        Outputs that the caller holds never end. A value with a stay is freed twice: once stored, and after its last read.
        """
        live_ranges, num_forward = self.timeline.live_ranges.of_values(), len(self.schedule.forward)
        with_caller, gradients = set(self.graph.forward_outputs), set(self.graph.backward_outputs)
        # The caller holds the newest live range of each output: forward outputs as of the end of the forward.
        handed_out = {r.value: r for r in live_ranges if r.value in with_caller and r.start < num_forward}
        at_the_end = {r.value: r for r in live_ranges if r.value in gradients}
        staying = {*handed_out.values(), *at_the_end.values()}
        freed: list[list[int]] = [[] for _ in self.sequence]
        for live_range in live_ranges:
            if live_range not in staying:
                freed[live_range.end].append(live_range.value)
        return tuple(map(tuple, freed))

    def to_json(self) -> str:
        """Returns the plan as strict JSON for other programs.

        Infinite numbers become null.

        ``live_ranges`` lists triples: the value, the execution that computes or loads it, the last one at which it is live.
        """
        record = {
            "sequence": self.sequence,
            "ops": [op.name for op in self.graph.ops],
            "peak_bytes": self.peak_bytes,
            "budget_bytes": self.budget_bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "added_seconds": self.added_seconds,
            "lower_bound_seconds": _finite(self.lower_bound_seconds),
            "gap": _finite(self.gap),
            "status": self.status.value,
            "live_ranges": [(found.value, found.start, found.end) for found in self.timeline.live_ranges.of_values()],
            "stays": [asdict(stay) for stay in self.schedule.stays],
            "host_bytes": self.host_bytes,
            "host_budget_bytes": self.host_budget_bytes,
        }
        return json.dumps(record, allow_nan=False)

    def to_data(self) -> dict[str, Any]:
        """Returns the plan with its graph as JSON data without infinite numbers; :meth:`from_data` reads it back."""
        record = {"format": FORMAT, "version": VERSION, **plan_json.encode(self.graph, self.schedule)}
        record |= plan_json.changed(self, FACTS)
        if math.isinf(self.lower_bound_seconds):
            record["lower_bound_seconds"] = None
        return record

    @classmethod
    def from_data(cls, record: Any, name: str = "the plan") -> Plan:
        """Returns the plan that :meth:`to_data` wrote, simulated and checked again.

        ``name`` stands for the plan in errors. Raises ``PlanFileError`` on anything else.
        """
        try:
            if not isinstance(record, dict) or record.get("format") != FORMAT:
                raise PlanFileError(f"{name} is no plan of autoremat's. Plans are written by Plan.save(path)")
            if (version := record.get("version")) not in READABLE:
                raise PlanFileError(
                    f"{name} has version {version!r} of the format; this autoremat reads {READABLE[0]} to {VERSION}"
                )
            if unknown := sorted(record.keys() - {"format", "version", "graph", *plan_json.SCHEDULE, *FACTS}):
                raise ValueError(f"a plan file has no field {unknown[0]!r}")
            infinite: dict[str, Any] = (
                {"lower_bound_seconds": math.inf} if record.get("lower_bound_seconds", 0.0) is None else {}
            )
            readers = plan_json.CODEC.readers(cls, [fact for fact in FACTS if fact in record and fact not in infinite])
            facts = {fact: read(record[fact]) for fact, read in readers.items()}
            plan = replace(cls.of(*plan_json.decode(record)), **facts, **infinite)
            plan.check()
            return plan
        except PlanFileError:
            raise
        except (ValueError, KeyError, IndexError, TypeError, RecursionError, OverflowError, PlanInvalid) as error:
            raise _holds_no_plan(name, error) from error

    def dumps(self) -> str:
        """Returns the plan with its graph as strict JSON; :meth:`loads` reads it back."""
        return json.dumps(self.to_data(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str, name: str = "the plan") -> Plan:
        """Returns the plan that :meth:`dumps` wrote, as :meth:`from_data` does."""
        try:
            record = json.loads(text, object_pairs_hook=_without_repetition)
        except (ValueError, RecursionError) as error:
            raise _holds_no_plan(name, error) from error
        return cls.from_data(record, name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan with its graph as JSON, for :meth:`load` and for ``options={"plan": path}``.

        Raises ``OSError`` if that fails.
        """
        Path(path).write_text(self.dumps(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Returns the plan that :meth:`save` wrote, simulated and checked again. Raises ``PlanFileError`` on anything else."""
        return cls.loads(read_plan_text(path), os.fspath(path))

    def check(self, graph: Graph | None = None, *, ignores_recompute: bool = False) -> None:
        """Raises ``PlanInvalid`` if the plan breaks a rule of ``graph`` (by default its own).

        It covers the executions and their sequence, the stays, the constraints, the simulated bytes, the budgets and the
        bounds. With ``ignores_recompute``, values may be saved that constraints recompute, as in the baseline.
        """
        graph = graph or self.graph
        check_executions(graph, self.schedule)
        check_stays(graph, self.schedule)
        if not ignores_recompute:
            check_constraints(graph, self.schedule.saved(graph))
        check_figures(self.timeline, simulate(graph, self.schedule))
        bounds = (self.budget_bytes or 0, self.host_budget_bytes or 0, self.lower_bound_bytes, self.lower_bound_seconds)
        if not all(figure >= 0 for figure in bounds):
            raise PlanInvalid("the budgets and the bounds must be numbers of at least 0")
        if self.lower_bound_bytes > self.peak_bytes:
            least = self.lower_bound_bytes
            raise PlanInvalid(f"no plan has a lower peak than {least} bytes, it says, but its own is {self.peak_bytes}")


def _holds_no_plan(name: str, error: Exception) -> PlanFileError:
    return PlanFileError(f"{name} holds no valid plan: {type(error).__name__}: {error}")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs of a JSON object as a dict. Raises ``ValueError`` for a key that stands there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def read_plan_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a plan file. Raises ``PlanFileError`` if it cannot be read."""
    try:
        return read_regular_text(path)
    except (OSError, ValueError) as error:  # OSError: no such file; ValueError: no UTF-8 text, or an impossible file name
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlanFileError(f"the plan {os.fspath(path)!r} cannot be read: {reason}") from error
