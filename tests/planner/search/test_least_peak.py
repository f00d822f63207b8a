"""The search for the least peak: below that of every candidate, never below the bound, and used for budgets in between."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from strategies import GraphBuilder, graphs, training_chain

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role
from autoremat.planner.search.candidates import EVERY_STRATEGY, Strategies
from autoremat.planner.search.least_peak import relaxed
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


def test_a_value_that_is_idle_at_the_peak_is_computed_again_later():
    planner = Planner(twice_needed())
    assert planner.smallest.peak_bytes == 201
    assert planner.lowest.peak_bytes == 102
    assert planner.search.peak_bound == 102


def test_a_budget_that_no_candidate_keeps_to_is_met():
    planner = Planner(twice_needed())
    found = planner.find(150)
    assert found.plan is not None
    assert found.plan.peak_bytes == 102
    assert Planner(twice_needed(), strategies=EVERY_STRATEGY & ~Strategies.LOWER).find(150).plan is None
    infeasible = planner.find(101)
    assert (infeasible.plan, infeasible.smallest.peak_bytes, infeasible.lower_bound_bytes) == (None, 102, 102)
    assert infeasible.lower_bound_seconds == math.inf


def test_free_memory_spares_recomputation():
    planner = Planner(training_chain(24, size=100))
    lowest = planner.lowest
    budget = (lowest.peak_bytes + planner.baseline.peak_bytes) // 2
    spared = relaxed(lowest, budget, WorkLimit())
    assert spared.peak_bytes <= budget
    assert spared.cost_seconds < lowest.cost_seconds


@settings(max_examples=25, deadline=None)
@given(graphs(max_ops=24))
def test_the_least_peak_is_valid_and_the_same_for_every_budget(graph):
    planner = Planner(graph)
    planner.find(planner.smallest.peak_bytes)
    lowest = planner.lowest
    lowest.check()
    assert planner.search.peak_bound <= lowest.peak_bytes <= planner.smallest.peak_bytes
    assert Planner(graph).lowest.schedule == lowest.schedule
    fitting = Planner(graph).find(lowest.peak_bytes).plan
    assert fitting is not None
    assert fitting.peak_bytes <= lowest.peak_bytes


@pytest.mark.parametrize("length", [6, 24])
def test_the_least_peak_of_a_chain_is_close_to_the_proven_bound(length):
    planner = Planner(training_chain(length, size=100))
    assert planner.lowest.peak_bytes <= planner.search.peak_bound + 100
