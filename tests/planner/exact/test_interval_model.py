"""The interval model against the simulator and against brute force."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import least_added_seconds
from strategies import dags, graphs

from autoremat import plan
from autoremat.planner.exact import integer_program
from autoremat.planner.exact.interval_model import IntervalModel, recompute_sites, sites_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.mip import solve
from autoremat.planner.plans.plan import Plan, Status
from autoremat.planner.search.single_phase import without_recomputation

DEEP = 99


def solved(model: IntervalModel, budget: float) -> np.ndarray:
    """The choice of the columns that costs least within the budget, or has the least excess."""
    program = integer_program._program(model, np.full(len(model.graph.ops), budget), 1e3)
    solution = solve(program, model.columns, seconds=60.0)
    assert solution is not None
    return np.round(solution.values[: model.columns])


any_graph = st.one_of(dags(), graphs(max_ops=20, fuses=False, max_outputs=1))


@given(any_graph, st.sampled_from([0.2, 0.5, 0.8]))
@settings(max_examples=60, deadline=None)
def test_the_model_counts_no_fewer_bytes_than_the_simulator(graph, share):
    model, budget = IntervalModel(graph, 2), share * without_recomputation(graph).peak_bytes
    assume(model.columns)
    chosen = solved(model, budget)
    plan = Plan.of(graph, model.schedule(chosen))
    # A forward output that is to be recomputed exists twice; the model reads the copy that the caller holds.
    recomputed = {value for index in plan.recomputed for value in graph.ops[index].outputs}
    assume(graph.single_phase or recomputed.isdisjoint(graph.forward_outputs))
    plan.check()
    counted = model.bytes_at(chosen)
    sites = np.array(sites_of(graph, plan.schedule), dtype=np.int64)
    there = sites < len(graph.ops)
    assert (counted[sites[there]] >= plan.timeline.bytes_at[there] - 1e-6).all()


@given(dags(max_ops=7), st.sampled_from([0.5, 0.7, 0.9]))
@settings(max_examples=40, deadline=None)
def test_a_plan_of_the_exact_model_is_never_better_than_brute_force(graph, share):
    budget = int(share * without_recomputation(graph).peak_bytes)
    if graph.step_seconds == 0.0 or budget == 0:
        return
    optimum = least_added_seconds(graph, budget)
    found = plan(graph, budget, "ilp")
    if found.status is Status.INFEASIBLE:
        return
    assert found.added_seconds >= optimum - 1e-6 * graph.step_seconds
    assert not math.isinf(optimum)


@given(any_graph)
@settings(max_examples=40)
def test_sites_come_after_the_op_and_grow_with_depth(graph):
    before = recompute_sites(graph, 1)
    for depth in (2, 3, DEEP):
        after = recompute_sites(graph, depth)
        for index, (few, many) in enumerate(zip(before, after, strict=True)):
            assert few <= many
            assert all(site > index + 1 for site in many)
            if not graph.single_phase:
                assert not many or (graph.ops[index].forward and min(many) >= graph.num_forward)
        before = after


def test_what_is_ordered_to_be_recomputed_does_not_cross_into_the_backward():
    graph = Graph.from_dag([1.0] * 5, [8] * 5, [(0, 1), (0, 2), (1, 4), (2, 3), (3, 4)], num_forward=3)
    ordered = dataclasses.replace(graph.ops[1], constraint=Constraint.RECOMPUTE)
    graph = dataclasses.replace(graph, ops=(graph.ops[0], ordered, *graph.ops[2:]))
    model = IntervalModel(graph, 2)
    crossing = model.hold[1][4]
    assert model.upper[crossing] == 0.0
    assert Plan.of(graph, model.schedule(solved(model, 1e6))).recomputed == (1,)
