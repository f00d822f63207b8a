"""Defines plans: a schedule with its simulation, its cost and its lower bounds."""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from autoremat.basics.display import PlainTable, Shown, named_figures
from autoremat.basics.errors import PlanInvalid
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.cost.durations import ROUNDING, durations, stalls_of, traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Role
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.live_ranges import NOT_COMPUTED
from autoremat.planner.memory.simulator import Timeline, simulate, sizes_on_device
from autoremat.planner.plans import plan_json


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
        """The numbers of the ops in sequence."""
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
        return tuple(self.sequence[position] for position in self.schedule.repetitions(self.graph))

    @cached_property
    def recompute_seconds(self) -> float:
        """Seconds that recomputation adds to the step, by the cost model."""
        return sum(map(traffic_of(self.graph).recompute_seconds.__getitem__, self.recomputed))

    @cached_property
    def stall_seconds(self) -> float:
        """Seconds that the step waits for transfers of stays, by the cost model."""
        return sum(stalls_of(self.graph, self.schedule))

    @cached_property
    def added_seconds(self) -> float:
        """Seconds that recomputation and stalls add to the step, by the cost model."""
        return self.recompute_seconds + self.stall_seconds

    @cached_property
    def cost_seconds(self) -> float:
        """Seconds by which plans are compared: those added, and the memory traffic of saved and of materialised tensors."""
        traffic = traffic_of(self.graph)
        materialised = sum(map(traffic.materialise_seconds, self.schedule.materialised))
        return self.added_seconds + float(traffic.saving_seconds[list(self.saved)].sum()) + materialised

    @cached_property
    def predicted_seconds(self) -> float:
        """Predicted seconds of the whole step under the plan: its kernels as fused, with recomputation, and its stalls."""
        return float(durations(self.graph, self.schedule).sum()) + self.stall_seconds

    @cached_property
    def gap(self) -> float:
        """The cost above the lower bound, as a share of the step at the least possible cost; infinite if no plan fits."""
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
        if self.cost_seconds <= self.lower_bound_seconds * (1 + ROUNDING) + self.graph.step_seconds * ROUNDING:
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
            ("materialised", f"{len(self.schedule.materialised)} results of the backward that fusion would inline"),
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
        live_ranges = [one for one in self.timeline.live_ranges if one.computed_at != NOT_COMPUTED]
        num_forward = len(self.schedule.forward)
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

    def to_data(self) -> dict[str, Any]:
        """Returns the plan with its graph as JSON data without infinite numbers; :meth:`from_data` reads it back."""
        return plan_json.encode(self.graph, self.schedule, plan_json.changed(self, plan_json.FACTS))

    @classmethod
    def from_data(cls, record: Any, name: str = "the plan") -> Plan:
        """Returns the plan that :meth:`to_data` wrote, simulated and checked again.

        ``name`` stands for the plan in errors. Raises ``PlanFileError`` on anything else.
        """
        with plan_json.errors_of(name):
            graph, schedule, facts = plan_json.decode(record, name)
            plan = replace(cls.of(graph, schedule), **facts)
            plan.check()
        return plan

    def dumps(self) -> str:
        """Returns the plan with its graph as strict JSON; :meth:`loads` reads it back."""
        return json.dumps(self.to_data(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str, name: str = "the plan") -> Plan:
        """Returns the plan that :meth:`dumps` wrote, as :meth:`from_data` does."""
        return cls.from_data(plan_json.parse(text, name), name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan with its graph as JSON, for :meth:`load` and for ``options={"plan": path}``.

        Raises ``OSError`` if that fails.
        """
        Path(path).write_text(self.dumps(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Returns the plan that :meth:`save` wrote, simulated and checked again. Raises ``PlanFileError`` on anything else."""
        return cls.loads(plan_json.read_text(path), os.fspath(path))

    def check(self, graph: Graph | None = None, *, ignores_recompute: bool = False) -> None:
        """Raises ``PlanInvalid`` if the plan breaks a rule of ``graph`` (by default its own).

        With ``ignores_recompute``, values may be saved that constraints recompute, as in the baseline.
        """
        graph = graph or self.graph
        check_executions(graph, self.schedule)
        crossing = set() if ignores_recompute else set(self.schedule.saved(graph)).difference(graph.forward_outputs)
        for value in sorted(crossing):
            op = graph.ops[graph.makers[value]]
            if op.constraint is Constraint.RECOMPUTE and op.rematerializable:
                raise PlanInvalid(f"{op.name} is to be recomputed, but {graph.values[value].name} is saved for the backward")
        anew = simulate(graph, self.schedule)  # refuses stays that break a rule
        for what, figure, own in (
            ("peak is", anew.peak_bytes, self.peak_bytes),
            ("bytes on the host are", anew.host_bytes, self.host_bytes),
        ):
            if figure != own:
                raise PlanInvalid(f"the {what} {figure} bytes, not {own} as the plan says")
        if self.timeline.schedule != self.schedule or not np.array_equal(self.timeline.bytes_at, anew.bytes_at):
            raise PlanInvalid("the timeline is that of another schedule")
        bounds = (self.budget_bytes or 0, self.host_budget_bytes or 0, self.lower_bound_bytes, self.lower_bound_seconds)
        if not all(figure >= 0 for figure in bounds):
            raise PlanInvalid("the budgets and the bounds must be numbers of at least 0")
        if self.lower_bound_bytes > self.peak_bytes:
            least = self.lower_bound_bytes
            raise PlanInvalid(f"no plan has a lower peak than {least} bytes, it says, but its own is {self.peak_bytes}")


# -- the rules of schedules that a simulation does not need ----------------------------------------------------------------


def check_executions(graph: Graph, schedule: Schedule) -> None:
    """Raises ``PlanInvalid`` if the executions or their sequence break a rule."""
    if schedule.sequence != schedule.forward + schedule.backward or (graph.single_phase and schedule.backward):
        raise PlanInvalid("the executions are not those of the graph's halves")
    own = [op for op in schedule.backward if not 0 <= op < graph.num_forward]
    if own != list(range(graph.num_forward, len(graph.ops))):
        raise PlanInvalid("the backward's own ops do not all run once, in the graph's sequence")
    if any(not 0 <= op < graph.num_forward for op in schedule.forward):
        raise PlanInvalid("the forward runs an op that is not its own")
    results = {value for index in own for value in graph.made[index]}
    if (found := list(schedule.materialised)) != sorted(results.intersection(found)):
        raise PlanInvalid(f"the materialised values are not results of the backward's own ops, ascending: {found}")
    if lacking := graph.required_forward - set(schedule.forward):
        raise PlanInvalid(f"the forward lacks {[graph.ops[op].name for op in sorted(lacking)]}")
    made = {v for v, value in enumerate(graph.values) if value.role is not Role.COMPUTED}
    ran: set[int] = set()
    furthest = -1
    for position, index in enumerate(schedule.sequence):
        op, in_forward = graph.ops[index], position < len(schedule.forward)
        if index in ran and in_forward and not graph.single_phase:
            raise PlanInvalid(f"{op.name} runs twice in the forward, which repeats no op")
        if (index in ran or op.forward != in_forward) and not op.may_run_again:
            once, again = f"may not run twice ({op.traits.name})", "is to be saved, but runs twice or in the backward"
            raise PlanInvalid(f"{op.name} {again if op.rematerializable else once}")
        if missing := [graph.values[v].name for v in op.inputs if v not in made]:
            raise PlanInvalid(f"{op.name} reads {missing} before it is computed")
        if index not in ran and index < furthest and in_forward:
            raise PlanInvalid(f"{op.name} runs for the first time after {graph.ops[furthest].name}, out of order")
        furthest = max(furthest, index)
        ran.add(index)
        made.update(op.outputs)
    if unmade := [graph.values[v].name for v in graph.backward_outputs if v not in made]:
        raise PlanInvalid(f"the outputs {unmade} are never computed")
