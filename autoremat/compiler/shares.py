"""The share of one graph in the budget of a step: the conditions that its plan must meet, and the bytes of its code."""

from __future__ import annotations

from collections.abc import Callable

from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.compiler.replay_context import code_headroom_bytes, copies_for_cuda_graphs_bytes, held_too_long_bytes
from autoremat.planner.multigraph.fronts import point_of
from autoremat.planner.multigraph.ledger import PlanPoint, Share
from autoremat.planner.plans.plan import Plan


def slacks(plan: Plan, priced: PricedGraph, context: PlanningContext, share: Share) -> dict[bool, int]:
    """Returns the bytes by which each half of ``plan`` stays below ``share``, by ``is_backward``."""
    point = counted(plan, priced, context, share)
    limits = {False: share.forward_peak_bytes, True: share.backward_peak_bytes}
    return {half: limit - point.peak_bytes(half) for half, limit in limits.items()}


def _point(plan: Plan, priced: PricedGraph, share: Share) -> PlanPoint:
    return point_of(plan, priced.kept_inputs, share.known)


def counted(plan: Plan, priced: PricedGraph, context: PlanningContext, share: Share) -> PlanPoint:
    """Returns the point of ``plan`` that must keep to the limits of ``share``, which were made for points with code."""
    return with_code(_point(plan, priced, share), priced, context)


def acceptance(priced: PricedGraph, context: PlanningContext) -> Callable[[Plan], bool] | None:
    """Returns the condition that plans must meet beside the peak; None if there is none."""
    share = priced.step_share(context.request.limits)
    if share is None:
        return None

    def holds(plan: Plan) -> bool:
        return share.holds(counted(plan, priced, context, share), context.extra_headroom_bytes)

    return holds


def bytes_at_borders(plan: Plan, priced: PricedGraph, share: Share) -> int:
    """Returns the bytes at the borders of the graph that ``share`` counts in the backward's peak, beside those of the graph."""
    return _point(plan, priced, share).backward_peak_bytes - point_of(plan).backward_peak_bytes


def headroom_of(priced: PricedGraph, context: PlanningContext) -> int:
    """Returns the bytes to keep free of the budget: those of generated code, and tensors that a collective holds too long.

    Generated code also makes copies into the memory of CUDA graphs.
    """
    captured, held = priced.captured, held_too_long_bytes(priced.captured)
    if not context.request.fuses:
        return held
    return held + code_headroom_bytes(captured.graph) + copies_for_cuda_graphs_bytes(captured, priced.kept_inputs)


def with_code(point: PlanPoint, priced: PricedGraph, context: PlanningContext) -> PlanPoint:
    """Returns ``point`` with the bytes that generated code may need beside its buffers."""
    return point.with_more(headroom_of(priced, context))
