"""The front of one graph: its plans, from the fastest to the leanest, as points of a step's ledger."""

from __future__ import annotations

from collections.abc import Collection

from autoremat.planner.graph.graph import Graph
from autoremat.planner.multigraph.ledger import PlanPoint, pareto
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner


def border_bytes(plan: Plan, kept_inputs: Collection[int]) -> int:
    """Bytes that ``plan`` keeps alive until the backward of what lies on the graph's borders: inputs among ``kept_inputs``
    that the backward reads, and outputs that it reads."""
    graph = plan.graph
    read = {v for op in plan.schedule.backward for v in graph.ops[op].inputs}
    inputs = sum(graph.values[v].bytes for v in read.intersection(kept_inputs))
    return inputs + sum(graph.values[v].bytes for v in set(plan.saved).intersection(graph.forward_outputs))


def output_bytes(graph: Graph) -> int:
    """Bytes of what the forward makes and returns to its caller."""
    return sum(graph.values[v].bytes for v in graph.forward_outputs)


def point_of(plan: Plan, kept_inputs: Collection[int] | None = None) -> PlanPoint:
    """``plan`` in the ledger of a step.

    With ``kept_inputs`` (values that are inputs of the graph, but not parameters), what the plan keeps alive on the graph's
    borders counts as saved by it: so it is in a ledger of what was measured, from which it may have been absent. Without them
    the outputs of an open call are among what no plan decides.
    """
    outputs = set(plan.graph.forward_outputs)
    inside = sum(plan.graph.values[v].bytes for v in plan.saved if v not in outputs)
    border = 0 if kept_inputs is None else border_bytes(plan, kept_inputs)
    levels, num_forward = plan.timeline.bytes_at, len(plan.schedule.forward)
    forward, backward = (int(half.max(initial=0)) for half in (levels[:num_forward], levels[num_forward:]))
    return PlanPoint(plan.cost_seconds, inside + border, forward, backward + border)


def front_of(planner: Planner, kept_inputs: Collection[int] | None = None) -> tuple[PlanPoint, ...]:
    """The plans that ``planner`` finds for a graph that shares its budget with others, fastest first."""
    return pareto(point_of(plan, kept_inputs) for plan in planner.search.spread_out())
