"""The code headroom of a graph: bytes that stay free of the budget for its generated code."""

from __future__ import annotations

from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.compiler.replay_context import code_headroom_bytes, copies_for_cuda_graphs_bytes, held_too_long_bytes
from autoremat.planner.multigraph.ledger import PlanPoint


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
