"""Annealing and the interval model: their bytes against the simulator, plans against brute force."""

import math
import random
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import dags, graphs, training_chain

from autoremat.planner.exact import interval_model
from autoremat.planner.exact.annealing import Sites, improve
from autoremat.planner.exact.interval_model import IntervalModel, in_order, sites_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.mip import solve
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner, result_of
from autoremat.planner.search.starts import without_recomputation


def schedule_of(sites: Sites) -> Schedule:
    return in_order(sites.graph, [(index, site) for site, ops in enumerate(sites.at) for index in ops])


def bytes_by_simulation(sites: Sites) -> np.ndarray:
    """The most bytes at each site, by the simulator."""
    plan = Plan.of(sites.graph, schedule_of(sites))
    found = np.zeros(sites.end + 1)
    np.maximum.at(found, np.array(sites_of(sites.graph, plan.schedule), dtype=np.int64), plan.timeline.bytes_at)
    return found


def some_pairs(sites: Sites, seed: int) -> list[tuple[int, int]]:
    """Recomputations at places where the result is read, or anywhere later; in the backward, if the graph has one."""
    drawn = random.Random(seed)
    first = 0 if sites.graph.single_phase else sites.graph.num_forward
    pairs = {
        (i, s)
        for i, may in enumerate(sites.movable)
        if may
        for s in range(max(first, i + 1), sites.end)
        if drawn.random() < 0.15
    }
    return sorted(pairs, key=lambda _: drawn.random())


def with_recomputations(graph: Graph, seed: int) -> Sites:
    sites = Sites(graph)
    for index, site in some_pairs(sites, seed):
        sites.add(index, site)
    sites.settle()
    return sites


@given(dags(max_ops=20, single_phase=True), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_the_bytes_at_each_site_are_those_of_the_simulator_and_removals_leave_no_trace(graph, seed):
    sites, fresh = with_recomputations(graph, seed), Sites(graph)
    expected = bytes_by_simulation(sites)
    assert sites.together[:-1] - sites.apart[:-1] == pytest.approx(expected[:-1])
    assert sites.added == pytest.approx(Plan.of(graph, schedule_of(sites)).added_seconds)
    pairs = some_pairs(fresh, seed)
    for index, site in random.Random(seed).sample(pairs, len(pairs)):
        sites.remove(index, site)
    sites.settle()
    assert (sites.together == fresh.together).all()
    assert (sites.apart == fresh.apart).all()
    assert (sites.runs, sites.at, sites.reads) == (fresh.runs, fresh.at, fresh.reads)
    assert sites.added == pytest.approx(0.0, abs=1e-9 * max(graph.step_seconds, 1e-30))


@given(graphs(max_ops=20, fuses=False, max_outputs=2), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_in_a_training_step_no_bytes_are_missed(graph, seed):
    """What the forward need not run is counted there all the same."""
    sites = with_recomputations(graph, seed)
    assert (sites.together[:-1] - sites.apart[:-1] >= bytes_by_simulation(sites)[:-1] - 1e-6).all()


def test_the_deadline_cuts_annealing_short_and_the_outcome_says_so():
    graph = training_chain(60, single_phase=True)
    budget = int(0.7 * without_recomputation(graph).peak_bytes)
    found = improve(graph, budget, 10.0, 0, result_of(without_recomputation(graph), budget), 0.0, time.monotonic())
    assert found.interrupted


@given(graphs(max_ops=25, fuses=False, max_outputs=1), st.sampled_from([0.4, 0.7]))
@settings(max_examples=30, deadline=None)
def test_plans_of_training_steps_are_improved_and_stay_plans(graph, share):
    planner = Planner(graph)
    budget = int(share * planner.baseline.peak_bytes)
    found = planner.find(Limits(budget))
    better = improve(graph, budget, 0.1, 0, found, 0.0, math.inf)
    assert better.lower_bound_seconds == found.lower_bound_seconds
    if found.plan is not None:
        assert better.plan is not None
        assert better.plan.peak_bytes <= budget
        assert better.plan.cost_seconds <= found.plan.cost_seconds
    assert better.smallest.peak_bytes <= found.smallest.peak_bytes


def solved(model: IntervalModel, budget: float) -> np.ndarray:
    """The choice of the columns that costs least within the budget, or has the least excess."""
    program = interval_model._program(model, np.full(len(model.graph.ops), budget), 1e3)
    solution = solve(program, model.columns, seconds=60.0)
    assert solution is not None
    return np.round(solution[: model.columns])


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
    counted = model.memory @ chosen + model.fixed_bytes
    sites = np.array(sites_of(graph, plan.schedule), dtype=np.int64)
    there = sites < len(graph.ops)
    assert (counted[sites[there]] >= plan.timeline.bytes_at[there] - 1e-6).all()
