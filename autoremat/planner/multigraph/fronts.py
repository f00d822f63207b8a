"""The Pareto front of one graph: its plans, fastest first, as points in the ledger of a step."""

from __future__ import annotations

from collections.abc import Collection

from autoremat.planner.graph.graph import Graph
from autoremat.planner.multigraph.ledger import PlanPoint, pareto
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner


def border_bytes(plan: Plan, kept_inputs: Collection[int]) -> int:
    """Returns the bytes at the borders of the graph that ``plan`` keeps live until its backward.

    They are the inputs among ``kept_inputs`` and the forward outputs that the backward reads.
    """
    graph = plan.graph
    read = {v for op in plan.schedule.backward for v in graph.ops[op].inputs}
    inputs = sum(graph.values[v].bytes for v in read.intersection(kept_inputs))
    return inputs + sum(graph.values[v].bytes for v in set(plan.saved).intersection(graph.forward_outputs))


def output_bytes(graph: Graph) -> int:
    """Returns the bytes of the values that the forward allocates and returns to its caller."""
    return sum(graph.values[v].bytes for v in graph.forward_outputs)


def point_of(plan: Plan, kept_inputs: Collection[int] | None = None) -> PlanPoint:
    """Returns ``plan`` as a point in the ledger of a step.

    ``kept_inputs`` are inputs of the graph that are no parameters. If they are given, values at the graph's borders that the
    plan keeps live count as saved. A ledger of measured memory needs this, because the measurement may lack these values. If
    they are not given, the outputs of an open call belong to the bytes that no plan controls.
    """
    outputs = set(plan.graph.forward_outputs)
    inside = sum(plan.graph.values[v].bytes for v in plan.saved if v not in outputs)
    border = 0 if kept_inputs is None else border_bytes(plan, kept_inputs)
    levels, num_forward = plan.timeline.bytes_at, len(plan.schedule.forward)
    forward, backward = (int(half.max(initial=0)) for half in (levels[:num_forward], levels[num_forward:]))
    return PlanPoint(plan.cost_seconds, inside + border, forward, backward + border)


def front_of(planner: Planner, kept_inputs: Collection[int] | None = None) -> tuple[PlanPoint, ...]:
    """Returns the Pareto front of the plans that ``planner`` finds for a graph that shares its budget, fastest first."""
    return pareto(point_of(plan, kept_inputs) for plan in planner.search.spread_out())
