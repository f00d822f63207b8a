"""The local search: plans that fit, cost no more than their starts and keep to the bounds, and the least peak."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from memory_oracle import replay_bytes
from strategies import GraphBuilder, changed, graphs, schedules_of, stays_of, training_chain, with_forms

from autoremat.planner.api import plan
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind, Role
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.live_view import LiveView
from autoremat.planner.search.local_search import LocalSearch
from autoremat.planner.search.moves import Moves, keeps_of
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.starts import Starts
from autoremat.planner.search.work_limit import WorkLimit


@settings(max_examples=60, deadline=None)
@given(graphs(max_ops=20), st.sampled_from([3, 1]), st.data())
def test_the_deltas_of_drops_are_those_of_the_simulator_without_fusion(graph, in_flight, data):
    graph = changed(graph, fuses=False, in_flight=in_flight)
    plan = Starts(graph).save_everything()
    view = LiveView(plan)
    drops = Moves(view)
    executions = range(view.border - 1, len(plan.sequence))
    across, *options = ([drop for found in drops.at(place, 0) for drop in found] for place in executions)
    assert in_flight == 1 or all(set(across) <= set(found) for found in options), "other calls hold these at any execution"
    assume(any(options))
    drops.apply(data.draw(st.sampled_from(sum(options, []))))
    found = Plan.of(graph, view.schedule())
    runs = [place for place in range(len(plan.sequence)) for _ in (*view.inserted.get(place, ()), place)]
    if len(found.schedule.forward) != len(plan.schedule.forward):
        return  # an op that only the backward needs runs there alone now
    again = {value for ops in view.inserted.values() for op in ops for value in graph.made[op]}
    assume(again.isdisjoint((*graph.forward_outputs, *graph.backward_outputs)))  # what is handed out is there twice then
    beside = {place for place, ops in view.inserted.items() for place in (place, *[place + 1][: not ops])}
    for place, level in zip(runs, found.timeline.bytes_at.tolist(), strict=True):
        if place not in beside:
            assert level <= view.bytes_at[place]


@settings(max_examples=60, deadline=None)
@given(graphs(max_ops=20))
def test_schedules_of_moves_are_valid(graph):
    search = LocalSearch(graph, WorkLimit())
    for start in Starts(graph).plans:
        for trial in range(4):
            ruined = search.ruined(start, trial)
            ruined.check()
            assert ruined.peak_bytes == max(replay_bytes(graph, ruined.schedule))
        view = LiveView(start)
        view.removed.update(keep.execution for keep in keeps_of(view)[:1])
        assert Plan.of(graph, view.schedule()).recompute_seconds <= start.recompute_seconds + 1e-9


@settings(max_examples=40, deadline=None)
@given(graphs(max_ops=24), st.floats(0.0, 1.0) | st.just(1.0), st.sampled_from([1, 3]), st.sampled_from([0, 100]))
def test_plans_fit_cost_no_more_than_starts_and_are_found_again(graph, share, in_flight, resident):
    graph = changed(graph, in_flight=in_flight, resident_bytes=resident)
    planner = Planner(graph, 60.0)
    least, most = planner.lowest.peak_bytes, planner.baseline.peak_bytes
    budget = least + int(share * max(0, most - least))
    found = planner.find(Limits(budget))
    assert found.plan is not None
    found.plan.check()
    assert found.plan.peak_bytes <= budget
    assert found.lower_bound_bytes <= found.smallest.peak_bytes
    assert found.lower_bound_seconds <= found.plan.cost_seconds * (1 + 1e-9)
    assert all(found.plan.cost_seconds <= start.cost_seconds for start in planner.plans if start.peak_bytes <= budget)
    assert Planner(graph, 60.0).find(Limits(budget)).plan.schedule == found.plan.schedule


def twice_needed() -> Graph:
    """A step whose backward reads one large value at its start and at its end, with another large one between."""
    build = GraphBuilder()
    x = build.source(0)
    large = build.op([x], 100)
    out = build.op([large], 0)
    first = build.op([large, build.source(0, Role.TANGENT)], 1, forward=False)
    middle = build.op([first], 100, forward=False)
    small = build.op([middle], 1, forward=False)
    last = build.op([large, small], 1, forward=False)
    return build.graph(forward_outputs=(out,), backward_outputs=(last,), saving_seconds_per_byte=0.0)


def test_a_budget_that_no_start_keeps_to_is_met():
    planner = Planner(twice_needed())
    found = planner.find(Limits(150))
    assert found.plan is not None
    assert found.plan.peak_bytes == 102
    assert plan(twice_needed(), 150, solver="min_cut").peak_bytes > 150
    infeasible = planner.find(Limits(101))
    assert (infeasible.plan, infeasible.smallest.peak_bytes, infeasible.lower_bound_bytes) == (None, 102, 102)
    assert infeasible.lower_bound_seconds == math.inf


def test_a_recomputed_extern_kernel_divides_a_fusion_group_where_that_frees_memory():
    build = GraphBuilder()
    large = build.op([build.source(0)], 100)
    gradient = build.op([build.source(0, Role.TANGENT)], 100, forward=False)
    masked = build.op([large, gradient], 100, forward=False, kind=Kind.POINTWISE, in_place=(gradient,))
    last = build.op([large, masked, build.op([masked], 1, forward=False, kind=Kind.REDUCTION)], 1, forward=False)
    # A kernel before the reduction writes over its operand.
    assert Planner(build.graph(backward_outputs=(last,), fuses=True)).lowest.peak_bytes == 202


@settings(max_examples=25, deadline=None)
@given(graphs(max_ops=24))
def test_the_least_peak_is_valid_and_the_same_for_every_budget(graph):
    planner = Planner(graph)
    planner.find(Limits(planner.smallest.peak_bytes))
    lowest = planner.lowest
    lowest.check()
    assert planner.bounds.within().peak_bytes <= lowest.peak_bytes <= planner.smallest.peak_bytes
    assert planner.smallest.peak_bytes <= min(start.peak_bytes for start in planner.plans)
    assert Planner(graph).lowest.schedule == lowest.schedule
    fitting = Planner(graph).find(Limits(lowest.peak_bytes)).plan
    assert fitting is not None
    assert fitting.peak_bytes <= lowest.peak_bytes


@pytest.mark.parametrize("length", [6, 24])
def test_the_least_peak_of_a_chain_is_close_to_the_proven_bound(length):
    planner = Planner(training_chain(length, size=100))
    assert planner.lowest.peak_bytes <= planner.bounds.within().peak_bytes + 100


@settings(max_examples=100, deadline=None)
@given(st.data(), graphs(max_ops=14))
def test_a_plan_with_stays_is_searched_from_too(data, graph):
    graph = with_forms(graph)
    schedule = data.draw(schedules_of(graph))
    plan = Plan.of(graph, replace(schedule, stays=data.draw(stays_of(graph, schedule))))
    bare = Plan.of(graph, schedule)
    assert LiveView(plan).start == LiveView(bare).start  # in ascending sequence
    found = LocalSearch(graph, WorkLimit()).fill(plan, plan.peak_bytes)
    found.check()
    assert found.peak_bytes <= plan.peak_bytes
