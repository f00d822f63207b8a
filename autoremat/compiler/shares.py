"""The share of one graph in the budget of a step: the conditions that the plan of the graph must meet."""

from __future__ import annotations

from collections.abc import Callable

from autoremat.compiler.headroom import with_code
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.planner.multigraph.fronts import point_of
from autoremat.planner.multigraph.ledger import PlanPoint, Share
from autoremat.planner.plans.plan import Plan


def slacks(plan: Plan, priced: PricedGraph, context: PlanningContext, share: Share) -> dict[bool, int]:
    """Returns the bytes by which each half of ``plan`` stays below ``share``, by ``is_backward``."""
    point = counted(plan, priced, context, share)
    limits = {False: share.forward_peak_bytes, True: share.backward_peak_bytes}
    return {half: limit - point.peak_bytes(half) for half, limit in limits.items()}


def _point(plan: Plan, priced: PricedGraph, share: Share) -> PlanPoint:
    return point_of(plan, priced.kept_inputs, share.known) if share.borders else point_of(plan)


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
