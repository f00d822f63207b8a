"""The planner: minimum cuts against brute force, segments, and what the planner promises for every budget."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cheapest_cut, cut_cost
from strategies import GraphBuilder, graphs

from autoremat.planner.cost.durations import traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Kind, Role, Trait
from autoremat.planner.plans.limits import Limits
from autoremat.planner.search.min_cut import FORBIDDEN, RESOLUTION, MinCut
from autoremat.planner.search.planner import SOFT, Planner

PRICES = st.sampled_from([0.0, 1e-10, 1e-7, 1e-5, 1e-2])
SMALL_GRAPHS = graphs(max_ops=10, max_outputs=2).filter(lambda graph: len(graph.forward_values) <= 9)


def total(graph: Graph, price: float) -> float:
    """All costs and prices of a graph together, in seconds: what capacities are scaled by."""
    traffic = traffic_of(graph)
    return sum(v.bytes for v in graph.values) * price + sum(traffic.recompute_seconds) + float(traffic.saving_seconds.sum())


def rounding(graph: Graph, price: float) -> float:
    """What rounding capacities to integers may add to a cut, in seconds."""
    return (len(graph.ops) + len(graph.values)) * total(graph, price) / RESOLUTION


@settings(max_examples=200)
@given(SMALL_GRAPHS, PRICES, st.booleans())
def test_cuts_are_optimal(graph, price, traffic):
    saved = MinCut(graph).cut(price, traffic=traffic).saved
    forbidden = total(graph, price) * FORBIDDEN / RESOLUTION
    best = cheapest_cut(graph, price, forbidden, traffic)
    assert math.isfinite(best)
    assert cut_cost(graph, saved, price, forbidden, traffic) <= best + rounding(graph, price)


def test_many_values_that_cannot_be_recomputed_are_no_contradiction():
    """Three hundred dropouts in checkpoint regions: each is saved against its order, and that adds up."""
    build = GraphBuilder()
    made = [build.source(1)]
    for _ in range(300):
        made.append(build.op([made[-1]], 1, traits=Trait.RANDOM, constraint=Constraint.RECOMPUTE))
    build.op(made, 1, forward=False)
    graph = build.graph(forward_outputs=(made[-1],))
    assert MinCut(graph).cut(1e-9).saved >= frozenset(made[1:-1])


@pytest.mark.parametrize("mebibytes", [1, 64])
def test_the_highest_price_still_counts_bytes(mebibytes):
    """Two results of a 32nd of their input's bytes each are saved in its place, at 1e6 times the price of traffic."""
    traffic = 2 / 12e9  # seconds per byte of two CPU cores
    size = mebibytes * 2**20 // 32
    build = GraphBuilder()
    large = build.op([build.source(0)], 32 * size, traits=Trait.RANDOM)
    small = build.op([large], size, seconds=1e-5), build.op([large], size, seconds=1e-5)
    out = build.op(small, 0)
    build.op(small, 0, forward=False)
    graph = build.graph(forward_outputs=(out,))
    assert MinCut(graph).cut(1e6 * traffic).saved & graph.backward_needs == set(small)
    assert large not in MinCut(graph).cut(1e6 * traffic).saved


def budgets_of(planner: Planner) -> list[int]:
    """From far too little over the least found to more than enough."""
    smallest, baseline = planner.find(Limits(1)).smallest.peak_bytes, planner.baseline.peak_bytes
    spread = max(baseline - smallest, 0)
    return sorted({1, max(1, smallest - 1), *(max(1, smallest + spread * i // 3) for i in range(4)), baseline + 1})


@settings(max_examples=40)
@given(graphs())
def test_a_ceiling_without_a_budget_is_kept_where_that_takes_little_time(graph):
    for ceiling in budgets_of(Planner(graph)):
        planner = Planner(graph, time_limit=600.0, limits=Limits(ceiling))
        chosen, fastest = planner.find().plan, planner.fastest()
        most = fastest.cost_seconds + SOFT * graph.step_seconds
        worth = any(plan.peak_bytes <= ceiling and plan.cost_seconds <= most for plan in planner.plans)
        assert chosen.cost_seconds <= most
        assert chosen.peak_bytes <= ceiling or (not worth and chosen.cost_seconds == fastest.cost_seconds)


@pytest.mark.parametrize("fuses", [True, False])
def test_without_a_budget_the_plan_only_trades_traffic_for_recomputation(fuses):
    """Cheap pointwise results are recomputed, because writing and reading them costs more than making them again."""
    build = GraphBuilder()
    x = build.source(0)
    dear = build.op([x], 1000, seconds=1.0)
    cheap = build.op([dear], 1000, seconds=1e-9, kind=Kind.POINTWISE)
    out = build.op([cheap], 1000, seconds=1.0, kind=Kind.REDUCTION)
    tangent = build.source(0, Role.TANGENT)
    gradient = build.op([dear, cheap, tangent], 0, forward=False, kind=Kind.REDUCTION)
    graph = build.graph(forward_outputs=(out,), backward_outputs=(gradient,), fuses=fuses, saving_seconds_per_byte=1e-9)
    assert Planner(graph).find().plan.saved == ((dear,) if fuses else (dear, cheap))
