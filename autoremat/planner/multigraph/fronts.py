"""Plans of one graph as points in the ledger of a step."""

from __future__ import annotations

from collections.abc import Collection

from autoremat.planner.graph.graph import Graph
from autoremat.planner.memory.simulator import sizes_on_device
from autoremat.planner.multigraph.ledger import PlanPoint
from autoremat.planner.plans.plan import Plan


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
