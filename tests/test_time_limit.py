"""The time limit of a search, on a clock that only minimum cuts and simulated plans move on."""

from __future__ import annotations

import types

import pytest
from strategies import training_chain

from autoremat.planner.plans.plan import Plan
from autoremat.planner.search import time_limit
from autoremat.planner.search.candidates import spread_early
from autoremat.planner.search.min_cut import MinCut
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.time_limit import TimeLimit

UNITS_BESIDE = 10
"""The most units that a search needs in any case: baseline, two candidates, a program point that it has begun."""


@pytest.fixture
def clock(monkeypatch) -> types.SimpleNamespace:
    """Seconds that pass by one for each minimum cut and each simulated plan."""
    clock = types.SimpleNamespace(time=0.0, monotonic=lambda: clock.time)
    cut, of = MinCut.cut, Plan.of.__func__

    def slow_cut(*arguments, **keywords):
        clock.time += 1.0
        return cut(*arguments, **keywords)

    def slow_plan(*arguments):
        clock.time += 1.0
        return of(*arguments)

    monkeypatch.setattr(MinCut, "cut", slow_cut)
    monkeypatch.setattr(Plan, "of", classmethod(slow_plan))
    monkeypatch.setattr(time_limit, "time", clock)
    return clock


@pytest.mark.parametrize("seconds", [0.1, 5.0, 20.0, 40.0, 80.0, 160.0])
@pytest.mark.parametrize("share", [0.7, 0.3, 0.01])
def test_every_stage_of_a_search_looks_at_the_clock(clock, seconds, share):
    planner = Planner(training_chain(100), seconds)
    budget = int(share * planner.baseline.peak_bytes)
    found = planner.find(budget)
    assert clock.time <= 1.1 * seconds + UNITS_BESIDE
    assert found.baseline.peak_bytes >= found.smallest.peak_bytes
    assert found.interrupted or share == 0.01
    planner.restart()
    began = clock.time
    planner.find(budget)
    assert clock.time - began <= 1.1 * seconds + UNITS_BESIDE


def test_a_little_time_still_gives_a_small_plan_and_more_time_a_cheaper_one(clock):
    graph, costs = training_chain(100), []
    for seconds in (10.0, 50.0, 1e6):
        planner = Planner(graph, seconds)
        found = planner.find(planner.baseline.peak_bytes // 2)
        assert found.plan is not None
        costs.append(found.plan.cost_seconds)
    assert costs == sorted(costs, reverse=True)
    assert not found.interrupted


def test_what_was_planned_in_time_is_what_an_unlimited_search_plans(clock):
    graph = training_chain(30)
    timed, free = Planner(graph, 1e6), Planner(graph, 1e9)
    assert [c.plan.schedule for c in timed.search.candidates] == [c.plan.schedule for c in free.search.candidates]


def test_beginnings_of_a_sequence_are_spread():
    assert spread_early(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert [sorted(spread_early(count)) for count in range(6)] == [list(range(count)) for count in range(6)]


def test_a_share_of_the_limit_passes_before_the_limit(monkeypatch):
    clock = types.SimpleNamespace(monotonic=lambda: 5.0)
    monkeypatch.setattr(time_limit, "time", clock)
    limit = TimeLimit(10.0)
    clock.monotonic = lambda: 11.0
    assert limit.has_passed(0.5)
    assert not limit.has_passed()
    assert limit.left == 4.0
