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
    point = counted(plan, priced, context)
    limits = {False: share.forward_peak_bytes, True: share.backward_peak_bytes}
    return {half: limit - point.peak_bytes(half) for half, limit in limits.items()}


def counted(plan: Plan, priced: PricedGraph, context: PlanningContext) -> PlanPoint:
    """Returns ``plan`` as a point in the ledger of its step, with the bytes that generated code may need beside its buffers."""
    return point_of(plan, priced.kept_inputs).with_more(headroom_of(priced, context))


def acceptance(priced: PricedGraph, context: PlanningContext) -> Callable[[Plan], bool] | None:
    """Returns the condition that plans must meet beside the peak; None if there is none."""
    share = priced.step_share(context.request.limits)
    if share is None:
        return None

    def holds(plan: Plan) -> bool:
        return share.holds(counted(plan, priced, context), context.extra_headroom_bytes)

    return holds


def headroom_of(priced: PricedGraph, context: PlanningContext) -> int:
    """Returns the bytes to keep free of the budget: those of generated code, and tensors that a collective holds too long.

    Generated code also makes copies into the memory of CUDA graphs.
    """
    captured, held = priced.captured, held_too_long_bytes(priced.captured)
    if not context.request.fuses:
        return held
    return held + code_headroom_bytes(captured.graph) + copies_for_cuda_graphs_bytes(captured, priced.kept_inputs)
