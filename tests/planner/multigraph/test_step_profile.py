"""Plans of blocks in the planner, which knows no torch: against brute force, and as rows of text."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.basics.errors import BudgetInfeasible
from autoremat.planner.multigraph.ledger import Moment, PlanPoint, host_peak, pareto, step_peak
from autoremat.planner.multigraph.step_profile import Step, StepGraph
from autoremat.planner.multigraph.variants import Entries
from autoremat.planner.settings import SETTINGS

POINTS = st.builds(PlanPoint, st.integers(0, 5).map(float), *[st.integers(0, 60)] * 3)


@st.composite
def entries(draw) -> Entries:
    """One or two graphs that up to four blocks call."""
    graph_of = draw(st.sampled_from([(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 1), (0, 0), (0,)]))
    fronts = [pareto(draw(st.lists(POINTS, min_size=1, max_size=4))) for _ in range(2)]
    blocks = st.integers(0, len(graph_of) - 1)
    moments = st.builds(Moment, st.integers(-5, 40), st.lists(blocks, max_size=4).map(tuple), st.none() | blocks, st.booleans())
    return Entries(
        [fronts[graph] for graph in graph_of],
        draw(st.lists(st.integers(1, 2), min_size=len(graph_of), max_size=len(graph_of))),
        draw(st.lists(moments, min_size=1, max_size=6)),
        graph_of,
        draw(st.integers(1, 3)),
    )


def all_choices(step: Entries) -> list[tuple[int, float]]:
    """(peak, seconds) of every choice with few enough plans per graph."""
    found = []
    for choice in product(*(range(len(front)) for front in step.fronts)):
        if all(len({choice[entry] for entry in members}) <= step.variants for members in step.members):
            points = [front[k] for front, k in zip(step.fronts, choice, strict=True)]
            seconds = sum(count * point.seconds for count, point in zip(step.calls, points, strict=True))
            found.append((step_peak(step.moments, points), seconds))
    return found


@settings(max_examples=150, deadline=None)
@given(entries(), st.integers(0, 300))
def test_the_plans_of_the_blocks_are_the_best_of_all_that_fit(step, budget):
    found = step.allocate(budget)
    fitting = [seconds for peak, seconds in all_choices(step) if peak <= budget]
    assert (found is None) == (not fitting)
    if found is not None:
        points = [front[k] for front, k in zip(step.fronts, found.choice, strict=True)]
        assert found.peak_bytes == step_peak(step.moments, points) <= budget
        assert found.seconds == min(fitting)
        for members in step.members:
            assert len({found.choice[entry] for entry in members}) <= step.variants


@settings(max_examples=100, deadline=None)
@given(entries(), st.integers(0, 300), st.integers(0, 30), st.data())
def test_the_bytes_on_the_host_keep_to_their_bound(step, budget, bound, data):
    held = {front: (*(data.draw(st.integers(0, 20)) for _ in front[1:]), 0) for front in dict.fromkeys(step.fronts)}
    fronts = [tuple(replace(p, host_bytes=n) for p, n in zip(front, held[front], strict=True)) for front in step.fronts]
    step = replace(step, fronts=fronts, host_bytes=bound)
    fitting = []
    for choice in product(*(range(len(front)) for front in fronts)):
        points = [front[k] for front, k in zip(fronts, choice, strict=True)]
        few = all(len({choice[entry] for entry in members}) <= step.variants for members in step.members)
        if few and step_peak(step.moments, points) <= budget and host_peak(step.moments, points) <= bound:
            fitting.append(sum(count * point.seconds for count, point in zip(step.calls, points, strict=True)))
    found = step.allocate(budget)
    assert (found is None) == (not fitting)
    if found is not None:
        points = [front[k] for front, k in zip(fronts, found.choice, strict=True)]
        assert host_peak(step.moments, points) <= bound
        assert found.seconds == min(fitting)


@settings(max_examples=100, deadline=None)
@given(entries())
def test_the_least_peak_of_the_blocks_is_that_of_all_choices(step):
    assert max(0, step.least_memory().peak_bytes) == max(0, min(peak for peak, _ in all_choices(step)))


def chain(blocks: int, gradient: int = 5) -> list[Moment]:
    """Equal blocks in sequence; each leaves a gradient."""
    numbers = range(blocks)
    forwards = [Moment(0, tuple(range(n)), n) for n in numbers]
    return [*forwards, *(Moment(gradient * (blocks - 1 - n), tuple(range(n)), n, backward=True) for n in reversed(numbers))]


RICH, LEAN = PlanPoint(0.0, 100, 100, 140), PlanPoint(1.0, 10, 90, 150)


def step_of_blocks(blocks: int, variants: int, step_seconds: float = 0.0) -> Step:
    graphs = tuple(StepGraph("key", "model.py:3", 1, (RICH, LEAN), RICH, step_seconds, block) for block in range(blocks))
    return Step(graphs, tuple(chain(blocks)), (), "cpu", variants=variants)


def test_the_first_blocks_are_lean_and_the_last_ones_rich():
    one, two = (step_of_blocks(8, variants).shared_out(600) for variants in (1, 2))
    assert set(one.plans) == {LEAN}
    assert two.plans == (LEAN,) * 3 + (RICH,) * 5
    assert two.peak_bytes == 3 * 10 + 4 * 100 + 140
    assert two.added_seconds == 3.0 < one.added_seconds == 8.0
    # Equal plans have equal limits, so that each is compiled once, and any plans within the limits fit together.
    assert len(set(two.shares)) == 2
    assert all(share.holds(plan) for share, plan in zip(two.shares, two.plans, strict=True))
    assert list(two.shares_of("key")) == list(range(8))
    assert two.shares_of("other") == {}
    assert two.shares_of_block(3) == two.shares_of("key")
    assert two.shares_of_block(None) == two.shares_of_block(8) == {}
    lines = [line.split()[:3] for line in str(two).splitlines() if "model.py:3" in line]
    assert lines == [["0", "0-2", "3"], ["0", "3-7", "5"]]


def test_a_further_plan_must_save_a_thousandth_of_the_step():
    longest = 5.0 / 8 / SETTINGS.ledger.worth_in_the_step  # two plans save five seconds of all eight calls
    two, one = (step_of_blocks(8, 2, seconds).shared_out(600) for seconds in (0.99 * longest, 1.01 * longest))
    assert (two.added_seconds, one.added_seconds) == (3.0, 8.0)


def test_an_impossible_budget_names_the_blocks_of_a_graph_together():
    with pytest.raises(BudgetInfeasible) as raised:
        step_of_blocks(8, 3).shared_out(100)
    error = raised.value
    assert (error.budget_bytes, error.minimum_bytes) == (100, 6 * 10 + 150 + 5)  # the last block is rich: its peak is lower
    assert [one.bytes for one in error.occupants] == [150, 60, 5]
    assert [one.name for one in error.occupants][:2] == ["backward of graph 0", "saved by graph 0 for 6 calls"]


def test_code_that_exceeds_its_share_gets_more_room():
    step = step_of_blocks(8, 2)
    higher = step.with_higher_peaks(3, 0.5)
    assert {graph.front for graph in higher.graphs} == {(PlanPoint(0.0, 100, 150, 210), PlanPoint(1.0, 10, 135, 225))}
    assert step.with_higher_peaks(8, 0.5) == step
    before, after = (one.shared_out(600) for one in (step, higher))
    assert after.added_seconds > before.added_seconds
    assert min(share.backward_peak_bytes for share in after.shares) >= 210
