"""What a plan must keep to, and the figures of a plan by which it shares a budget with others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

from autoremat.planner.graph.graph import Graph
from autoremat.planner.memory.simulator import sizes_on_device
from autoremat.planner.plans.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class PlanPoint:
    """Seconds and bytes of one plan of a graph, per call. Peaks count from the start of the call's forward."""

    seconds: float
    """Seconds of recomputation and of the traffic of saved tensors, by the cost model."""
    saved_bytes: int
    """Bytes held from the forward to the backward, without the outputs."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    host_bytes: int = 0
    """Bytes that a call holds on the host from its forward to its backward."""

    def peak_bytes(self, backward: bool) -> int:
        return self.backward_peak_bytes if backward else self.forward_peak_bytes

    def with_more(self, peak_bytes: int, saved_bytes: int = 0) -> PlanPoint:
        """Returns the plan with ``peak_bytes`` more in each half, of which it saves ``saved_bytes``."""
        forward, backward = self.forward_peak_bytes + peak_bytes, self.backward_peak_bytes + peak_bytes
        return PlanPoint(self.seconds, self.saved_bytes + saved_bytes, forward, backward, self.host_bytes)


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one graph in the step's budget: limits for the :class:`PlanPoint` of its plan."""

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    host_bytes: int = 0
    """The most bytes that a call may hold on the host."""

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    def less(self, peak_bytes: int) -> Share:
        forward, backward = self.forward_peak_bytes - peak_bytes, self.backward_peak_bytes - peak_bytes
        return replace(self, forward_peak_bytes=forward, backward_peak_bytes=backward)

    def excess_bytes(self, point: PlanPoint) -> int:
        """Returns the bytes by which ``point`` exceeds the limit that it misses most; not positive if it keeps to all."""
        _, *taken = astuple(point)
        excess: int = max(bytes_ - most for bytes_, most in zip(taken, astuple(self), strict=True))
        return excess


@dataclass(frozen=True)
class Limits:
    """What a plan must keep to: the only condition that a search knows. None stands for no limit."""

    peak_bytes: int | None = None
    host_bytes: int | None = None
    """The most bytes on the host in all open calls together."""
    seconds: float | None = None
    """The most predicted seconds of the step."""
    share: Share | None = None
    """The share in the budget of a step of several graphs, which limits each half."""
    kept_inputs: frozenset[int] | None = None
    """The inputs that count as saved against the share: see :func:`point_of`."""

    def keeps_time(self, plan: Plan) -> bool:
        """Returns True if the step under ``plan`` keeps to the seconds."""
        return self.seconds is None or plan.predicted_seconds <= self.seconds

    def keep(self, plan: Plan) -> bool:
        """Returns True if ``plan`` keeps to all limits."""
        return (
            self.keeps_time(plan)
            and (self.peak_bytes is None or plan.peak_bytes <= self.peak_bytes)
            and (self.host_bytes is None or plan.host_bytes <= self.host_bytes)
            and (self.share is None or self.share.excess_bytes(point_of(plan, self.kept_inputs)) <= 0)
        )


UNLIMITED = Limits()


def undominated(items: Iterable[T], costs: Callable[[T], tuple[Any, ...]]) -> list[T]:
    """Returns the items of which no other one has costs that are all at most as high, by ascending costs."""
    found: list[tuple[tuple[Any, ...], T]] = []
    for own, item in sorted(((costs(item), item) for item in items), key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in found):
            found.append((own, item))
    return [item for _, item in found]


# -- a plan in the budget of a step ----------------------------------------------------------------------------------------


def border_values(plan: Plan, kept_inputs: Collection[int]) -> set[int]:
    """Returns the values at the borders of the graph that ``plan`` keeps live until its backward.

    They are the inputs among ``kept_inputs``, and the forward outputs, that the backward reads.
    """
    graph = plan.graph
    read = {v for op in plan.schedule.backward for v in graph.ops[op].inputs}
    return read.intersection(kept_inputs) | set(plan.saved).intersection(graph.forward_outputs)


def border_bytes(plan: Plan, kept_inputs: Collection[int]) -> int:
    """Returns the bytes of the values at the borders of the graph that ``plan`` keeps live until its backward."""
    return sum(plan.graph.values[value].bytes for value in border_values(plan, kept_inputs))


def output_bytes(graph: Graph) -> int:
    """Returns the bytes of the values that the forward allocates and returns to its caller."""
    return sum(graph.values[v].bytes for v in graph.forward_outputs)


def point_of(plan: Plan, kept_inputs: Collection[int] | None = None) -> PlanPoint:
    """Returns ``plan`` as a point in the ledger of a step.

    ``kept_inputs`` are inputs of the graph that are no parameters. If they are given, values at the graph's borders that the
    plan keeps live count as saved, and throughout the backward: something else may hold them, and a measurement may lack them.
    If they are not given, the outputs of an open call belong to the bytes that no plan controls.
    """
    outputs = set(plan.graph.forward_outputs)
    inside = sum(sizes_on_device(plan.graph, plan.schedule, (v for v in plan.saved if v not in outputs)))
    border = 0 if kept_inputs is None else border_bytes(plan, kept_inputs)
    levels, num_forward = plan.timeline.bytes_at, len(plan.schedule.forward)
    forward, backward = (int(half.max(initial=0)) for half in (levels[:num_forward], levels[num_forward:]))
    return PlanPoint(plan.cost_seconds, inside + border, forward, backward + border, plan.timeline.host_bytes)
