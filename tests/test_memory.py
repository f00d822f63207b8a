"""The simulator: small cases by hand, and random graphs against an independent replay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_oracle import replay_bytes
from strategies import GraphBuilder, chain, graphs, saved_sets

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind, Role
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.graph.segments import Chain
from autoremat.planner.memory.simulator import Timeline, simulate


def run_all(graph: Graph) -> Timeline:
    """Every op once, in order."""
    count = graph.num_forward
    return simulate(graph, Schedule(tuple(range(count)), tuple(range(count, len(graph.ops)))))


def test_a_copy_lives_from_its_making_to_its_last_reader():
    build = GraphBuilder()
    a = build.op([build.source(1000)], 10)
    b = build.op([a], 200)
    build.op([a, b], 3000)
    build.op([b], 40000)
    assert run_all(build.graph()).bytes_at.tolist() == [10, 210, 3210, 40200]


def test_forward_outputs_and_gradients_stay_and_inputs_cost_nothing():
    build = GraphBuilder()
    x = build.source(10**6)
    a = build.op([x], 10)
    build.op([x], 5)
    gradient = build.op([x], 200, forward=False)
    build.op([x], 7, forward=False)
    graph = build.graph(forward_outputs=(a,), backward_outputs=(gradient,))
    assert run_all(graph).bytes_at.tolist() == [10, 15, 210, 217]


def test_workspace_counts_while_its_op_runs():
    build = GraphBuilder()
    a = build.op([build.source(1)], 10, workspace_bytes=1000)
    build.op([a], 1)
    assert run_all(build.graph()).bytes_at.tolist() == [1010, 11]


def test_tangents_are_held_through_the_whole_backward_and_only_there():
    build = GraphBuilder()
    tangent = build.source(50, Role.TANGENT)
    a = build.op([build.source(1)], 10)
    first = build.op([tangent, a], 2, forward=False)
    build.op([first], 3, forward=False)
    assert run_all(build.graph()).bytes_at.tolist() == [10, 50 + 10 + 2, 50 + 2 + 3]


def test_a_recomputed_value_is_alive_twice_but_not_between():
    graph = chain(3)
    saved, recomputed = Schedule((0, 1, 2), (3, 4, 5)), Schedule((0, 1, 2), (0, 1, 2, 3, 0, 4, 0, 5))
    # Forward 1, 2, 3 values alive; backward op i reads two activations and makes a gradient.
    assert simulate(graph, saved).bytes_at.tolist() == [1, 2, 3, 4, 4, 3]
    # In the forward nothing outlives its reader; in the backward value 1 is made three times, each time for one reader.
    assert simulate(graph, recomputed).bytes_at.tolist() == [1, 2, 2, 1, 2, 2, 3, 3, 4, 2, 3]


def test_a_multi_output_op_makes_all_its_results_at_once():
    build = GraphBuilder()
    a = build.op([build.source(1)], 10, 200, 0)
    build.op([a], 1)
    assert run_all(build.graph()).bytes_at.tolist() == [210, 11]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        # a -> b -> c, each of another size
        ((Kind.EXTERN, Kind.POINTWISE, Kind.POINTWISE), [1, 1, 101]),  # b is computed inside c, which reads a
        ((Kind.POINTWISE, Kind.POINTWISE, Kind.POINTWISE), [0, 0, 100]),
        ((Kind.EXTERN, Kind.POINTWISE, Kind.REDUCTION), [1, 1, 101]),
        ((Kind.EXTERN, Kind.POINTWISE, Kind.EXTERN), [1, 11, 110]),  # an extern kernel reads from memory
        ((Kind.EXTERN, Kind.REDUCTION, Kind.POINTWISE), [1, 11, 110]),  # reductions are materialised
        ((Kind.EXTERN, Kind.EXTERN, Kind.POINTWISE), [1, 11, 110]),
    ],
)
def test_fusion_keeps_pointwise_results_from_existing(kinds, expected):
    def build_graph(fuses: bool) -> Graph:
        build = GraphBuilder()
        a = build.op([build.source(0)], 1, kind=kinds[0])
        b = build.op([a], 10, kind=kinds[1])
        build.op([b], 100, kind=kinds[2])
        return build.graph(fuses=fuses)

    assert run_all(build_graph(True)).bytes_at.tolist() == expected
    assert run_all(build_graph(False)).bytes_at.tolist() == [1, 11, 110]


def fan(readers: int, extern_between: bool = False, saved: bool = False, reads: int = 1, most: int = 4, **fields: Any) -> Graph:
    """A pointwise result of 10 bytes, computed from `reads` inputs by way of a chain of two, with several pointwise readers of
    0 bytes."""
    build = GraphBuilder()
    sources = [build.source(0) for _ in range(reads)]
    a = build.op(sources, 10, kind=Kind.POINTWISE, **fields)
    b = build.op([a], 10, kind=Kind.POINTWISE)
    for index in range(readers):
        if extern_between and index == readers - 1:
            build.op(sources, 0)
        build.op([b], 0, kind=Kind.POINTWISE, forward=not (saved and index == readers - 1))
    return build.graph(fuses=True, most_reads=most)


@pytest.mark.parametrize(
    ("graph", "peak"),
    [
        (fan(1), 0),
        (fan(5), 0),
        (fan(5, extern_between=True), 0),  # each of its readers computes it
        (fan(5, extern_between=True, reads=4), 0),
        (fan(5, extern_between=True, reads=5), 10),  # reads too much to be computed again by each reader
        (fan(5, extern_between=True, reads=5, most=5), 0),  # the user has set `realize_reads_threshold`
        (fan(5, reads=5), 0),  # made and read by one kernel
        (fan(2, extern_between=True, inlining=Inlining.ONCE), 10),
        (fan(1, extern_between=True, inlining=Inlining.ONCE, reads=5), 0),
        (fan(1, inlining=Inlining.NEVER), 0),
        (fan(1, extern_between=True, inlining=Inlining.NEVER), 10),  # what reads it is computed by who reads that
        (fan(1, saved=True), 10),  # crosses to the backward
        (fan(0), 10),  # nobody could inline it
    ],
)
def test_when_a_pointwise_result_is_inlined(graph, peak):
    assert run_all(graph).peak_bytes == peak


def test_one_call_holds_what_it_reads_and_makes_from_beginning_to_end():
    build = GraphBuilder()
    a = build.op([build.source(0)], 1)
    b = build.op([a], 10, kind=Kind.REDUCTION)
    c = build.op([b], 100, kind=Kind.REDUCTION)
    d = build.op([c], 1000, kind=Kind.REDUCTION)
    build.op([d], 0)
    e = build.op([d], 1000, kind=Kind.POINTWISE, in_place=(d,))
    build.op([build.source(0)], 5, kind=Kind.REDUCTION)
    build.op([e], 0)
    apart, together = (build.graph(fuses=True, fusion_groups_hold_buffers=whole) for whole in (False, True))
    assert run_all(apart).bytes_at.tolist() == [1, 11, 110, 1100, 1000, 1000, 1005, 1000]
    # A storage that is taken over passes on where it did.
    assert run_all(together).bytes_at.tolist() == [1, 1111, 1111, 1111, 1000, 1005, 1005, 1000]


def overwriting(size: int = 10, *, in_place: bool = True, read_later: bool = False, held: bool = False) -> Graph:
    """An extern result of 10 bytes, and a reduction of `size` bytes that reads it through an inlined pointwise result."""
    build = GraphBuilder()
    a = build.op([build.source(0)], 10)
    b = build.op([a], 10, kind=Kind.POINTWISE, in_place=(a,))
    build.op([b], size, kind=Kind.REDUCTION, in_place=(b,) if in_place else ())
    if read_later:
        build.op([a], 0)
    return build.graph(fuses=True, forward_outputs=(a,) if held else ())


@pytest.mark.parametrize(
    ("graph", "peak"),
    [
        (overwriting(), 10),
        (overwriting(in_place=False), 20),
        (overwriting(size=8), 18),  # of another size
        (overwriting(read_later=True), 20),
        (overwriting(held=True), 20),  # the caller has it
    ],
)
def test_a_result_takes_the_place_of_what_is_read_for_the_last_time(graph, peak):
    assert run_all(graph).peak_bytes == peak


def test_an_output_is_materialised_even_if_it_could_fuse():
    build = GraphBuilder()
    a = build.op([build.source(0)], 10, kind=Kind.POINTWISE)
    build.op([a], 0, kind=Kind.POINTWISE)
    assert run_all(build.graph(fuses=True, forward_outputs=(a,))).bytes_at.tolist() == [10, 10]


def test_reading_what_was_never_made_is_refused():
    with pytest.raises(PlanInvalid, match=r"execution 1 \(op2\) reads v2, which was never computed"):
        simulate(chain(3), Schedule((0, 2), ()))


def test_an_empty_schedule_needs_nothing():
    timeline = simulate(chain(2), Schedule((), ()))
    assert (timeline.peak_bytes, timeline.peak_position) == (0, 0)


@settings(max_examples=100)
@given(st.data())
def test_simulation_equals_an_independent_replay(data):
    graph = data.draw(graphs())
    segments, _ = Chain.of(graph).segments(data.draw(st.integers(1, 6)))
    schedule = build_schedule(graph, data.draw(saved_sets(graph)), segments)
    timeline = simulate(graph, schedule)
    replayed = replay_bytes(graph, schedule)
    assert timeline.bytes_at.tolist() == replayed
    assert timeline.peak_bytes == max(replayed)
    assert replayed[timeline.peak_position] == max(replayed)


@given(st.data())
def test_what_is_alive_adds_up(data):
    graph = data.draw(graphs())
    timeline = simulate(graph, build_schedule(graph, data.draw(saved_sets(graph))))
    tangents = sum(v.bytes for v in graph.values if v.role is Role.TANGENT)
    for position, total in enumerate(timeline.bytes_at.tolist()):
        sizes = [r.bytes for r in timeline.live_ranges if r.start <= position <= r.end]
        in_backward = position >= len(timeline.schedule.forward)
        workspace = graph.ops[timeline.schedule.sequence[position]].workspace_bytes
        assert sum(sizes) + tangents * in_backward + workspace == total


@given(graphs(fuses=True))
def test_fusion_materialises_all_outputs(graph):
    # Inlining makes inputs live longer, but no moment needs more than all that was ever made.
    timeline = run_all(graph)
    workspace = max(op.workspace_bytes for op in graph.ops)
    assert timeline.peak_bytes <= sum(v.bytes for v in graph.values) + workspace
    assert {c.value for c in timeline.live_ranges} >= set(graph.forward_outputs) | set(graph.backward_outputs)
