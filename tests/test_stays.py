"""Stays: the bytes of values that are kept in a form between the halves, the rules of stays, and stays in plan files."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_oracle import bytes_between_halves, is_valid, replay_bytes
from strategies import FORMS, GraphBuilder, forms_of, graphs, saved_sets, stays_of, with_forms

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role
from autoremat.planner.graph.schedule import Schedule, Stay, build_schedule
from autoremat.planner.graph.segments import Chain
from autoremat.planner.memory import allocations
from autoremat.planner.memory.simulator import simulate
from autoremat.planner.plans.check import check_stays
from autoremat.planner.plans.plan import Plan, Status
from autoremat.planner.plans.replay import replay
from autoremat.report.peak_snapshot import TensorCategory, peak_of, profile_of

A = 1
"""The value of 800 bytes that has forms; op 0 computes it."""


def small_graph(**fields: Any) -> Graph:
    """A value of 800 bytes, which the second op and the last one read."""
    build = GraphBuilder()
    a = build.op([build.source(0)], 800)
    build.values[a] = dataclasses.replace(build.values[a], forms=forms_of(800))
    b = build.op([a], 1)
    c = build.op([b], 1)
    d = build.op([build.source(0, Role.TANGENT), c], 1, forward=False)
    e = build.op([d], 1, forward=False)
    f = build.op([e, a], 1, forward=False)
    return build.graph(backward_outputs=(f,), **fields)


def small_plan(form: str = "host", store: int = 0, free: int = 1, load: int = 4, need: int = 5, **fields: Any) -> Plan:
    return Plan.of(small_graph(**fields), Schedule((0, 1, 2), (3, 4, 5), (Stay(A, form, store, free, load, need),)))


@pytest.mark.parametrize(
    ("stay", "expected"),
    [
        ({}, [800, 801, 2, 2, 802, 802]),
        ({"free": 2}, [800, 801, 802, 2, 802, 802]),
        ({"load": 5}, [800, 801, 2, 2, 2, 802]),
        ({"load": 3, "need": 3}, [800, 801, 2, 802, 802, 802]),
        ({"form": "bits"}, [903, 904, 102, 102, 907, 907]),
        ({"form": "bits", "store": 1}, [800, 904, 102, 102, 907, 907]),
        ({"form": "bits", "load": 3, "need": 4}, [903, 904, 102, 907, 907, 802]),
        ({"form": "shards"}, [1200, 1201, 402, 402, 2002, 2002]),
    ],
    ids=str,
)
def test_the_bytes_of_a_stay(stay, expected):
    plan = small_plan(**stay)
    assert plan.timeline.bytes_at.tolist() == expected == replay_bytes(plan.graph, plan.schedule)
    plan.check()


def test_the_bytes_between_the_halves_and_on_the_host():
    plan = small_plan(in_flight=3)
    assert (plan.saved_bytes, plan.stored_bytes, plan.host_bytes, plan.timeline.held_bytes) == (1, 800, 3 * 800, 1)
    packed = small_plan("bits", in_flight=3)
    assert (packed.saved_bytes, packed.stored_bytes, packed.host_bytes, packed.timeline.held_bytes) == (101, 800, 0, 101)
    assert packed.peak_bytes == small_plan("bits").peak_bytes + 2 * 101


def test_a_stored_value_is_freed_twice():
    assert [A in freed for freed in small_plan("bits").frees] == [False, True, False, False, False, True]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Graph, Schedule]:
    """Random graphs, fused or not, with up to three calls in flight, and schedules with stays."""
    graph = with_forms(draw(graphs()))
    graph = dataclasses.replace(graph, in_flight=draw(st.integers(1, 3)), resident_bytes=draw(st.sampled_from([0, 7])))
    segments, _ = Chain.of(graph).segments(draw(st.integers(1, 4)))
    schedule = build_schedule(graph, draw(saved_sets(graph)), segments)
    return graph, dataclasses.replace(schedule, stays=draw(stays_of(graph, schedule)))


@settings(max_examples=100)
@given(schedules())
def test_simulator_and_check_count_stays_by_their_definition(case):
    graph, schedule = case
    plan, replayed = Plan.of(graph, schedule), replay(graph, schedule)
    assert is_valid(graph, schedule)
    assert plan.timeline.bytes_at.tolist() == list(replayed.bytes_at) == replay_bytes(graph, schedule)
    assert plan.timeline.held_bytes == bytes_between_halves(graph, schedule)
    forms = [graph.values[stay.value].form(stay.form) for stay in schedule.stays]
    assert plan.host_bytes == replayed.host_bytes == graph.in_flight * sum(form.host_bytes for form in forms)
    plan.check()
    assert Plan.loads(plan.dumps()).dumps() == plan.dumps()


def most_allocated(step: allocations.Allocations) -> int:
    """The most bytes that are allocated at once."""
    sizes: dict[int, int] = {}
    most = 0
    for number, size in step.events:
        sizes[number] = 0 if size == allocations.FREED else size
        most = max(most, sum(sizes.values()))
    return most


@settings(max_examples=50)
@given(schedules())
def test_allocations_snapshot_and_profile_add_up_to_the_peak(case):
    plan = Plan.of(*case)
    assert most_allocated(allocations.simulated(plan.timeline)) + plan.timeline.beside_bytes == plan.peak_bytes
    assert sum(allocations.beside_sizes(plan.timeline)) == plan.timeline.beside_bytes
    snapshot, profile = peak_of(plan, listed=None), profile_of(plan)
    assert snapshot is not None
    assert profile is not None
    assert sum(tensor.bytes for tensor in snapshot.live) == plan.peak_bytes == max(profile.totals)


@st.composite
def any_stays(draw: st.DrawFn, graph: Graph, schedule: Schedule) -> tuple[Stay, ...]:
    """Possible stays, of which each position, value, form and the sequence may be wrong."""
    stays = list(draw(stays_of(graph, schedule)))
    for place, stay in enumerate(stays):
        field = draw(st.sampled_from(["store", "free", "load", "need", "value", "form", "none"]))
        if field == "form":
            stays[place] = dataclasses.replace(stay, form=draw(st.sampled_from([*FORMS, "nowhere"])))
        elif field != "none":
            off = draw(st.sampled_from([-1, 1, 1000, -1000]))
            stays[place] = dataclasses.replace(stay, **{field: getattr(stay, field) + off})
    return tuple(draw(st.permutations(stays)) if draw(st.booleans()) else stays)


@settings(max_examples=100)
@given(st.data())
def test_simulator_and_check_refuse_exactly_the_stays_that_are_not_possible(data):
    graph, schedule = data.draw(schedules())
    schedule = dataclasses.replace(schedule, stays=data.draw(any_stays(graph, schedule)))
    if is_valid(graph, schedule):
        check_stays(graph, schedule)
        simulate(graph, schedule)
        return
    for refuse in (check_stays, simulate):
        with pytest.raises(PlanInvalid):
            refuse(graph, schedule)
