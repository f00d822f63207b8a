"""Search with stays: lower bounds hold for every plan with stays, and its plans are close to the optimum."""

import dataclasses
import itertools
import math

import models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import subsets
from strategies import GraphBuilder, changed, close_under_need, graphs, on_host, places_of, schedules_of, stays_of, with_forms

from autoremat.basics.errors import OptionsError
from autoremat.options.options import Options
from autoremat.planner.api import plan as plan_of
from autoremat.planner.cost.durations import durations, stalls_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Engine, Form, Role, Transfer
from autoremat.planner.graph.schedule import Schedule, Stay, build_schedule
from autoremat.planner.plans.limits import UNLIMITED, Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.lower_bounds import lower_bound
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.stays_search import StaysSearch
from autoremat.planner.search.work_limit import WorkLimit
from autoremat.tools.explain import previews
from autoremat.torch_private import compilers

GAP = 0.02
"""Largest gap to the optimum of small graphs that the search may leave, as a share of the step."""


def step(sizes: list[int], seconds: list[float], **fields: object) -> Graph:
    """A chain: op i computes value i, and each op of the backward reads a value, its input and the gradient behind it."""
    build = GraphBuilder()
    made = [build.source(0)]
    for size, cost in zip(sizes, seconds, strict=True):
        made.append(build.op([made[-1]], size, seconds=cost))
    loss, gradient = build.op([made[-1]], 0, seconds=0.1), build.source(0, Role.TANGENT)
    for index in range(len(sizes), 0, -1):
        gradient = build.op([made[index - 1], made[index], gradient], 1, forward=False, seconds=2 * seconds[index - 1])
    return build.graph(forward_outputs=(loss,), backward_outputs=(gradient,), **fields)


@settings(max_examples=150, deadline=None)
@given(st.data(), graphs(max_ops=14), st.sampled_from([1, 1, 3]))
def test_no_plan_beats_the_bounds_with_stays_or_without(data, graph, in_flight):
    rate = data.draw(st.sampled_from([None, 0.0, 1e2, 1e4, 1e6]))
    with_its_forms = graph if rate is None else on_host(graph, rate) if rate else with_forms(graph)
    graph = changed(with_its_forms, in_flight=in_flight)
    schedule = data.draw(schedules_of(graph))
    stays = data.draw(stays_of(graph, schedule))
    stays = tuple(dataclasses.replace(stay, form="host") for stay in stays) if rate else stays
    plan = Plan.of(graph, dataclasses.replace(schedule, stays=stays))
    bound = lower_bound(graph, Limits(plan.peak_bytes))
    assert bound.peak_bytes <= plan.peak_bytes
    if plan.peak_bytes:
        assert bound.seconds <= plan.cost_seconds * (1 + 1e-6) + 1e-9


def stays_at_all_places(graph: Graph, schedule: Schedule, value: int) -> list[Stay]:
    """The stays of a value whose store follows its op and whose need is its first read in the backward."""
    border, (made, last, need) = len(schedule.forward), places_of(graph, schedule, value)
    places = itertools.product(range(last, border), range(border, need + 1))
    return [Stay(value, "host", made, free, load, need) for free, load in places]


def optimum(graph: Graph, budget: int, most_stored: int = 2) -> float:
    """The least added seconds within `budget`, over all saved sets, up to `most_stored` of them stored, and all positions."""
    best = math.inf
    for saved in {close_under_need(graph, set(wanted)) for wanted in subsets(graph.forward_values)}:
        schedule = build_schedule(graph, saved)
        plan, seconds = Plan.of(graph, schedule), durations(graph, schedule)
        crossing = [value for value in plan.saved if graph.values[value].forms]
        for stored in (chosen for chosen in subsets(crossing) if len(chosen) <= most_stored):
            for stays in itertools.product(*(stays_at_all_places(graph, schedule, value) for value in sorted(stored))):
                bytes_at = plan.timeline.bytes_at.copy()
                for stay in stays:
                    bytes_at[stay.free + 1 : stay.load] -= graph.values[stay.value].bytes
                if bytes_at.max() <= budget:
                    stalls = sum(stalls_of(graph, dataclasses.replace(schedule, stays=stays), seconds=seconds))
                    best = min(best, plan.added_seconds + stalls)
    return best


@pytest.mark.parametrize("rate", [3.0, 10.0, 100.0])
def test_plans_are_close_to_the_optimum(rate):
    random, gaps = np.random.Generator(np.random.PCG64(0)), []
    for _ in range(3):
        sizes, seconds = random.integers(1, 10, 5).tolist(), random.uniform(0.2, 1.0, 5).tolist()
        graph = on_host(step(sizes, seconds), rate)
        planner = Planner(graph, 60.0)
        for share in (0.85, 0.7):
            budget = int(share * planner.baseline.peak_bytes)
            least = optimum(graph, budget)
            planning = planner.find(Limits(budget))
            assert planning.lower_bound_seconds <= least * (1 + 1e-6) + 1e-9
            if planning.plan is None:
                assert planner.smallest.peak_bytes > budget
                continue
            gaps.append((planning.plan.added_seconds - least) / graph.step_seconds)
    assert len(gaps) >= 5
    assert max(gaps) <= GAP, gaps


SIZES, SECONDS = [8, 6, 9, 7, 8, 5, 9, 6], [0.9, 0.4, 0.8, 0.3, 0.7, 0.5, 0.6, 0.4]


def planned(graph: Graph, budget: int, limits: Limits = UNLIMITED) -> Plan:
    planner = Planner(graph, 60.0, limits=limits)
    found = planner.find(Limits(budget)).plan
    assert found is not None
    found.check()
    assert found.peak_bytes <= budget
    return found


def test_stays_make_a_step_faster_and_less_than_the_least_peak_of_recomputation():
    graph = step(SIZES, SECONDS)
    peak = Planner(graph, 60.0).baseline.peak_bytes
    alone = planned(graph, int(0.7 * peak))
    slow, fast = (planned(on_host(graph, rate), int(0.7 * peak)) for rate in (5.0, 1e3))
    assert fast.schedule.stays
    assert (fast.added_seconds, fast.recomputed) == (0.0, ())
    assert 0.0 < slow.added_seconds < alone.added_seconds
    assert Planner(on_host(graph, 5.0), 60.0).smallest.peak_bytes <= Planner(graph, 60.0).smallest.peak_bytes


@pytest.mark.parametrize("rate", [4.0, 1e3])
def test_the_host_bounds_what_is_stored_and_no_other_peak_before_stays_is_better(rate):
    alone = Planner(step(2 * SIZES, 2 * SECONDS))
    graph, budget, seconds = on_host(alone.graph, rate), alone.baseline.peak_bytes // 2, list[float]()
    for host_bytes in (0, 10, 25, None):
        limits = Limits(host_bytes=host_bytes)
        planner, plan = Planner(graph, limits=limits), planned(graph, budget, limits)
        assert host_bytes is None or max(plan.host_bytes, planner.smallest.host_bytes) <= host_bytes
        assert planner.smallest.peak_bytes <= alone.smallest.peak_bytes
        assert planner.find(Limits(planner.smallest.peak_bytes)).plan is not None
        others = StaysSearch(graph, WorkLimit(), 1.0, Limits(budget, host_bytes=host_bytes))
        for level in range(budget, 2 * budget, 5):
            any([others.consider(other) for other in others.bare.solved(alone.plans, level)])
        assert plan.cost_seconds <= others.least + GAP * graph.step_seconds
        seconds.append(plan.added_seconds)
    assert sorted(seconds) == seconds[::-1] != seconds  # the more memory on the host, the faster
    assert (seconds[-1] == 0.0) == (rate == 1e3)


def test_values_that_can_be_packed_are_packed_where_this_is_cheap():
    def packed(graph: Graph, seconds: float) -> Graph:
        convert = Transfer(Engine.COMPUTE, seconds)
        return with_forms(graph, lambda size: (Form("bits", convert, convert, size // 8),))

    graph = step([size * 8 for size in SIZES], SECONDS)
    budget = int(0.75 * Planner(graph, 60.0).baseline.peak_bytes)
    alone, cheap, dear = planned(graph, budget), planned(packed(graph, 0.01), budget), planned(packed(graph, 9.0), budget)
    assert cheap.schedule.stays
    assert cheap.added_seconds < 0.5 * alone.added_seconds
    assert dear.added_seconds == alone.added_seconds
    assert not dear.schedule.stays


def test_a_budget_of_time_is_kept_with_a_lower_peak():
    graph = step(SIZES, SECONDS)
    peaks = []
    for forms in (graph, on_host(graph, 1e3)):
        planner = Planner(forms, 60.0)
        limits = Limits(seconds=1.05 * planner.fastest().predicted_seconds)
        found = planner.find(limits).plan
        assert found is not None
        assert limits.keep(found)
        peaks.append(found.peak_bytes)
    assert peaks[1] < peaks[0]


def test_solvers_that_know_no_stays_refuse_forms_or_leave_them():
    graph = on_host(step(SIZES, SECONDS), 1e3)
    with pytest.raises(OptionsError, match="values have forms"):
        plan_of(graph, 0.7, solver="ilp")
    assert not plan_of(graph, 0.9, solver="min_cut").schedule.stays
    single = on_host(Graph.from_dag([1.0] * 8, [1] * 8, [(i, i + 1) for i in range(7)] + [(0, 7), (1, 6)]), 1e3)
    assert not plan_of(single, 0.8, time_limit=1.0).schedule.stays


@pytest.mark.slow
def test_saved_values_that_are_in_the_way_of_stays_are_dropped():
    """Slightly above the least peak of recomputation. Without that, nothing that the link could carry fits."""
    module, inputs = models.build("llama", layers=4)
    options = Options.parse({"progress": False, "cost_model": "roofline"}, None, compilers.inductor_config_names)
    (graph,), _ = previews(module, inputs, {}, options, "H100", lambda priced: priced.graph)
    alone = Planner(graph)
    fastest = min(alone.plans, key=lambda plan: plan.cost_seconds)
    forward = sum(op.seconds for op in graph.ops[: graph.num_forward])
    linked = on_host(graph, 0.75 * fastest.peak_bytes / forward)
    for share in (1.0, 1.03, 1.06):
        budget = int(share * alone.lowest.peak_bytes)
        found, without = Planner(linked).find(Limits(budget)).plan, alone.find(Limits(budget)).plan
        assert found.schedule.stays
        assert found.cost_seconds - fastest.cost_seconds < 2 / 3 * (without.cost_seconds - fastest.cost_seconds)
