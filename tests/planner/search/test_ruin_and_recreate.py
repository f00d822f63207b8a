"""Ruin and recreate: valid plans that never cost more than the filled plan they start from, and less where greed fails."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from strategies import GraphBuilder, graphs

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role, Trait
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.candidates import EVERY_STRATEGY, Strategies
from autoremat.planner.search.planner import Planner

WITHOUT = EVERY_STRATEGY & ~Strategies.RECREATE


def knapsack(sizes: list[int], seconds: list[float], workspace: int, traits: list[Trait]) -> Graph:
    """One forward op per value. The backward begins with a large workspace, then reads the values one by one."""
    build = GraphBuilder()
    source, gradient = build.source(0), build.source(0, Role.TANGENT)
    made = [
        build.op([source], size, seconds=cost, traits=trait) for size, cost, trait in zip(sizes, seconds, traits, strict=True)
    ]
    loss = build.op(made, 0)
    gradient = build.op([gradient], 1, forward=False, workspace_bytes=workspace)
    for value in made:
        gradient = build.op([value, gradient], 1, forward=False)
    return build.graph(forward_outputs=(loss,), backward_outputs=(gradient,), saving_seconds_per_byte=0.0)


def planned(graph: Graph, budget: int, strategies: Strategies = EVERY_STRATEGY) -> Plan | None:
    return Planner(graph, 60.0, strategies).find(budget).plan


def test_two_small_values_take_the_memory_of_a_large_one():
    # Of 12 free bytes, the large value gains 1.1 s per byte and leaves 2; the small ones gain 1 s per byte and leave none.
    graph = knapsack([10, 6, 6], [11.0, 6.0, 6.0], 20, [Trait.NONE] * 3)
    greedy, recreated = planned(graph, 33, WITHOUT), planned(graph, 33)
    assert greedy is not None
    assert recreated is not None
    assert (greedy.added_seconds, recreated.added_seconds) == (12.0, 11.0)
    assert [graph.values[value].bytes for value in recreated.saved] == [6, 6]


@given(graph=graphs())
@settings(max_examples=40)
@pytest.mark.parametrize("share", [0.6, 0.85])
def test_plans_fit_are_valid_and_never_cost_more(share, graph):
    peak = Planner(graph, 60.0).baseline.peak_bytes
    budget = int(share * peak)
    filled, recreated = planned(graph, budget, WITHOUT), planned(graph, budget)
    assert (filled is None) == (recreated is None)
    if filled is not None and recreated is not None:
        recreated.check()
        assert recreated.peak_bytes <= budget
        assert recreated.cost_seconds <= filled.cost_seconds
        assert planned(graph, budget).schedule == recreated.schedule
