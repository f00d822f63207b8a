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


def test_a_recomputed_value_is_alive_twice_but_not_between():
    graph = chain(3)
    saved, recomputed = Schedule((0, 1, 2), (3, 4, 5)), Schedule((0, 1, 2), (0, 1, 2, 3, 0, 4, 0, 5))
    # Forward 1, 2, 3 values alive; backward op i reads two activations and makes a gradient.
    assert simulate(graph, saved).bytes_at.tolist() == [1, 2, 3, 4, 4, 3]
    # In the forward nothing outlives its reader; in the backward value 1 is made three times, each time for one reader.
    assert simulate(graph, recomputed).bytes_at.tolist() == [1, 2, 2, 1, 2, 2, 3, 3, 4, 2, 3]


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


def test_reading_what_was_never_made_is_refused():
    with pytest.raises(PlanInvalid, match=r"execution 1 \(op2\) reads v2, which was never computed"):
        simulate(chain(3), Schedule((0, 2), ()))


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
