"""The search for the least peak: below that of every candidate, never below the bound, and used for budgets in between."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GraphBuilder, graphs, training_chain

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role
from autoremat.planner.search.candidates import EVERY_STRATEGY, Strategies
from autoremat.planner.search.least_peak import recreated, relaxed
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.work_limit import WorkLimit


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


def test_a_budget_that_no_candidate_keeps_to_is_met():
    planner = Planner(twice_needed())
    found = planner.find(150)
    assert found.plan is not None
    assert found.plan.peak_bytes == 102
    assert Planner(twice_needed(), strategies=EVERY_STRATEGY & ~Strategies.LOWER).find(150).plan is None
    infeasible = planner.find(101)
    assert (infeasible.plan, infeasible.smallest.peak_bytes, infeasible.lower_bound_bytes) == (None, 102, 102)
    assert infeasible.lower_bound_seconds == math.inf


@settings(max_examples=25, deadline=None)
@given(graphs(max_ops=24))
def test_the_least_peak_is_valid_and_the_same_for_every_budget(graph):
    planner = Planner(graph)
    planner.find(planner.smallest.peak_bytes)
    lowest = planner.lowest
    lowest.check()
    assert planner.moments.peak_bytes() <= lowest.peak_bytes <= planner.smallest.peak_bytes
    assert Planner(graph).lowest.schedule == lowest.schedule
    fitting = Planner(graph).find(lowest.peak_bytes).plan
    assert fitting is not None
    assert fitting.peak_bytes <= lowest.peak_bytes


@pytest.mark.parametrize("length", [6, 24])
def test_the_least_peak_of_a_chain_is_close_to_the_proven_bound(length):
    planner = Planner(training_chain(length, size=100))
    assert planner.lowest.peak_bytes <= planner.search.peak_bound + 100


def uneven_chain(count: int, seed: int) -> Graph:
    """A training step of ``count`` layers of different seconds and bytes. Each layer's gradient reads the layer's input."""
    generator = random.Random(seed)
    edges = [(i, i + 1) for i in range(2 * count - 1)] + [(i, 2 * count - 1 - i) for i in range(count)]
    seconds = [float(generator.randint(1, 9)) for _ in range(2 * count)]
    sizes = [generator.randint(1, 9) * 100 for _ in range(2 * count)]
    return Graph.from_dag(seconds, sizes, edges, num_forward=count)


@pytest.mark.parametrize(("count", "seed", "share"), [(12, 9, 0.5), (16, 1, 0.0), (16, 6, 0.5), (16, 11, 1.0)])
def test_ruin_and_recreate_of_schedules_lowers_the_cost_near_the_least_peak(count, seed, share):
    graph = uneven_chain(count, seed)
    planner = Planner(graph)
    lowest = planner.lowest.peak_bytes
    budget = lowest + int(share * (planner.smallest.peak_bytes - lowest))
    found, without = planner.find(budget), Planner(graph, strategies=EVERY_STRATEGY & ~Strategies.RECREATE).find(budget)
    assert found.plan.peak_bytes <= budget
    assert found.lower_bound_seconds <= found.plan.cost_seconds < 0.95 * without.plan.cost_seconds
    assert found.plan.label == "recreated schedule"
    assert Planner(graph).find(budget).plan.schedule == found.plan.schedule


@settings(max_examples=25, deadline=None)
@given(graphs(max_ops=20), st.floats(0.0, 1.0))
def test_recreated_schedules_fit_and_cost_no_more(graph, share):
    planner = Planner(graph)
    lowest, most = planner.lowest, planner.baseline.peak_bytes
    budget = lowest.peak_bytes + int(share * max(0, most - lowest.peak_bytes))
    start = relaxed(lowest, budget, WorkLimit())
    found = recreated(start, budget, 0.0, WorkLimit(1.0))
    found.check()
    assert found.peak_bytes <= budget
    assert found.cost_seconds <= start.cost_seconds
    assert recreated(start, budget, 0.0, WorkLimit(1.0)).schedule == found.schedule
    assert recreated(start, budget, start.cost_seconds, WorkLimit(1.0)) is start


def test_a_larger_budget_of_the_same_planner_knows_the_recreated_schedule():
    graph = uneven_chain(12, 6)
    planner = Planner(graph)
    cost = planner.find(2400).plan.cost_seconds
    assert Planner(graph).find(2500).plan.cost_seconds > cost
    assert planner.find(2500).plan.cost_seconds <= cost
