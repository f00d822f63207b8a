"""The limit of a search: its work, which is the same on any machine, and the clock as the last resort."""

import contextlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT, TESTS
from reports import report_on
from strategies import training_chain

from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search import work_limit
from autoremat.planner.search.min_cut import MinCut
from autoremat.planner.search.planner import Planner, PlanningResult
from autoremat.planner.search.work_limit import WORK_PER_SECOND, WorkLimit
from autoremat.report.report import Report

UNITS_BESIDE = 12
"""The most units that a search needs in any case: two cuts, baseline, two candidates, a program point that it has begun."""

LITTLE = 0.6
"""A time limit whose work is half of that of a whole search on the chain."""


class Clock:
    """Seconds that pass as the test wants."""

    def __init__(self) -> None:
        self.time = 0.0

    def thread_time(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A clock that stands still until something moves it on."""
    clock = Clock()
    monkeypatch.setattr(work_limit, "time", clock)
    return clock


@pytest.fixture
def slow_units(clock, monkeypatch) -> Clock:
    """Seconds that pass by one for each minimum cut and each simulated plan, while work is unlimited."""

    def slowed(run):
        def takes_a_second(*arguments):
            clock.time += 1.0
            return run(*arguments)

        return takes_a_second

    monkeypatch.setattr(MinCut, "_cut", slowed(MinCut._cut))
    monkeypatch.setattr(Plan, "of", classmethod(slowed(Plan.of.__func__)))
    monkeypatch.setattr(work_limit, "WORK_PER_SECOND", math.inf)
    return clock


def searched(seconds: float) -> tuple[PlanningResult, WorkLimit]:
    """The result of a search on a chain within a small share of its baseline's peak, and its limit."""
    planner = Planner(training_chain(200), seconds)
    return planner.find(Limits(int(0.15 * planner.baseline.peak_bytes))), planner.limit


def at_a_speed(clock: Clock, monkeypatch, slowness: float) -> tuple[PlanningResult, WorkLimit]:
    """A search that its work ends early, on a machine so many times slower than that of the weights."""
    with monkeypatch.context() as patch:
        add = WorkLimit.add

        def slow(limit: WorkLimit, work: float) -> None:
            add(limit, work)
            clock.time += slowness * work / 1e6

        patch.setattr(WorkLimit, "add", slow)
        return searched(LITTLE)


def test_a_slower_machine_does_the_same_work_and_finds_the_same_plan(clock, monkeypatch):
    (idle, limit), (slow, slow_limit) = (at_a_speed(clock, monkeypatch, slowness) for slowness in (1.0, 3.0))
    assert idle.interrupted
    assert not idle.ended_by_clock
    assert limit.done == slow_limit.done
    assert idle.plan.schedule == slow.plan.schedule
    assert idle.lower_bound_seconds == slow.lower_bound_seconds
    assert not slow.ended_by_clock
    assert limit.elapsed < 0.4 * LITTLE
    assert slow_limit.elapsed == pytest.approx(3.0 * limit.elapsed)


def test_the_clock_ends_the_search_of_a_far_slower_machine_and_the_result_says_so(clock, monkeypatch):
    idle, limit = at_a_speed(clock, monkeypatch, 1.0)
    slow, slow_limit = at_a_speed(clock, monkeypatch, 8.0)
    assert slow.ended_by_clock
    assert slow.interrupted
    assert slow_limit.done < limit.done


def test_more_work_finds_a_cheaper_plan_and_enough_of_it_ends_the_search_by_itself(clock):
    found = [searched(seconds)[0] for seconds in (0.1, 0.5, 100.0)]
    assert [result.interrupted for result in found] == [True, True, False]
    costs = [math.inf if result.plan is None else result.plan.cost_seconds for result in found]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_work_ends_the_search_at_the_same_step_in_processes_with_other_hash_seeds():
    code = (
        "from test_work_limit import Clock, LITTLE, searched, work_limit\n"
        "work_limit.time = Clock()\n"
        "found, limit = searched(LITTLE)\n"
        "print(found.plan.schedule, found.plan.label, found.interrupted, found.ended_by_clock, limit.done)"
    )
    found = set()
    for seed in ("1", "2", "3"):
        path = os.pathsep.join([str(ROOT), str(TESTS), str(Path(__file__).parent)])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    assert "True False" in found.pop()


@pytest.mark.parametrize("seconds", [0.1, 5.0, 20.0, 40.0, 80.0, 160.0])
@pytest.mark.parametrize("share", [0.7, 0.3, 0.01])
def test_every_stage_of_a_search_looks_at_the_clock(slow_units, seconds, share, monkeypatch):
    clocks, begin = [], WorkLimit.__init__
    monkeypatch.setattr(WorkLimit, "__init__", lambda limit, *seconds: clocks.append(limit) or begin(limit, *seconds))
    planner = Planner(training_chain(100), seconds)
    budget = int(share * planner.baseline.peak_bytes)
    found = planner.find(Limits(budget))
    assert all(limit.elapsed <= seconds + UNITS_BESIDE for limit in clocks)
    assert slow_units.time <= sum(limit.elapsed for limit in clocks[:3]) + UNITS_BESIDE
    assert found.baseline.peak_bytes >= found.smallest.peak_bytes
    assert found.ended_by_clock or slow_units.time < seconds or share == 0.01
    planner.restart()
    began = slow_units.time
    planner.find(Limits(budget))
    assert slow_units.time - began <= seconds + UNITS_BESIDE


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_further_search_leaves_out_is_left_out_by_the_search(clock, fails):
    limit = WorkLimit(10.0)
    with contextlib.suppress(ValueError), limit.beside(0.5) as further:
        with further.unit(6.0 * WORK_PER_SECOND):
            clock.time += 1.0
        assert further.has_passed()
        if fails:
            raise ValueError
    assert limit.interrupted
    assert (limit.done, limit.elapsed, further.elapsed) == (0.0, 0.0, 1.0)
    assert not limit.ended_by_clock


def test_that_the_clock_has_ended_a_search_is_known_after_it_begins_anew(clock):
    limit = WorkLimit(1.0)
    with limit.unit():
        clock.time += 2.0
    assert limit.has_passed()
    limit.restart()
    assert not limit.interrupted
    assert limit.ended_by_clock


@pytest.mark.parametrize("slowness", [1.0, 8.0])
def test_the_report_names_what_ended_the_search(clock, monkeypatch, slowness):
    found, _ = at_a_speed(clock, monkeypatch, slowness)
    report = report_on(found, None)
    assert report.time_limited
    assert report.ended_by_clock == (slowness > 1.0)
    assert ("ENDED BY THE CLOCK" in str(report)) == report.ended_by_clock
    assert ("ENDED BY THE CLOCK" in report.summary()) == report.ended_by_clock
    assert Report.from_json(report.to_json()).ended_by_clock == report.ended_by_clock
