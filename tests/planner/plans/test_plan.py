"""`Plan.check` refuses every schedule that breaks a promise, and the figures of a plan are what they say."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from strategies import GraphBuilder

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.plans.plan import Plan, Status


def test_figures_of_a_plan():
    build = GraphBuilder()
    a = build.op([build.source(1)], 100, seconds=2.0)
    b = build.op([a], 10, seconds=0.5)
    gradient = build.op([a, b], 1, forward=False, kind=Kind.REDUCTION)
    graph = build.graph(forward_outputs=(b,), backward_outputs=(gradient,), fuses=True, saving_seconds_per_byte=1e-3)
    plan = Plan.of(graph, build_schedule(graph, (b,)), "label")
    assert (plan.saved, plan.saved_bytes, plan.recomputed) == ((b,), 10, (0,))
    assert plan.added_seconds == 2.0
    assert plan.cost_seconds == pytest.approx(2.0 + 10 * 0.5e-3)  # b is written anyway and read by a fused kernel
    # forward: a, then a and b; backward: b, the new a; then the gradient besides
    assert plan.timeline.bytes_at.tolist() == [100, 110, 110, 111]
    assert (plan.peak_bytes, plan.label) == (111, "label")


def diamond() -> Plan:
    """One phase; value 0 is freed and made again."""
    graph = Graph.from_dag([1.0] * 4, [8, 1, 4, 1], [(0, 1), (1, 2), (2, 3), (0, 3)], outputs=(1,))
    return Plan.of(graph, Schedule((0, 1, 2, 0, 3), ()))


def test_what_is_freed_when():
    assert diamond().frees == ((), (0,), (), (), (2, 0, 3))


@pytest.mark.parametrize(
    ("facts", "status", "gap"),
    [
        ({}, Status.FEASIBLE, 1.0 / 4),
        ({"interrupted": True}, Status.TIME_LIMIT, 1.0 / 4),
        ({"lower_bound_seconds": 1.0, "interrupted": True, "budget_bytes": 14}, Status.OPTIMAL, 0.0),
        ({"lower_bound_seconds": 0.5}, Status.FEASIBLE, 0.5 / 4.5),
        ({"budget_bytes": 13}, Status.INFEASIBLE, 1.0 / 4),
        ({"budget_bytes": 5, "lower_bound_seconds": math.inf}, Status.INFEASIBLE, math.inf),
    ],
)
def test_status_and_gap(facts, status, gap):
    plan = dataclasses.replace(diamond(), **facts)
    assert (plan.status, plan.gap) == (status, pytest.approx(gap))


def test_as_json():
    plan = dataclasses.replace(diamond(), budget_bytes=5, lower_bound_bytes=6, lower_bound_seconds=math.inf)
    assert json.loads(plan.to_json()) == {
        "sequence": [0, 1, 2, 0, 3],
        "ops": ["op0", "op1", "op2", "op3"],
        "peak_bytes": 14,
        "budget_bytes": 5,
        "lower_bound_bytes": 6,
        "added_seconds": 1.0,
        "lower_bound_seconds": None,
        "gap": None,
        "status": "infeasible",
        "live_ranges": [[0, 0, 1], [1, 1, 4], [2, 2, 4], [0, 3, 4], [3, 4, 4]],
        "stays": [],
        "host_bytes": 0,
        "host_budget_bytes": None,
    }


def test_a_plan_is_checked_against_the_graph_that_is_given():
    plan = diamond()
    once = [False, True, True, True]
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    with pytest.raises(PlanInvalid, match="op0 may not run twice"):
        plan.check(Graph.from_dag([1.0] * 4, [8, 1, 4, 1], edges, outputs=(1,), rematerializable=once))
    with pytest.raises(PlanInvalid, match="not 14 as the plan says"):
        plan.check(Graph.from_dag([1.0] * 4, [8, 1, 4, 9], edges, outputs=(1,)))
