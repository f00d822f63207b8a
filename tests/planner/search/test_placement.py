"""Placement: stays that make a schedule fit, where they belong, and without waiting where the link is fast enough."""

import dataclasses

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import GraphBuilder, chain, changed, graphs, saved_sets, with_forms

from autoremat.planner.graph.op import Engine, Form, Kind, Role, Transfer
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan
from autoremat.planner.search.placement import place


def on_host(seconds: float, size: int = 10) -> Form:
    return Form("host", Transfer(Engine.TO_HOST, seconds), Transfer(Engine.FROM_HOST, seconds), host_bytes=size)


def placed(grouped: GroupedPlan, budget: int, host_bytes: int | None = None) -> Plan:
    found = place(grouped, Limits(budget, host_bytes))
    assert found is not None
    found.check()
    assert found.peak_bytes <= budget
    return found


def test_a_store_ends_in_the_backward_where_memory_is_needed_there_alone():
    def plan(in_flight: int) -> Plan:
        build = GraphBuilder()
        kept = build.op([build.source(0)], 10)
        loss = build.op([kept], 0)
        gradient = build.source(0, Role.TANGENT)
        for size in (0, 0, 10, 0, 0, 0, 0):
            gradient = build.op([loss, gradient], size, forward=False)
        last = build.op([kept, gradient], 0, forward=False)
        build.values[kept] = dataclasses.replace(build.values[kept], forms=(on_host(3.0),))
        graph = build.graph(backward_outputs=(last,), in_flight=in_flight)
        return placed(GroupedPlan(Plan.of(graph, build_schedule(graph, graph.backward_needs))), 10)

    # Computed by execution 0, copied during 1 to 3. Execution 4 needs the memory until the end of 5, and 9 the value.
    (stay,) = plan(in_flight=1).schedule.stays
    assert (stay.store, stay.free, plan(in_flight=1).stall_seconds) == (0, 3, 0.0)
    # Other calls hold what the backward frees, so the step waits at the end of the forward.
    (stay,) = plan(in_flight=2).schedule.stays
    assert (stay.free, plan(in_flight=2).stall_seconds) == (1, 2.0)


def test_no_more_values_are_stored_than_the_host_holds():
    graph = with_forms(chain(8, size=10), lambda size: (on_host(0.5),))
    grouped = GroupedPlan(Plan.of(graph, build_schedule(graph, graph.forward_values)))
    assert len(placed(grouped, 60).schedule.stays) == 3
    assert place(grouped, Limits(60, 29)) is None
    assert placed(grouped, 70, 20).host_bytes == 20


def test_transfers_divide_no_fused_kernel():
    build = GraphBuilder()
    x = build.op([build.source(0)], 10, kind=Kind.EXTERN)
    for _ in range(3):
        for _ in range(3):
            y = build.op([x], 10, kind=Kind.POINTWISE)
            x = build.op([x, y], 10, kind=Kind.POINTWISE)
        x = build.op([x], 10, kind=Kind.EXTERN)
    gradient = build.source(0, Role.TANGENT)
    saved = [value for op in build.ops if op.kind is Kind.EXTERN for value in op.outputs]
    for value in reversed(saved):
        gradient = build.op([value, gradient], 0, forward=False, kind=Kind.POINTWISE)
        gradient = build.op([gradient], 0, forward=False, kind=Kind.EXTERN)
    build.values[saved[0]] = dataclasses.replace(build.values[saved[0]], forms=(on_host(0.1),))
    graph = build.graph(backward_outputs=(gradient,), fuses=True)
    plan = Plan.of(graph, build_schedule(graph, frozenset(saved)))
    (stay,) = placed(GroupedPlan(plan), plan.peak_bytes - 5).schedule.stays
    kinds = [graph.ops[op].kind for op in plan.sequence]
    for after in (stay.store, stay.free):
        assert Kind.EXTERN in kinds[after : after + 2]
    for before in (stay.load, stay.need):
        assert Kind.EXTERN in kinds[before - 1 : before + 1]


@settings(max_examples=100, deadline=None)
@given(st.data(), graphs(max_ops=30), st.sampled_from([1, 2]), st.sampled_from([0.95, 0.8, 0.6]))
def test_placed_plans_fit_and_are_valid(data, graph, in_flight, share):
    graph = with_forms(changed(graph, in_flight=in_flight))
    grouped = GroupedPlan(Plan.of(graph, build_schedule(graph, data.draw(saved_sets(graph)))))
    assume(grouped.plan.peak_bytes)
    host_bytes = data.draw(st.sampled_from([None, 300]))
    budget = max(int(share * grouped.plan.peak_bytes), grouped.least_bytes)
    found = place(grouped, Limits(budget, host_bytes))
    if found is not None:
        found.check(ignores_recompute=True)
        assert found.peak_bytes <= budget
        assert host_bytes is None or found.host_bytes <= host_bytes
