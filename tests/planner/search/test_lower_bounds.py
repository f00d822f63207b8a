"""Bounds on time and on peaks hold for every plan, and are close where the optimum is known; filling uses what is free."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from oracles import least_added_seconds, subsets
from strategies import GraphBuilder, close_under_need, graphs, training_chain

from autoremat.planner.graph.op import Kind, Role
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.local_search import LocalSearch
from autoremat.planner.search.lower_bounds import LowerBounds
from autoremat.planner.search.peak_bound import bound_on_peak
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.work_limit import WorkLimit

SMALL_GRAPHS = graphs(max_ops=12)


@settings(max_examples=60)
@given(SMALL_GRAPHS)
def test_no_saved_set_beats_the_bounds(graph):
    bounds, own = LowerBounds(graph), tuple(value for op in graph.ops[graph.num_forward :] for value in op.outputs)
    for number, wanted in enumerate(subsets(graph.forward_values)):
        schedule = build_schedule(graph, close_under_need(graph, set(wanted)))
        plan = Plan.of(graph, replace(schedule, materialised=own[number % 3 :: 2]))
        bound = bounds.within(Limits(plan.peak_bytes))
        assert bound.peak_bytes <= plan.peak_bytes
        if plan.peak_bytes:
            assert bound.seconds <= plan.cost_seconds * (1 + 1e-6) + 1e-9


@settings(max_examples=60)
@given(graphs())
def test_no_plan_of_the_least_peak_beats_the_bounds(graph):
    """Such a plan computes values again between their reads, so the program points behind the start count."""
    planner = Planner(graph)
    for plan in (planner.lowest, planner.smallest):
        if plan.peak_bytes:
            assert planner.bounds.within(Limits(plan.peak_bytes)).seconds <= plan.cost_seconds * (1 + 1e-6) + 1e-9


def test_a_recomputed_result_that_fusion_inlines_counts_behind_the_start():
    """When the wide gradient is live, there is no room for what the narrow one reads later: that is recomputed, inlined or
    not."""
    build = GraphBuilder()
    source, tangent = build.source(0), build.source(0, Role.TANGENT)
    made = build.op([source], 100, seconds=1.0, kind=Kind.POINTWISE)
    loss = build.op([made], 0, seconds=0.1, kind=Kind.EXTERN)
    wide = build.op([tangent], 1000, seconds=0.1, forward=False, kind=Kind.EXTERN)
    narrow = build.op([wide], 0, seconds=0.1, forward=False, kind=Kind.EXTERN)
    gradient = build.op([made, narrow], 0, seconds=0.1, forward=False, kind=Kind.POINTWISE)
    graph = build.graph(forward_outputs=(loss,), backward_outputs=(gradient,), fuses=True)
    planner = Planner(graph)
    assert planner.bounds.within(Limits(1100)).seconds == 0.0
    assert planner.bounds.within(Limits(1050)).seconds == pytest.approx(0.5, rel=1e-3)
    plan = planner.find(Limits(1050)).plan
    assert plan is not None
    assert plan.cost_seconds == pytest.approx(1.0)


def test_the_bound_of_a_chain_is_its_least_peak():
    graph = training_chain(4, size=100)
    bound = bound_on_peak(graph)
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
    assert bound_on_peak(graph) == 350


def test_a_sum_of_gradients_is_a_buffer_where_that_lowers_the_peak():
    """Fusion would inline the sum into its one reader, and both gradients would wait for that beside the wide one."""
    build = GraphBuilder()
    out = build.op([build.source(0)], 0)
    tangent = build.source(0, Role.TANGENT)
    first, second = (build.op([tangent], 100, forward=False) for _ in range(2))
    total = build.op([first, second], 100, forward=False, kind=Kind.POINTWISE)
    wide = build.op([tangent], 1000, forward=False)
    last = build.op([total, wide], 0, forward=False, kind=Kind.REDUCTION)
    graph = build.graph(forward_outputs=(out,), backward_outputs=(last,), fuses=True, saving_seconds_per_byte=1e-9)
    lowest = Planner(graph).lowest
    assert bound_on_peak(graph) == lowest.peak_bytes == 1100
    assert lowest.schedule.materialised == (total,)
    assert LocalSearch(graph, WorkLimit()).fill(lowest, 1200).schedule.materialised == ()
