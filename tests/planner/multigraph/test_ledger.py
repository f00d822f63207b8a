"""The ledger of a step: sums of what is alive, and the choice of plans, against brute force."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_of_options import key_of
from strategies import graphs

from autoremat import Options
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, OptionsError
from autoremat.planner.multigraph.fronts import front_of, output_bytes, point_of
from autoremat.planner.multigraph.ledger import (
    Moment,
    PlanPoint,
    Share,
    allocate,
    fullest,
    least_memory,
    pareto,
    shares,
    step_peak,
)
from autoremat.planner.multigraph.step_profile import Step, StepGraph, StepProfile
from autoremat.planner.search.planner import Planner
from autoremat.request.budgets import requests_of
from autoremat.request.limits import Limits
from autoremat.request.surroundings import Surroundings

SIZES = st.integers(0, 60)
POINTS = st.builds(PlanPoint, st.integers(0, 9).map(float), SIZES, SIZES, SIZES)


@st.composite
def ledgers(draw):
    """(fronts, calls, moments) of a few graphs."""
    fronts = [pareto(draw(st.lists(POINTS, min_size=1, max_size=4))) for _ in range(draw(st.integers(1, 3)))]
    graphs = st.integers(0, len(fronts) - 1)
    moments = st.builds(Moment, st.integers(-5, 40), st.lists(graphs, max_size=4).map(tuple), st.none() | graphs, st.booleans())
    calls = [draw(st.integers(1, 4)) for _ in fronts]
    return fronts, calls, draw(st.lists(moments, min_size=1, max_size=6))


def all_choices(fronts, calls, moments):
    """(peak, seconds) of every choice."""
    for points in product(*fronts):
        alive = [
            m.base_bytes + sum(points[g].saved_bytes for g in m.open)
            + (0 if m.running is None else points[m.running].backward_peak_bytes if m.backward
               else points[m.running].forward_peak_bytes)
            for m in moments
        ]  # fmt: skip
        yield max(alive), sum(n * p.seconds for n, p in zip(calls, points, strict=True))


def test_a_graph_called_three_times_holds_three_times():
    point = PlanPoint(1.0, 10, 15, 25)
    moments = [
        Moment(0, (), 0), Moment(2, (0,), 0), Moment(4, (0, 0), 0),
        Moment(4, (0, 0), 0, backward=True), Moment(7, (0,), 0, backward=True), Moment(9, (), 0, backward=True),
        Moment(44, (0,)),
    ]  # fmt: skip
    assert step_peak(moments, [point]) == 54
    assert fullest(moments, [point]) == moments[-1]
    assert step_peak(moments[:-1], [point]) == 4 + 20 + 25
    (share,) = shares(moments, [point], 60, borders=True)
    assert share == Share(10, 60 - 24, 60 - 24, True)
    assert share.holds(point)
    assert not share.holds(point, extra_headroom_bytes=12)
    assert not Share(9, 60, 60).holds(point)


@given(ledgers(), st.integers(0, 300))
def test_the_choice_is_the_best_of_all_that_fit(ledger, budget):
    choices = list(all_choices(*ledger))
    found = allocate(*ledger, budget)
    fitting = [seconds for peak, seconds in choices if peak <= budget]
    assert (found is None) == (not fitting)
    if found is not None:
        fronts, calls, moments = ledger
        points = [front[k] for front, k in zip(fronts, found.choice, strict=True)]
        assert found.peak_bytes == step_peak(moments, points) <= budget
        assert found.seconds == min(fitting) == sum(n * p.seconds for n, p in zip(calls, points, strict=True))


@given(ledgers())
def test_the_least_peak_is_that_of_all_choices(ledger):
    peaks = [peak for peak, _ in all_choices(*ledger)]
    assert max(0, least_memory(*ledger).peak_bytes) == max(0, min(peaks))
    assert allocate(*ledger, None).seconds == min(seconds for _, seconds in all_choices(*ledger))


@given(ledgers(), st.integers(0, 300))
def test_plans_that_keep_to_their_shares_fit_together(ledger, budget):
    """Each graph may take any other plan within its share, if what it saves is no more."""
    fronts, _, moments = ledger
    found = allocate(*ledger, budget)
    if found is None:
        return
    points = [front[k] for front, k in zip(fronts, found.choice, strict=True)]
    limits = shares(moments, points, budget, borders=False)
    assert all(limit.holds(point) for limit, point in zip(limits, points, strict=True))
    allowed = [[p for p in front if limit.holds(p)] for front, limit in zip(fronts, limits, strict=True)]
    for others in product(*allowed):
        assert step_peak(moments, others) <= budget


@settings(max_examples=30)
@given(graphs(max_ops=20))
def test_the_front_of_a_graph_has_its_fastest_and_its_leanest_plan(graph):
    planner = Planner(graph)
    front = front_of(planner)
    plans = planner.search.spread_out()
    assert min(p.seconds for p in front) == min(p.cost_seconds for p in plans)
    assert min(max(p.forward_peak_bytes, p.backward_peak_bytes) for p in front) == min(p.peak_bytes for p in plans)
    for plan in plans:
        point = point_of(plan)
        assert any(other.dominates(point) for other in front)
        assert max(point.forward_peak_bytes, point.backward_peak_bytes) == plan.peak_bytes
        assert plan.saved_bytes - output_bytes(graph) <= point.saved_bytes <= plan.saved_bytes


@settings(max_examples=30)
@given(graphs(max_ops=20), st.data())
def test_a_plan_is_found_again_by_its_share(graph, data):
    front = front_of(Planner(graph))
    wanted = data.draw(st.sampled_from(front))
    share = Share(wanted.saved_bytes, wanted.forward_peak_bytes + 7, wanted.backward_peak_bytes)
    again = Planner(graph).find(share.peak_bytes, lambda plan: share.holds(point_of(plan))).plan
    assert share.holds(point_of(again))
    assert again.cost_seconds <= wanted.seconds


def survey_of(budget: int | None) -> StepProfile:
    """Twelve calls of one graph."""
    fast, lean = PlanPoint(0.25, 4096, 6144, 8192), PlanPoint(0.5, 1024, 2048, 4096)
    graph = StepGraph("key", "model.py:3", 12, (fast, lean), fast)
    moments = (Moment(100, (0,) * 11, 0, backward=True),)
    return Step((graph,), moments, ("forward 0",) * 20, "cpu").shared_out(budget)


def test_a_survey_reads_well_and_is_a_budget():
    profile = survey_of(2**15)
    assert profile.plans[0].saved_bytes == 1024
    assert profile.shares == (Share(1024, 2048, 2**15 - 100 - 11 * 1024, True),)
    assert {"32.00", "15.10", "52.10", "3.00", "12", "model.py:3"} <= set(str(profile).split())
    assert (profile.shares_of("key"), profile.shares_of("other")) == ({None: profile.shares[0]}, {})
    options = Options(memory_budget=profile)
    assert options.memory_budget is profile
    around = Surroundings(torch.device("cpu"))
    with pytest.warns(BudgetWarning, match="did not have"):
        assert requests_of(options, around)[None].limits.peak_bytes == 2**15
    vars(around)["key"] = "key"
    assert requests_of(options, around)[None].limits == Limits(
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
