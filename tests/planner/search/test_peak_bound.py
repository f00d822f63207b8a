"""No plan has a peak below the lower bound, whatever it recomputes: random schedules, brute force, and cases by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import least_added_seconds
from strategies import GraphBuilder, dags, graphs, schedules_of, training_chain

from autoremat.planner.graph.op import Kind, Role
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.peak_bound import PeakBound


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_schedule_has_a_peak_below_the_bound(data):
    graph = data.draw(graphs(max_ops=16))
    bound = PeakBound(graph).peak_bytes()
    for _ in range(4):
        assert bound <= Plan.of(graph, data.draw(schedules_of(graph))).peak_bytes


@settings(max_examples=40, deadline=None)
@given(dags(max_ops=8, single_phase=False))
def test_the_bound_is_at_most_the_least_peak_of_all_plans(graph):
    if graph.forward_outputs:
        return  # the oracle knows no caller that holds them
    bound = PeakBound(graph).peak_bytes()
    assert bound == 0 or least_added_seconds(graph, bound - 1) == float("inf")


def test_the_bound_of_a_chain_is_its_least_peak():
    graph = training_chain(4, size=100)
    bound = PeakBound(graph).peak_bytes()
    assert least_added_seconds(graph, bound) < float("inf")
    assert least_added_seconds(graph, bound - 1) == float("inf")


def test_a_gradient_for_later_counts_at_every_op_until_then():
    """The first gradient waits for the last op, beside the large operands of the op between. The largest op alone has 300."""
    build = GraphBuilder()
    x = build.source(0)
    out = build.op([x], 0)
    early = build.op([build.source(0, Role.TANGENT)], 50, forward=False)
    large = build.op([x, early], 100, forward=False)
    larger = build.op([large], 200, forward=False)
    last = build.op([larger, early], 0, forward=False)
    graph = build.graph(forward_outputs=(out,), backward_outputs=(last,))
    assert PeakBound(graph).peak_bytes() == 350


def test_what_fusion_inlines_keeps_its_inputs():
    """The sum of two gradients is inlined into its one reader, so both wait for it, and no half of their bytes is enough."""
    build = GraphBuilder()
    out = build.op([build.source(0)], 0)
    tangent = build.source(0, Role.TANGENT)
    first, second = (build.op([tangent], 100, forward=False) for _ in range(2))
    total = build.op([first, second], 100, forward=False, kind=Kind.POINTWISE)
    wide = build.op([tangent], 1000, forward=False)
    last = build.op([total, wide], 0, forward=False, kind=Kind.REDUCTION)
    graph = build.graph(forward_outputs=(out,), backward_outputs=(last,), fuses=True)
    assert PeakBound(graph).peak_bytes() == 1200
