"""A plan: the schedule that was chosen, with what the simulator and the cost model say of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoremat.errors import PlanInvalid
from autoremat.graph import Graph, Order, Role
from autoremat.memory import Timeline, simulate
from autoremat.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """A schedule for ``graph`` and its simulated timeline."""

    graph: Graph
    schedule: Schedule
    timeline: Timeline
    label: str = ""
    """Which candidate this is, for logs: segments, nesting, price."""

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, label: str = "") -> Plan:
        """Simulate ``schedule``."""
        return cls(graph, schedule, simulate(graph, schedule), label)

    @property
    def peak_bytes(self) -> int:
        """The simulated peak."""
        return self.timeline.peak_bytes

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Values that cross from forward to backward."""
        return self.schedule.saved(self.graph)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that cross from forward to backward."""
        return sum(self.graph.values[v].bytes for v in self.saved)

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Executions of forward ops beyond the first, in order."""
        return self.schedule.recomputed(self.graph)

    @cached_property
    def recompute_seconds(self) -> float:
        """Seconds that the recomputation adds, by the cost model."""
        return sum(self.graph.ops[op].seconds for op in self.recomputed)

    @cached_property
    def cost_seconds(self) -> float:
        """What plans are compared by: recomputation plus the traffic of what is saved."""
        return self.recompute_seconds + self.saved_bytes * self.graph.saving_seconds_per_byte

    def check(self) -> None:
        """Replay the schedule independently of the simulator; raise ``PlanInvalid`` on the first violation.

        Every op runs when it must, nothing that may not be repeated runs twice, every read finds its value, orders hold.
        """
        graph, schedule = self.graph, self.schedule
        if [op for op in schedule.backward if op >= graph.num_forward] != list(range(graph.num_forward, len(graph.ops))):
            raise PlanInvalid("the backward's own ops do not all run once, in order")
        if any(op >= graph.num_forward for op in schedule.forward):
            raise PlanInvalid("the forward runs a backward op")
        if missing := graph.required_forward - set(schedule.forward):
            raise PlanInvalid(f"the forward lacks {[graph.ops[op].name for op in sorted(missing)]}")
        made = {v for v, value in enumerate(graph.values) if value.role is not Role.COMPUTED}
        runs: dict[int, int] = {}
        for index in schedule.sequence:
            op = graph.ops[index]
            runs[index] = runs.get(index, 0) + 1
            if runs[index] > 1 and not op.repeatable:
                raise PlanInvalid(f"{op.name} may not run twice ({op.traits.name})")
            if runs[index] > 1 and op.order is Order.SAVE:
                raise PlanInvalid(f"{op.name} is ordered to be saved but runs twice")
            if unmade := [graph.values[v].name for v in op.inputs if v not in made]:
                raise PlanInvalid(f"{op.name} reads {unmade} before it is made")
            made.update(op.outputs)
