"""The ledger of a step and plans of blocks: sums of what is alive, and choices of plans, against brute force."""

from collections.abc import Iterable
from dataclasses import astuple, replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_of_options import key_of
from strategies import graphs

from autoremat import Options
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, OptionsError
from autoremat.planner.multigraph.ledger import Moment
from autoremat.planner.multigraph.step import Step, StepGraph
from autoremat.planner.multigraph.step_profile import StepProfile, share_out
from autoremat.planner.plans import limits
from autoremat.planner.plans.limits import PlanPoint, Share, output_bytes, point_of, undominated
from autoremat.planner.search.planner import Planner
from autoremat.planner.settings import Settings
from autoremat.request.budgets import requests_of
from autoremat.request.request import RequestedLimits
from autoremat.request.surroundings import Surroundings

POINTS = st.builds(PlanPoint, st.integers(0, 9).map(float), *[st.integers(0, 60)] * 3)
HOST_BOUNDS = st.none() | st.integers(0, 30)


def front_of(points: Iterable[PlanPoint]) -> tuple[PlanPoint, ...]:
    return tuple(undominated(points, astuple))


@st.composite
def steps(draw) -> Step:
    """One to three graphs that up to four entries call. Plans may keep bytes on the host, the fastest ones none."""
    numbers = draw(st.sampled_from([(0,), (0, 1), (0, 1, 2), (0, 0), (0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 1)]))
    fronts, host_bytes = [front_of(draw(st.lists(POINTS, min_size=1, max_size=4))) for _ in range(3)], draw(HOST_BOUNDS)
    if host_bytes is not None:
        fronts = [(p, *(replace(other, host_bytes=draw(st.integers(0, 20))) for other in rest)) for p, *rest in fronts]
    entries = st.integers(0, len(numbers) - 1)
    moments = st.builds(
        Moment, st.integers(-5, 40), st.lists(entries, max_size=4).map(tuple), st.none() | entries, st.booleans()
    )
    graphs = tuple(
        StepGraph(str(n), "", draw(st.integers(1, 4)), fronts[n], fronts[n][0], block=block) for block, n in enumerate(numbers)
    )
    found = draw(st.lists(moments, min_size=1, max_size=6))
    return Step(graphs, tuple(found), variants=draw(st.integers(1, 3)), host_bytes=host_bytes)


def all_choices(step: Step) -> list[tuple[tuple[PlanPoint, ...], int]]:
    """Every choice with few enough plans per graph and bytes on the host, with its peak."""
    found = []
    for plans in product(*(graph.front for graph in step.graphs)):
        of_graph = [{p for p, n in zip(plans, step.numbers, strict=True) if n == number} for number in step.numbers]
        on_host = step.host_peak_bytes(plans)
        if all(len(some) <= step.variants for some in of_graph) and on_host <= (step.host_bytes or 0):
            alive = [
                m.base_bytes + sum(plans[g].saved_bytes for g in m.open)
                + (0 if m.running is None else plans[m.running].backward_peak_bytes if m.backward
                   else plans[m.running].forward_peak_bytes)
                for m in step.moments
            ]  # fmt: skip
            found.append((plans, max(alive)))
    return found


def test_a_graph_called_three_times_holds_three_times():
    point = PlanPoint(1.0, 10, 15, 25)
    moments = (
        Moment(0, (), 0), Moment(2, (0,), 0), Moment(4, (0, 0), 0),
        Moment(4, (0, 0), 0, backward=True), Moment(7, (0,), 0, backward=True), Moment(9, (), 0, backward=True),
        Moment(44, (0,)),
    )  # fmt: skip
    assert Step((), moments).peak_bytes([point]) == moments[-1].live_bytes([point]) == 54
    assert Step((), moments[:-1]).peak_bytes([point]) == 4 + 20 + 25
    (share,) = Step((StepGraph("", "", 3, (point,), point),), moments).shares((point,), 60)
    assert share == Share(10, 60 - 24, 60 - 24)
    assert share.excess_bytes(point) == 0
    assert share.less(12).excess_bytes(point) == 1
    assert Share(9, 60, 60).excess_bytes(point) == 1


@settings(max_examples=150, deadline=None)
@given(steps(), st.integers(0, 300))
def test_the_choice_is_the_best_of_all_that_fit_and_plans_within_its_shares_fit_together(step, budget):
    """Each graph may take any other plan within its share."""
    found = step.cheapest(budget)
    fitting = [plans for plans, peak in all_choices(step) if peak <= budget]
    assert (found is None) == (not fitting)
    if found is None:
        return
    assert any(found == plans for plans in fitting)
    assert step.added_seconds(found) == min(map(step.added_seconds, fitting))
    limits = step.shares(found, budget)
    assert all(limit.excess_bytes(plan) <= 0 for limit, plan in zip(limits, found, strict=True))
    allowed = [[p for p in graph.front if limit.excess_bytes(p) <= 0] for graph, limit in zip(step.graphs, limits, strict=True)]
    for others in product(*allowed):
        assert step.peak_bytes(others) <= budget


@settings(max_examples=100, deadline=None)
@given(steps())
def test_the_least_peak_is_that_of_all_choices(step):
    assert max(0, step.minimum_peak_bytes) == max(0, min(peak for _, peak in all_choices(step)))
    assert step.added_seconds(step.cheapest(None)) == 0


@settings(max_examples=30)
@given(graphs(max_ops=20))
def test_the_front_of_a_graph_has_its_fastest_and_its_leanest_plan(graph):
    planner = Planner(graph)
    front = front_of(map(point_of, planner.front()))
    plans = planner.front()
    assert min(p.seconds for p in front) == min(p.cost_seconds for p in plans)
    assert min(max(p.forward_peak_bytes, p.backward_peak_bytes) for p in front) == min(p.peak_bytes for p in plans)
    for plan in plans:
        point = point_of(plan)
        assert any(all(a <= b for a, b in zip(astuple(other), astuple(point), strict=True)) for other in front)
        assert max(point.forward_peak_bytes, point.backward_peak_bytes) == plan.peak_bytes
        assert plan.saved_bytes - output_bytes(graph) <= point.saved_bytes <= plan.saved_bytes


@settings(max_examples=30)
@given(graphs(max_ops=20), st.data())
def test_a_plan_is_found_again_by_its_share(graph, data):
    front = front_of(map(point_of, Planner(graph).front()))
    wanted = data.draw(st.sampled_from(front))
    share = Share(wanted.saved_bytes, wanted.forward_peak_bytes + 7, wanted.backward_peak_bytes)
    again = Planner(graph).find(limits.Limits(share.peak_bytes, share=share)).plan
    assert share.excess_bytes(point_of(again)) <= 0
    assert again.cost_seconds <= wanted.seconds


def survey_of(budget: int | None) -> StepProfile:
    """Twelve calls of one graph."""
    fast, lean = PlanPoint(0.25, 4096, 6144, 8192), PlanPoint(0.5, 1024, 2048, 4096)
    graph = StepGraph("key", "model.py:3", 12, (fast, lean), fast)
    moments = (Moment(100, (0,) * 11, 0, backward=True),)
    return share_out(Step((graph,), moments, ("forward 0",) * 20, "cpu"), budget)


def test_a_survey_reads_well_and_is_a_budget():
    profile = survey_of(2**15)
    assert profile.plans[0].saved_bytes == 1024
    assert profile.shares == (Share(1024, 2048, 2**15 - 100 - 11 * 1024),)
    assert {"32.00", "15.10", "52.10", "3.00", "12", "model.py:3"} <= set(str(profile).split())
    assert (profile.shares_of("key"), profile.shares_of("other")) == ({None: profile.shares[0]}, {})
    options = Options(memory_budget=profile)
    assert options.memory_budget is profile
    around = Surroundings(torch.device("cpu"))
    with pytest.warns(BudgetWarning, match="did not have"):
        assert requests_of(options, around)[None].limits.peak_bytes == 2**15
    vars(around)["key"] = "key"
    assert requests_of(options, around)[None].limits == RequestedLimits(
        profile.shares[0].backward_peak_bytes, step_share=profile.shares[0]
    )
    assert requests_of(options, around)[None].cache_key() != key_of(Options(memory_budget=2**15))
    assert options == Options(memory_budget=survey_of(2**15))
    with pytest.raises(OptionsError, match=r"autoremat\.profile_step"):
        Options(memory_budget=object())


def test_a_surveyed_step_can_be_planned_for_other_budgets():
    profile = survey_of(2**15)
    assert profile.within(None).plans == profile.within(1.0).plans == survey_of(None).plans
    assert profile.within("32KiB") == profile
    assert profile.within(None).shares == (None,)
    with pytest.raises(BudgetInfeasible) as caught:
        profile.within(1000)
    assert caught.value.minimum_bytes == profile.minimum_peak_bytes == 100 + 11 * 1024 + 4096
    assert caught.value.lower_bound_bytes == 100
    names = [occupant.name for occupant in caught.value.occupants]
    assert names == ["saved by graph 0 for 11 calls", "backward of graph 0", "what no plan decides"]


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
    one, two = (share_out(step_of_blocks(8, variants), 600) for variants in (1, 2))
    assert set(one.plans) == {LEAN}
    assert two.plans == (LEAN,) * 3 + (RICH,) * 5
    assert two.peak_bytes == 3 * 10 + 4 * 100 + 140
    assert two.added_seconds == 3.0 < one.added_seconds == 8.0
    # Equal plans have equal limits, so that each is compiled once, and any plans within the limits fit together.
    assert len(set(two.shares)) == 2
    assert all(share.excess_bytes(plan) <= 0 for share, plan in zip(two.shares, two.plans, strict=True))
    assert list(two.shares_of("key")) == list(range(8))
    assert two.shares_of("other") == {}
    assert two.shares_of_block(3) == two.shares_of("key")
    assert two.shares_of_block(None) == two.shares_of_block(8) == {}
    lines = [line.split()[:3] for line in str(two).splitlines() if "model.py:3" in line]
    assert lines == [["0", "0-2", "3"], ["0", "3-7", "5"]]


def test_a_further_plan_must_save_a_thousandth_of_the_step():
    longest = 5.0 / 8 / Settings().good_gap  # two plans save five seconds of all eight calls
    two, one = (share_out(step_of_blocks(8, 2, seconds), 600) for seconds in (0.99 * longest, 1.01 * longest))
    assert (two.added_seconds, one.added_seconds) == (3.0, 8.0)


def test_an_impossible_budget_names_the_blocks_of_a_graph_together():
    with pytest.raises(BudgetInfeasible) as raised:
        share_out(step_of_blocks(8, 3), 100)
    error = raised.value
    assert (error.budget_bytes, error.minimum_bytes) == (100, 6 * 10 + 150 + 5)  # the last block is rich: its peak is lower
    assert [one.bytes for one in error.occupants] == [150, 60, 5]
    assert [one.name for one in error.occupants][:2] == ["backward of graph 0", "saved by graph 0 for 6 calls"]


def test_code_that_exceeds_its_share_gets_more_room():
    step = step_of_blocks(8, 2)
    higher = step.with_higher_peaks(3, 0.5)
    assert {graph.front for graph in higher.graphs} == {(PlanPoint(0.0, 100, 150, 210), PlanPoint(1.0, 10, 135, 225))}
    assert step.with_higher_peaks(8, 0.5) == step
    before, after = (share_out(one, 600) for one in (step, higher))
    assert after.added_seconds > before.added_seconds
    assert min(share.backward_peak_bytes for share in after.shares) >= 210
