"""What saving and running again take where code is fused: against an independent count, and in cases made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from oracles import recompute_seconds, saving_seconds
from strategies import GraphBuilder, graphs

from autoremat.planner.cost.fused_traffic import traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind, Role
from autoremat.planner.search.planner import Planner

SIZE, PER_BYTE = 100, 1e-6
MOVED = SIZE * PER_BYTE / 2
"""Seconds to write or to read a value of these graphs."""


@settings(max_examples=120)
@given(graphs())
def test_seconds_are_those_of_an_independent_count(graph):
    forward = range(graph.num_forward)
    assert traffic_of(graph).recompute_seconds[: graph.num_forward] == pytest.approx(
        [recompute_seconds(graph, op) for op in forward]
    )
    assert traffic_of(graph).saving_seconds == pytest.approx([saving_seconds(graph, v) for v in range(len(graph.values))])


@given(graphs())
def test_a_plan_costs_what_it_runs_again_and_saves(graph):
    plan = Planner(graph).find(None).plan
    assert plan is not None
    recomputed, saved = (
        (recompute_seconds(graph, op) for op in plan.recomputed),
        (saving_seconds(graph, v) for v in plan.saved),
    )
    assert plan.cost_seconds == pytest.approx(sum(recomputed) + sum(saved))


def normalised() -> tuple[Graph, int, int, int]:
    """Returns a graph, its product, the scaled product and the op that scales, as in a layer norm."""
    build = GraphBuilder()
    product = build.op([build.source(SIZE)], SIZE, kind=Kind.EXTERN)
    scaled = build.op([product], SIZE, kind=Kind.POINTWISE, seconds=1e-3, memory_bound_seconds=9e-4)
    loss = build.op([scaled], SIZE, kind=Kind.EXTERN)
    gradient = build.op([build.source(SIZE, Role.TANGENT), scaled], SIZE, kind=Kind.EXTERN, forward=False)
    result = build.op([gradient, product], SIZE, kind=Kind.POINTWISE, forward=False)
    ends = {"forward_outputs": (loss,), "backward_outputs": (result,)}
    graph = build.graph(**ends, fuses=True, saving_seconds_per_byte=PER_BYTE)
    maker = graph.values[scaled].producer
    assert maker is not None
    return graph, product, scaled, maker


def test_what_kernels_of_their_own_read_in_both_halves_is_saved_for_nothing():
    """It is written for the forward's reader, and the backward's reads it whoever has made it. A second run writes it again."""
    graph, product, scaled, maker = normalised()
    assert traffic_of(graph).saving_seconds[scaled] == 0.0
    assert traffic_of(graph).saving_seconds[product] == pytest.approx(MOVED)
    assert traffic_of(graph).recompute_seconds[maker] == pytest.approx(1e-4 + MOVED)
    assert scaled in Planner(graph).find(None).plan.saved


@pytest.mark.parametrize(("inlining", "runs"), [(Inlining.CHEAP, (3, 2, 1)), (Inlining.NEVER, (1, 1, 1))])
def test_a_result_that_several_runs_need_is_computed_in_each(inlining, runs):
    """As a residual stream that each layer's backward reads: each adds it up anew, from the products that it is a sum of."""
    fused = {"seconds": 1e-3, "memory_bound_seconds": 9e-4, "inlining": inlining}
    build = GraphBuilder()
    stream = build.source(SIZE)
    sums = []
    for _ in range(3):
        product = build.op([build.source(SIZE)], SIZE, kind=Kind.EXTERN)
        stream = build.op([stream, product], SIZE, kind=Kind.POINTWISE, **fused)
        sums.append(stream)
    gradient = build.source(SIZE, Role.TANGENT)
    for value in reversed(sums):
        gradient = build.op([gradient, value], SIZE, kind=Kind.POINTWISE, forward=False)
        gradient = build.op([gradient], SIZE, kind=Kind.EXTERN, forward=False)
    graph = build.graph(backward_outputs=(gradient,), fuses=True, saving_seconds_per_byte=PER_BYTE)
    again = [traffic_of(graph).recompute_seconds[graph.values[value].producer] for value in sums]
    assert again == pytest.approx([number * (1e-4 + MOVED) for number in runs])


def test_what_is_spread_over_columns_is_saved_and_not_computed_for_each():
    """As the logarithm of the sum of each row in a log-softmax."""
    build, columns = GraphBuilder(), 1000
    logits = build.op([build.source(SIZE)], SIZE * columns, kind=Kind.EXTERN)
    total = build.op([logits], SIZE, kind=Kind.REDUCTION)
    log = build.op([total], SIZE, kind=Kind.POINTWISE, seconds=2e-5, memory_bound_seconds=1e-5)
    result = build.op([logits, log], SIZE * columns, kind=Kind.POINTWISE, seconds=2e-2, memory_bound_seconds=1e-2)
    loss = build.op([result], 0, kind=Kind.REDUCTION)
    tangent = build.source(0, Role.TANGENT)
    gradient = build.op([tangent, result], SIZE * columns, kind=Kind.POINTWISE, forward=False)
    ends = {"forward_outputs": (loss,), "backward_outputs": (gradient,)}
    graph = build.graph(**ends, fuses=True, saving_seconds_per_byte=PER_BYTE)
    maker = graph.values[log].producer
    assert traffic_of(graph).recompute_seconds[maker] == pytest.approx(columns * 1e-5 + MOVED)
    assert set(Planner(graph).find(None).plan.saved) == {logits, log}
