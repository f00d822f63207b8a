"""From a saved set to a schedule: what is recomputed, when, and how often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import GraphBuilder, chain, graphs, saved_sets

from autoremat.planner.graph.op import Role
from autoremat.planner.graph.schedule import Segments, build_schedule, one_segment
from autoremat.planner.graph.segments import Chain
from autoremat.planner.plans.plan import Plan


def test_recomputation_stands_just_before_its_need_and_happens_once():
    graph = chain(4, forward_outputs=(4,))
    second = graph.ops[1].outputs[0]
    schedule = build_schedule(graph, {second})
    # The first backward op reads values 3 and 4: made from value 2. Value 1 is made only for the third.
    assert schedule.backward == (2, 3, 4, 5, 0, 6, 7)
    assert schedule.recomputed(graph) == (2, 3, 0)
    assert schedule.saved(graph) == (second,)


def test_segments_drop_what_another_segment_made():
    graph = chain(6, forward_outputs=(6,))
    cut = graph.ops[2].outputs[0]
    segments = Segments((0, 0, 0, 1, 1, 1), kept=frozenset({cut}))
    schedule = build_schedule(graph, {cut}, segments)
    assert schedule.backward == (3, 4, 5, 6, 7, 8, 0, 1, 9, 10, 11)
    assert Plan.of(graph, schedule).peak_bytes < Plan.of(graph, build_schedule(graph, {cut}, one_segment(graph))).peak_bytes + 1


def test_a_recomputed_cut_is_kept_until_its_last_reader():
    graph = chain(6, forward_outputs=(6,))
    cuts = frozenset(graph.ops[i].outputs[0] for i in (1, 3))
    schedule = build_schedule(graph, {graph.ops[3].outputs[0]}, Segments((0, 0, 1, 1, 2, 2), kept=cuts))
    # Value 2, on a cut, is made once for the middle segment and still there for the first one.
    assert schedule.recomputed(graph).count(1) == 1


def test_the_values_of_one_op_are_recomputed_together():
    build = GraphBuilder()
    x = build.source(1)
    first = build.op([x], 4, 8)
    out = build.op([first], 1)
    tangent = build.source(1, Role.TANGENT)
    gradient = build.op([first, tangent], 1, forward=False)
    gradient = build.op([first + 1, gradient], 1, forward=False)
    graph = build.graph(forward_outputs=(out,), backward_outputs=(gradient,))
    assert build_schedule(graph, ()).backward == (0, 2, 3)
    # The saved result stays; the other one is made again beside it.
    assert build_schedule(graph, {first}).backward == (2, 0, 3)


@given(st.data())
def test_schedules_are_valid_and_save_no_more_than_asked(data):
    graph = data.draw(graphs())
    saved = data.draw(saved_sets(graph))
    schedule = build_schedule(graph, saved, Chain.of(graph).segments(data.draw(st.integers(1, 6)))[0])
    Plan.of(graph, schedule).check()
    assert set(schedule.saved(graph)) <= saved
    assert list(schedule.forward) == sorted(set(schedule.forward))
    assert set(schedule.forward) >= graph.required_forward


@given(st.data())
def test_in_one_segment_nothing_is_recomputed_twice(data):
    graph = data.draw(graphs(max_outputs=1))
    schedule = build_schedule(graph, data.draw(saved_sets(graph)))
    again = [op for op in schedule.backward if op < graph.num_forward]
    assert len(again) == len(set(again))


@given(st.data())
def test_nothing_is_recomputed_for_nothing(data):
    """Every execution of a forward op in the backward makes something that is read before it is computed again."""
    graph = data.draw(graphs())
    schedule = build_schedule(graph, data.draw(saved_sets(graph)), Chain.of(graph).segments(data.draw(st.integers(1, 6)))[0])
    for at, index in enumerate(schedule.backward):
        if index >= graph.num_forward:
            continue
        made, rest = set(graph.ops[index].outputs), schedule.backward[at + 1 :]
        until = next((i for i, op in enumerate(rest) if op == index), len(rest))
        read = {v for op in rest[: until + 1] for v in graph.ops[op].inputs} | set(graph.backward_outputs)
        assert made & read, f"execution {at} of {graph.ops[index].name} has no reader"


@pytest.mark.parametrize("length", [16, 36, 64])
def test_segments_give_the_square_root_strategy(length):
    """Chen et al. (2016): a chain of n layers in memory O(sqrt n) at one extra forward."""
    graph = chain(length, forward_outputs=(length,))
    root = round(length**0.5)
    segments, crossing = Chain.of(graph).segments(root)
    schedule = build_schedule(graph, {v for values in crossing for v in values}, segments)
    plan = Plan.of(graph, schedule)
    assert plan.peak_bytes <= 2 * root + 3
    assert len(plan.recomputed) <= length
    assert max(plan.recomputed.count(op) for op in range(length)) == 1
