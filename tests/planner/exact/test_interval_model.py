"""The event-gap model against the simulator and against brute force, and the search around it."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import least_added_seconds
from strategies import dags, graphs

from autoremat import plan
from autoremat.planner.exact import large_neighborhood
from autoremat.planner.exact.interval_model import IntervalModel, recomputations, recompute_sites
from autoremat.planner.exact.large_neighborhood import Improvement, Incumbent, program_around
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.mip import solve
from autoremat.planner.plans.plan import Plan, Status
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.single_phase import without_recomputation

DEEP = 99


def materialising(graph: Graph) -> Graph:
    return dataclasses.replace(graph, fuses=False)


any_graph = st.one_of(dags(), graphs(max_ops=20, max_outputs=1).map(materialising))


@given(any_graph)
@settings(max_examples=60)
def test_holding_everything_is_the_plan_without_recomputation(graph):
    model = IntervalModel(graph, DEEP)
    chosen = np.maximum(model.nothing_recomputed(), model.lower)
    found = Incumbent.of(model, chosen)
    assert found.plan.added_seconds == 0.0
    assert found.plan.peak_bytes == without_recomputation(graph).peak_bytes
    logic, low, high = model.logic
    assert (logic @ chosen >= low - 1e-9).all()
    assert (logic @ chosen <= high + 1e-9).all()


@given(any_graph, st.sampled_from([0.2, 0.5, 0.8]))
@settings(max_examples=60)
def test_a_plan_said_in_columns_is_the_same_plan_and_counts_no_fewer_bytes(graph, share):
    planner = Planner(graph) if not graph.single_phase else None
    found = planner.find(int(share * planner.baseline.peak_bytes)).smallest if planner else plan(graph, share, "segments")
    # A forward output that is ordered to be recomputed exists twice; the model reads the copy that the caller holds.
    recomputed = {value for index in found.recomputed for value in graph.ops[index].outputs}
    assume(graph.single_phase or recomputed.isdisjoint(graph.forward_outputs))
    model = IntervalModel(graph, 1, recomputations(graph, found.schedule))
    chosen = model.choice(found.schedule)
    logic, low, high = model.logic
    assert (logic @ chosen >= low - 1e-9).all()
    assert (logic @ chosen <= high + 1e-9).all()
    again = Incumbent.of(model, chosen)
    assert sorted(again.plan.recomputed) == sorted(found.recomputed)
    assert (model.bytes_at(chosen) >= again.bytes_at[:-1] - 1e-6).all()


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
    free = np.arange(model.columns)
    program = program_around(model, np.zeros(model.columns), free, np.full(5, 1e6), 1.0)
    solution = solve(program, len(free), seconds=10.0)
    assert solution is not None
    assert Incumbent.of(model, np.round(solution.values[: len(free)])).plan.recomputed == (1,)


def test_skips_across_a_wide_middle_are_recomputed_at_their_readers():
    """The exact model finds that one cheap skip is run again and the dear one held."""
    seconds, sizes = [1.0, 5.0, 1.0, 1.0, 1.0, 1.0], [10, 10, 30, 30, 1, 1]
    graph = Graph.from_dag(seconds, sizes, [(0, 2), (1, 3), (2, 3), (3, 4), (0, 4), (1, 5), (4, 5)])
    peak = without_recomputation(graph).peak_bytes
    found = plan(graph, peak - 5, "ilp")
    assert found.added_seconds == 1.0
    assert found.schedule.recomputed(graph) == (0,)
    assert plan(graph, peak - 5).added_seconds == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7])
def test_the_search_is_repeatable_and_never_loses_a_plan_that_fits(seed, monkeypatch):
    # A busy machine must not cut a neighbourhood short.
    monkeypatch.setattr(
        large_neighborhood, "settings", dataclasses.replace(large_neighborhood.settings, neighborhood_seconds=600.0)
    )
    random = np.random.default_rng(3)
    count = 40
    edges = [(i - 1, i) for i in range(1, count)]
    edges += [(int(a), int(a + d)) for a, d in zip(random.integers(0, 20, 40), random.integers(2, 20, 40), strict=True)]
    graph = Graph.from_dag(random.uniform(0, 10, count).tolist(), random.integers(1, 50, count).tolist(), edges)
    peak = without_recomputation(graph).peak_bytes
    budget = int(0.8 * peak)
    start = plan(graph, budget, "segments")
    schedules = []
    for _ in range(2):
        model = IntervalModel(graph, 3, recomputations(graph, start.schedule))
        search = Improvement(model, budget, peak, seed, time.monotonic() + 600.0)
        search.relax(model.nothing_recomputed())
        plans = search.run(model.choice(start.schedule), 3, lambda plan: False)
        fitting = [p for p in plans if p.peak_bytes <= budget]
        best = min(fitting, key=lambda p: p.cost_seconds)
        assert isinstance(best, Plan)
        best.check()
        assert best.added_seconds <= start.added_seconds
        schedules.append(best.schedule)
    assert schedules[0] == schedules[1]
