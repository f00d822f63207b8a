"""Fixed policies to compare plans with. Their saved tensors do not depend on the budget."""

from __future__ import annotations

import math
from collections.abc import Callable

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.graph.segments import Chain
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.single_phase import bounds_of, joined, outcome, steps_of, without_recomputation

Policy = Callable[[Graph], Plan]
"""Returns a plan for a training step."""


def save_all(graph: Graph) -> Plan:
    """Returns the plan that recomputes only what constraints demand, each value from its producer's saved inputs."""
    return Plan.of(graph, build_schedule(graph, frozenset(graph.forward_values) - _must_be_recomputed(graph)), "save all")


def recompute_all(graph: Graph) -> Plan:
    """Returns the plan that recomputes every op that may run again, once, just before its first use in the backward."""
    return Plan.of(graph, build_schedule(graph, must_be_saved(graph)), "recompute all")


def save_cuts(graph: Graph) -> Plan:
    """Returns the plan of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).

    The number of segments is about the square root of the number of forward ops. Values that cross a cut and long-range values
    are saved, unless a constraint forbids it. The inside of a segment is recomputed when the backward reaches the segment.
    """
    chain = Chain.of(graph)
    segments, _ = chain.segments(max(1, round(math.sqrt(graph.num_forward))))
    saved = must_be_saved(graph) | ((segments.kept | chain.long_range) - _must_be_recomputed(graph))
    return Plan.of(graph, build_schedule(graph, saved, segments), f"{segments.count} segments")


def must_be_saved(graph: Graph) -> frozenset[int]:
    """Returns the forward values that cannot be recomputed, and those that the caller holds in any plan."""
    ops = graph.ops[: graph.num_forward]
    single = {v for op in ops if not op.rematerializable or op.constraint is Constraint.SAVE for v in op.outputs}
    return frozenset(single.union(graph.forward_outputs))


def _must_be_recomputed(graph: Graph) -> frozenset[int]:
    """Returns the forward values that a constraint forbids to save. The caller holds outputs of the forward in any plan."""
    ops = graph.ops[: graph.num_forward]
    ordered = {v for op in ops if op.rematerializable and op.constraint is Constraint.RECOMPUTE for v in op.outputs}
    return frozenset(ordered.difference(graph.forward_outputs))


def solve(graph: Graph, budget: int | None, policy: Policy) -> PlanningResult:
    """Returns the result of ``policy`` for ``graph``. For a single-phase graph, this is the smallest plan over its splits."""
    plans = [joined(graph, policy(step)) for step in steps_of(graph)] or [without_recomputation(graph)]
    smallest = min(plans, key=lambda p: (p.peak_bytes, p.cost_seconds))
    return outcome([smallest], budget, bounds_of(graph), len(plans), interrupted=False)
