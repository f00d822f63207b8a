"""Stays: their bytes, their rules and their files; several calls in flight, each of which holds what the plan saves."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_oracle import bytes_between_halves, is_valid, replay_bytes
from strategies import FORMS, GraphBuilder, chain, changed, forms_of, graphs, schedules_of, stays_of, with_forms

from autoremat import plan as plan_of
from autoremat.basics.errors import OptionsError, PlanFileError, PlanInvalid
from autoremat.planner.exact import annealing, interval_model
from autoremat.planner.exact.interval_model import IntervalModel
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role
from autoremat.planner.graph.schedule import Schedule, Stay
from autoremat.planner.memory.simulator import simulate
from autoremat.planner.plans.limits import point_of
from autoremat.planner.plans.plan import Plan, Status
from autoremat.planner.plans.plan_file import PlanFile, fitted
from autoremat.planner.search.planner import Planner

A = 1
"""The value of 800 bytes that has forms; op 0 computes it."""


def small_graph(**fields: Any) -> Graph:
    """A value of 800 bytes, which the second op and the last one read."""
    build = GraphBuilder()
    a = build.op([build.source(0)], 800)
    build.values[a] = replace(build.values[a], forms=forms_of(800))
    b = build.op([a], 1)
    c = build.op([b], 1)
    d = build.op([build.source(0, Role.TANGENT), c], 1, forward=False)
    e = build.op([d], 1, forward=False)
    f = build.op([e, a], 1, forward=False)
    return build.graph(backward_outputs=(f,), **fields)


def small_plan(form: str = "host", store: int = 0, free: int = 1, load: int = 4, need: int = 5, **fields: Any) -> Plan:
    return Plan.of(small_graph(**fields), Schedule((0, 1, 2), (3, 4, 5), (Stay(A, form, store, free, load, need),)))


def test_the_bytes_between_the_halves_and_on_the_host():
    plan = small_plan(in_flight=3)
    assert (plan.saved_bytes, plan.stored_bytes, plan.host_bytes, plan.timeline.held_bytes) == (1, 800, 3 * 800, 1)
    late = small_plan(free=3, in_flight=3)
    assert (late.saved_bytes, late.stored_bytes, late.host_bytes, late.timeline.held_bytes) == (801, 800, 3 * 800, 801)
    packed = small_plan("bits", in_flight=3)
    assert (packed.saved_bytes, packed.stored_bytes, packed.host_bytes, packed.timeline.held_bytes) == (101, 800, 0, 101)
    assert point_of(packed).saved_bytes == 101
    assert packed.peak_bytes == small_plan("bits").peak_bytes + 2 * 101


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Graph, Schedule]:
    """Random graphs, fused or not, with up to three calls in flight, and schedules with stays."""
    graph = with_forms(draw(graphs()))
    graph = changed(graph, in_flight=draw(st.integers(1, 3)), resident_bytes=draw(st.sampled_from([0, 7])))
    schedule = draw(schedules_of(graph))
    return graph, replace(schedule, stays=draw(stays_of(graph, schedule)))


@settings(max_examples=100)
@given(schedules())
def test_simulator_and_check_count_stays_by_their_definition(case):
    graph, schedule = case
    plan = Plan.of(graph, schedule)
    assert is_valid(graph, schedule)
    replayed = replay_bytes(graph, schedule)
    assert plan.timeline.bytes_at.tolist() == replayed
    assert plan.peak_bytes == max(replayed) == replayed[plan.timeline.peak_position]
    assert plan.timeline.held_bytes == bytes_between_halves(graph, schedule)
    forms = [graph.values[stay.value].form(stay.form) for stay in schedule.stays]
    assert plan.host_bytes == graph.calls.in_flight * sum(form.host_bytes for form in forms)
    plan.check()
    assert Plan.loads(plan.dumps()).dumps() == plan.dumps()


@st.composite
def any_stays(draw: st.DrawFn, graph: Graph, schedule: Schedule) -> tuple[Stay, ...]:
    """Possible stays, of which each position, value, form and the sequence may be wrong."""
    stays = list(draw(stays_of(graph, schedule)))
    for place, stay in enumerate(stays):
        field = draw(st.sampled_from(["store", "free", "load", "need", "value", "form", "none"]))
        if field == "form":
            stays[place] = replace(stay, form=draw(st.sampled_from([*FORMS, "nowhere"])))
        elif field != "none":
            off = draw(st.sampled_from([-1, 1, 1000, -1000]))
            stays[place] = replace(stay, **{field: getattr(stay, field) + off})
    return tuple(draw(st.permutations(stays)) if draw(st.booleans()) else stays)


@settings(max_examples=100)
@given(st.data())
def test_the_simulator_refuses_exactly_the_stays_that_are_not_possible(data):
    graph, schedule = data.draw(schedules())
    schedule = replace(schedule, stays=data.draw(any_stays(graph, schedule)))
    if is_valid(graph, schedule):
        simulate(graph, schedule)
        return
    with pytest.raises(PlanInvalid):
        simulate(graph, schedule)


def test_a_budget_on_the_host_is_one_of_the_plan():
    plan = small_plan()
    assert replace(plan, host_budget_bytes=800).status is Status.OPTIMAL
    assert replace(plan, host_budget_bytes=799).status is Status.INFEASIBLE
    assert "800 B in 1 values, 800 B on the host" in str(plan)
    assert "stored" not in str(replace(plan, schedule=Schedule(plan.schedule.forward, plan.schedule.backward)))


def forms_in(record: dict[str, Any]) -> list[Any]:
    """The forms of the stored value in the record of a file: each a list of name, store, load and so on."""
    values = record["graph"]["values"]
    found: list[Any] = values["rows"][A][values["columns"].index("forms")]
    return found


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "there is no value 1000": lambda r: r["stays"][0].__setitem__(0, 1000),
    "there is no execution 6": lambda r: r["stays"][0].__setitem__(5, 6),
    "-1 is no whole number": lambda r: r["stays"][0].__setitem__(2, -1),
    "v1 has no form 'disk'": lambda r: r["stays"][0].__setitem__(1, "disk"),
    "do not ascend": lambda r: r["stays"].append(r["stays"][0]),
    "the positions of Stay": lambda r: r["stays"][0].__setitem__(3, 4),
    "two forms of v1 have the same name": lambda r: forms_in(r)[0].__setitem__(0, "bits"),
    "'rail' is not a valid Engine": lambda r: forms_in(r)[0][1].__setitem__(0, "rail"),
    "-0.5 is no number, or too large, or below 0": lambda r: forms_in(r)[0][2].__setitem__(1, -0.5),
    "-1 is no whole number, or": lambda r: forms_in(r)[1].__setitem__(3, -1),
    "missing .* required positional arguments": lambda r: forms_in(r).append(["void"]),
    "no Form": lambda r: forms_in(r)[0].extend([0, 0]),
    "0 is no whole number, or too large": lambda r: forms_in(r)[1].__setitem__(3, 10**30),
}


@pytest.mark.parametrize(("message", "change"), WRONG.items(), ids=WRONG.keys())
def test_a_file_with_wrong_forms_or_stays_is_refused(message, change):
    record = json.loads(small_plan("bits").dumps())
    change(record)
    with pytest.raises(PlanFileError, match=message):
        Plan.loads(json.dumps(record))


def test_early_files_state_four_figures_of_a_transfer():
    plan = small_plan("bits")
    record = json.loads(plan.dumps())
    for form in forms_in(record):
        for transfer in form[1:3]:
            transfer.append(0.5)
    assert Plan.loads(json.dumps(record)) == plan


def test_a_plan_with_stays_is_refused_for_a_graph_without_their_forms():
    plan = small_plan()
    graph = replace(plan.graph, values=tuple(replace(value, forms=()) for value in plan.graph.values))
    assert fitted([PlanFile.of(plan)], plan.graph)[1].schedule == plan.schedule
    with pytest.raises(PlanFileError, match="breaks a rule of this graph: v1 has no form 'host'"):
        fitted([PlanFile.of(plan)], graph)


def test_a_graph_of_one_phase_has_no_calls_in_flight():
    with pytest.raises(ValueError, match="in_flight=2"):
        changed(Graph.from_dag([1.0], [1], []), in_flight=2)
    with pytest.raises(ValueError, match="in_flight=0"):
        changed(chain(2), in_flight=0)


@pytest.mark.parametrize("fields", [{"fuses": True}, {"in_flight": 2}, {"resident_bytes": 5}], ids=str)
def test_exact_models_leave_graphs_that_are_not_plain(fields):
    plain = chain(10, size=100, forward_outputs=(10,))
    graph = changed(plain, **fields)
    assert (plain.is_plain, graph.is_plain) == (True, False)
    (name, value), budget = *fields.items(), 1
    with pytest.raises(OptionsError, match=f"other calls are open .*{name}={value}.* Use 'auto'"):
        plan_of(graph, memory_budget=0.7, solver="ilp")
    with pytest.raises(ValueError, match="this graph fuses or other calls are open"):
        IntervalModel(graph, 1)
    found = Planner(graph).judge(Planner(graph).baseline, budget)
    assert annealing.improve(graph, budget, 1.0, 0, found, 0.0, math.inf) is found
    assert interval_model.improve(graph, budget, found, 0.0, math.inf) is found
