"""The Pareto front of one graph: its plans, fastest first, as points in the ledger of a step."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from autoremat.planner.graph.graph import Graph
from autoremat.planner.memory.simulator import sizes_on_device
from autoremat.planner.multigraph.ledger import KnownBorders, PlanPoint, pareto
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.bound_forms import PlanSource


def border_values(plan: Plan, kept_inputs: Collection[int], free: Collection[int]) -> set[int]:
    """Returns the values at the borders of the graph that ``plan`` keeps live until its backward.

    They are the inputs among ``kept_inputs`` without ``free``, and the forward outputs, that the backward reads.
    """
    graph = plan.graph
    read = {v for op in plan.schedule.backward for v in graph.ops[op].inputs}
    return (read.intersection(kept_inputs) - set(free)) | set(plan.saved).intersection(graph.forward_outputs)


def output_bytes(graph: Graph) -> int:
    """Returns the bytes of the values that the forward allocates and returns to its caller."""
    return sum(graph.values[v].bytes for v in graph.forward_outputs)


def point_of(plan: Plan, kept_inputs: Collection[int] | None = None, known: KnownBorders | None = None) -> PlanPoint:
    """Returns ``plan`` as a point in the ledger of a step.

    ``kept_inputs`` are inputs of the graph that are no parameters. If they are given, values at the graph's borders that the
    plan keeps live count as saved. A ledger of measured memory needs this, because the measurement may lack these values. If
    they are not given, the outputs of an open call belong to the bytes that no plan controls.

    If the holders of these values are ``known``, each is live in the backward until its last read. Otherwise something else may
    hold it, and it counts throughout.
    """
    outputs = set(plan.graph.forward_outputs)
    values = plan.graph.values
    inside = sum(sizes_on_device(plan.graph, plan.schedule, (v for v in plan.saved if v not in outputs)))
    kept = set() if kept_inputs is None else border_values(plan, kept_inputs, () if known is None else known.free)
    border = sum(values[v].bytes for v in kept)
    levels, num_forward = plan.timeline.bytes_at, len(plan.schedule.forward)
    forward = int(levels[:num_forward].max(initial=0))
    backward = levels[num_forward:]
    backward = backward + (border if known is None else _until_last_read(plan, kept.difference(known.held_elsewhere)))
    return PlanPoint(plan.cost_seconds, inside + border, forward, int(backward.max(initial=0)), plan.timeline.host_bytes)


def _until_last_read(plan: Plan, kept: Collection[int]) -> np.ndarray:
    """Returns, for each execution of the backward, the bytes of those of ``kept`` that it or a later one reads."""
    graph, schedule = plan.graph, plan.schedule.backward
    last = {v: place for place, op in enumerate(schedule) for v in graph.ops[op].inputs if v in kept}
    live = np.zeros(len(schedule), dtype=np.int64)
    for value, place in last.items():
        live[: place + 1] += graph.values[value].bytes
    return live


def front_of(
    planner: PlanSource, kept_inputs: Collection[int] | None = None, known: KnownBorders | None = None
) -> tuple[PlanPoint, ...]:
    """Returns the Pareto front of the plans that ``planner`` finds for a graph that shares its budget, fastest first."""
    return pareto(point_of(plan, kept_inputs, known) for plan in planner.front())
