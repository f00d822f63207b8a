"""`Plan.check` refuses every schedule that breaks a promise, and the figures of a plan are what they say."""

from __future__ import annotations

import dataclasses

import pytest
from strategies import GraphBuilder, chain

from autoremat.errors import PlanInvalid
from autoremat.graph import Graph, Order, Trait
from autoremat.memory import Timeline
from autoremat.plans import Plan
from autoremat.schedule import Schedule, build_schedule


def unsimulated(graph: Graph, schedule: Schedule) -> Plan:
    """A plan for a schedule that the simulator itself might refuse."""
    return Plan(graph, schedule, Timeline(graph, schedule, (), ()))  # type: ignore[arg-type]


def network() -> Graph:
    return chain(3, forward_outputs=(3,))


def test_a_good_plan_passes():
    graph = network()
    for saved in ((), (1,), (1, 2, 3)):
        Plan.of(graph, build_schedule(graph, saved)).check()


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ((0, 1, 2), (3, 4), "do not all run once, in order"),
        ((0, 1, 2), (4, 3, 5), "do not all run once, in order"),
        ((0, 1, 2), (3, 4, 4, 5), "do not all run once, in order"),
        ((0, 1), (2, 3, 4, 5), "the forward lacks"),
        ((0, 2, 1), (3, 4, 5), "reads .* before it is made"),
        ((1, 0, 2), (3, 4, 5), "reads .* before it is made"),
    ],
)
def test_a_broken_schedule_is_refused(forward, backward, message):
    with pytest.raises(PlanInvalid, match=message):
        unsimulated(network(), Schedule(forward, backward)).check()


def test_a_backward_op_in_the_forward_is_refused():
    with pytest.raises(PlanInvalid):
        unsimulated(network(), Schedule((0, 1, 2, 3), (3, 4, 5))).check()


@pytest.mark.parametrize("trait", [Trait.RANDOM, Trait.MUTATING, Trait.COLLECTIVE, Trait.READS_MUTATED_INPUT])
def test_running_twice_what_may_run_once_is_refused(trait):
    graph = network()
    ops = (dataclasses.replace(graph.ops[0], traits=trait), *graph.ops[1:])
    graph = dataclasses.replace(graph, ops=ops)
    Plan.of(graph, build_schedule(graph, (1, 2, 3))).check()
    with pytest.raises(PlanInvalid, match=rf"op0 may not run twice \({trait.name}\)"):
        Plan.of(graph, build_schedule(graph, (2, 3))).check()


def test_recomputing_what_is_ordered_to_be_saved_is_refused():
    graph = network()
    graph = dataclasses.replace(graph, ops=(dataclasses.replace(graph.ops[0], order=Order.SAVE), *graph.ops[1:]))
    with pytest.raises(PlanInvalid, match="op0"):
        Plan.of(graph, build_schedule(graph, ())).check()


def test_figures_of_a_plan():
    build = GraphBuilder()
    a = build.op([build.source(1)], 100, seconds=2.0)
    b = build.op([a], 10, seconds=0.5)
    gradient = build.op([a, b], 1, forward=False)
    graph = build.graph(forward_outputs=(b,), backward_outputs=(gradient,), saving_seconds_per_byte=1e-3)
    plan = Plan.of(graph, build_schedule(graph, (b,)), "label")
    assert (plan.saved, plan.saved_bytes, plan.recomputed) == ((b,), 10, (0,))
    assert plan.added_seconds == 2.0
    assert plan.cost_seconds == pytest.approx(2.0 + 10e-3)
    # forward: a, then a and b; backward: b, the new a; then the gradient besides
    assert plan.timeline.bytes_at.tolist() == [100, 110, 110, 111]
    assert (plan.peak_bytes, plan.label) == (111, "label")
