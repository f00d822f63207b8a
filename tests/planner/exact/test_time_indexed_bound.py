"""Bounds over many moments hold for every plan, and come close to the optimum where it is known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import least_added_seconds
from scipy.sparse import csr_matrix
from strategies import graphs, training_chain

from autoremat import plan
from autoremat.planner.exact.time_indexed_bound import Stages
from autoremat.planner.graph.graph import Graph
from autoremat.planner.mip import Program, dual_bound, exact_bound, lower_bound, solve
from autoremat.planner.search.planner import Planner

SECONDS = 20.0


def materialising(graph: Graph) -> Graph:
    return dataclasses.replace(graph, fuses=False)


def bound(graph: Graph, budget: int) -> float:
    planner = Planner(graph)
    return Stages(graph, planner.find(budget).plan or planner.search.smallest).seconds(budget, SECONDS)


@st.composite
def training_steps(draw: st.DrawFn) -> Graph:
    """A chain with a skip, and for each of its ops a gradient op, which reads what that made and the gradient behind it."""
    length = draw(st.integers(3, 4))
    count = 2 * length
    edges = {(i, i + 1) for i in range(count - 1)} | {(length - 1 - i, length + i) for i in range(length)}
    edges |= {(0, draw(st.integers(2, length)))}
    figures = st.lists(st.integers(1, 9), min_size=count, max_size=count)
    return Graph.from_dag(draw(figures), draw(figures), sorted(edges), outputs=(count - 1,), num_forward=length)


@given(training_steps(), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_no_sequence_of_executions_beats_the_bound(graph, percent):
    planner = Planner(graph)
    smallest, largest = planner.find(0).smallest.peak_bytes, planner.baseline.peak_bytes
    budget = smallest + (largest - smallest) * percent // 100  # so that some plan fits
    assert bound(graph, budget) <= least_added_seconds(graph, budget) * (1 + 1e-6) + 1e-9


@given(graphs(max_ops=24).map(materialising))
@settings(max_examples=40, deadline=None)
def test_no_candidate_of_the_search_beats_the_bound(graph):
    planner = Planner(graph)
    for budget in {planner.baseline.peak_bytes * percent // 100 for percent in (60, 80)} - {0}:
        found = bound(graph, budget)
        for candidate in planner.search.candidates:
            if candidate.plan.peak_bytes <= budget:
                assert found <= candidate.plan.added_seconds * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("length", [6, 8])
def test_where_ops_must_run_many_times_it_is_the_optimum(length):
    """With room for three values every gradient needs the chain from its start; single moments do not see that."""
    graph = training_chain(length)
    optimum, single = least_added_seconds(graph, 3), Planner(graph).find(3).lower_bound_seconds
    assert single < optimum / 2
    assert bound(graph, 3) == pytest.approx(optimum, rel=1e-3)


def test_auto_reports_the_better_bound():
    graph = training_chain(8)
    assert plan(graph, 3).lower_bound_seconds > 2 * Planner(graph).find(3).lower_bound_seconds


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_any_prices_give_a_valid_bound(seed, height, width):
    random = np.random.default_rng(seed)
    low = random.integers(-3, 1, height).astype(float)
    program = Program(
        csr_matrix(random.integers(-2, 3, (height, width)).astype(float)),
        cost=random.integers(-3, 4, width).astype(float),
        low=np.where(random.random(height) < 0.3, -np.inf, low),
        high=np.where(random.random(height) < 0.3, np.inf, low + 3),
        lower=np.zeros(width),
        upper=random.integers(1, 4, width).astype(float),
    )
    exact = solve(program, integers=0, seconds=SECONDS)
    if exact is None:
        return
    least = float(program.cost @ exact.values)
    assert dual_bound(program, random.normal(size=height)) <= least + 1e-6
    assert lower_bound(program, SECONDS, 10_000) == pytest.approx(least, abs=1e-2)
    assert exact_bound(program, False, SECONDS) == pytest.approx(least, abs=1e-3)
    whole = solve(program, integers=width, seconds=SECONDS)
    if whole is not None:
        least_whole = float(program.cost @ whole.values)
        assert least - 1e-3 <= exact_bound(program, True, SECONDS) <= least_whole + 1e-6
        assert exact_bound(program, True, SECONDS) == pytest.approx(least_whole, abs=1e-2)


def test_whole_numbers_say_more_than_the_relaxation_and_still_no_more_than_the_optimum():
    """One byte is missing: the relaxation gives up half of a value of two."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 5), (1, 5), (2, 5)]
    graph = Graph.from_dag([1.0, 2.0, 4.0, 1.0, 1.0, 1.0], [2, 2, 2, 1, 1, 1], edges, outputs=(5,), num_forward=4)
    budget = 7
    optimum, stages = least_added_seconds(graph, budget), Stages(graph, Planner(graph).search.smallest)
    relaxed = stages.seconds(budget, SECONDS, enough=0.0)
    assert 0.0 < relaxed < stages.seconds(budget, SECONDS) <= optimum
    assert stages.seconds(budget - 1, SECONDS) == least_added_seconds(graph, budget - 1) == math.inf
