"""A plan that somebody has changed is refused, in each of the ways that the tables name: with and without fusion."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from strategies import GraphBuilder, changed, with_forms

from autoremat.basics.errors import PlanFileError, PlanInvalid
from autoremat.planner.graph.forms import Engine, Transfer
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Kind, Role, Trait
from autoremat.planner.graph.schedule import Schedule, Stay, build_schedule
from autoremat.planner.memory.simulator import Timeline
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner

LAYERS = 6
RANDOM, TO_SAVE, TO_RECOMPUTE, ASIDE = 0, 2, 4, 2 * LAYERS + 1
"""Forward ops with a promise: one that may not run twice, one that is to be saved, one that is to be recomputed, and one to be
saved that only the backward needs."""


def graph_of(fuses: bool) -> Graph:
    """Layers of two ops, of which the second is pointwise, and a backward that reads the result of each first op."""
    build = GraphBuilder()
    x, made = build.source(64), []
    for _ in range(LAYERS):
        promise = {
            RANDOM: {"traits": Trait.RANDOM},
            TO_SAVE: {"constraint": Constraint.SAVE},
            TO_RECOMPUTE: {"constraint": Constraint.RECOMPUTE},
        }
        made.append(build.op([x], 64, workspace_bytes=8, **promise.get(len(build.ops), {})))
        x = build.op([made[-1]], 64, kind=Kind.POINTWISE)
    loss = build.op([x], 4, kind=Kind.REDUCTION)
    made.append(build.op([made[0]], 64, constraint=Constraint.SAVE))
    gradient = build.source(4, Role.TANGENT)
    for value in reversed(made):
        gradient = build.op([gradient, value], 64, 16, forward=False, kind=Kind.EXTERN)
    return build.graph(
        forward_outputs=(loss,), backward_outputs=(gradient,), fuses=fuses, saving_seconds_per_byte=1e-3,
        fusion_groups_hold_buffers=fuses,
    )  # fmt: skip


def planned(fuses: bool) -> Plan:
    """A plan that recomputes some of the layers, with what is known of its budget."""
    graph = graph_of(fuses)
    values = [graph.ops[index].outputs[0] for index in (RANDOM, TO_SAVE, 8, ASIDE)]
    plan = Plan.of(graph, build_schedule(graph, values))
    return dataclasses.replace(plan, budget_bytes=plan.peak_bytes, lower_bound_bytes=8)


STORED, PACKED = 3, 9
"""The results of forward ops 2 and 8. Both have a stay in the plan with stays."""


def planned_with_stays(fuses: bool) -> Plan:
    """The plan with one value on the host and one packed as bits, in three open calls."""
    graph, schedule = changed(with_forms(graph_of(fuses)), in_flight=3), planned(fuses).schedule
    stays = (Stay(STORED, "host", 3, 5, 17, 19), Stay(PACKED, "bits", 9, 10, 14, 15))
    plan = Plan.of(graph, replace(schedule, stays=stays))
    return replace(plan, budget_bytes=plan.peak_bytes, host_budget_bytes=plan.host_bytes)


def with_stays(change: Callable[[Stay, Stay], Sequence[Stay]]) -> Callable[[Plan], Plan]:
    """A tampering with the stays alone. The figures are those of before."""

    def tamper(plan: Plan) -> Plan:
        schedule = replace(plan.schedule, stays=tuple(change(*plan.schedule.stays)))
        return replace(plan, schedule=schedule, timeline=replace(plan.timeline, schedule=schedule), budget_bytes=None)

    return tamper


def with_form(**fields: Any) -> Callable[[Plan], Plan]:
    """A tampering with the forms of the packed value."""

    def change(graph: Graph) -> Graph:
        forms = tuple(replace(form, **fields) for form in graph.values[PACKED].forms)
        return changed_value(graph, PACKED, forms=forms)

    return with_graph(change)


def with_schedule(change: Callable[[list[int], list[int]], object], simulated: bool = True) -> Callable[[Plan], Plan]:
    """A tampering with the executions; the figures are those of the new schedule where the simulator takes it."""

    def tamper(plan: Plan) -> Plan:
        forward, backward = list(plan.schedule.forward), list(plan.schedule.backward)
        change(forward, backward)
        schedule = Schedule(tuple(forward), tuple(backward))
        if not simulated:
            return dataclasses.replace(plan, schedule=schedule)
        return dataclasses.replace(plan, schedule=schedule, timeline=Plan.of(plan.graph, schedule).timeline, budget_bytes=None)

    return tamper


def with_timeline(change: Callable[[Timeline], dict[str, Any]]) -> Callable[[Plan], Plan]:
    return lambda plan: dataclasses.replace(plan, timeline=dataclasses.replace(plan.timeline, **change(plan.timeline)))


def with_graph(change: Callable[[Graph], Graph]) -> Callable[[Plan], Plan]:
    return lambda plan: dataclasses.replace(plan, graph=change(plan.graph))


def changed_op(graph: Graph, index: int, **fields: Any) -> Graph:
    ops = list(graph.ops)
    ops[index] = dataclasses.replace(ops[index], **fields)
    return dataclasses.replace(graph, ops=tuple(ops))


def changed_value(graph: Graph, number: int, **fields: Any) -> Graph:
    values = list(graph.values)
    values[number] = dataclasses.replace(values[number], **fields)
    return dataclasses.replace(graph, values=tuple(values))


def bytes_at(position: int, more: int) -> Callable[[Timeline], dict[str, Any]]:
    def change(timeline: Timeline) -> dict[str, Any]:
        changed = timeline.bytes_at.copy()
        changed[timeline.peak_position if position < 0 else position] += more
        return {"bytes_at": changed}

    return change


def lowered(timeline: Timeline) -> dict[str, Any]:
    """One byte less wherever the peak is reached."""
    return {"bytes_at": timeline.bytes_at - (timeline.bytes_at == timeline.peak_bytes)}


def with_another_sequence(plan: Plan) -> Plan:
    schedule = dataclasses.replace(plan.schedule)
    schedule.__dict__["sequence"] = (*plan.sequence[:-1], plan.sequence[-2])
    return dataclasses.replace(plan, schedule=schedule)


def first_repeat(backward: list[int]) -> int:
    return next(position for position, op in enumerate(backward) if op <= ASIDE)


Tamper = Callable[[Plan], Plan]

EXECUTIONS: dict[str, Tamper] = {
    "a forward op twice": with_schedule(lambda f, b: f.insert(8, 6)),
    "a backward op again, counted from the end": with_schedule(lambda f, b: b.append(-1), simulated=False),
    "a sequence that is not that of the halves": with_another_sequence,
}

CONSTRAINTS: dict[str, Tamper] = {
    "what is to be saved runs in the backward alone": with_schedule(lambda f, b: b.insert(0, f.pop())),
    "an op that may not run twice after all": with_graph(lambda g: changed_op(g, 6, traits=Trait.OPAQUE)),
    "an op that is to be saved after all": with_graph(lambda g: changed_op(g, 6, constraint=Constraint.SAVE)),
    "an op that is to be recomputed after all": with_graph(lambda g: changed_op(g, 8, constraint=Constraint.RECOMPUTE)),
}

TIMELINE: dict[str, Tamper] = {
    "an execution without its bytes": with_timeline(lambda t: {"bytes_at": t.bytes_at[:-1]}),
    "a value of other bytes": with_graph(lambda g: changed_value(g, g.ops[6].outputs[0], bytes=65)),
    "an op of another workspace": with_graph(lambda g: changed_op(g, 6, workspace_bytes=9)),
    "bytes beside the step": with_graph(lambda g: changed(g, resident_bytes=1)),
    "another call in flight": with_graph(lambda g: changed(g, in_flight=2)),
    "the other kind of code generator": with_graph(lambda g: changed(g, fuses=not g.machine.fuses)),
    "fusion groups that hold no buffers": with_graph(lambda g: changed(g, fusion_groups_hold_buffers=False)),
    "another schedule": with_timeline(lambda t: {"schedule": Schedule(t.schedule.forward, ())}),
}

PEAK: dict[str, Tamper] = {"one byte less": with_timeline(bytes_at(-1, -1)), "one byte more": with_timeline(bytes_at(-1, 1))}

BUDGET: dict[str, Tamper] = {
    "the true peak exceeds it": lambda p: dataclasses.replace(with_timeline(lowered)(p), budget_bytes=p.peak_bytes - 1),
    "less than nothing": lambda plan: dataclasses.replace(plan, budget_bytes=-1),
    "a bound of bytes above the peak": lambda plan: dataclasses.replace(plan, lower_bound_bytes=plan.peak_bytes + 1),
    "a bound of seconds below nothing": lambda plan: dataclasses.replace(plan, lower_bound_seconds=-1.0),
    "a bound of seconds that is no number": lambda plan: dataclasses.replace(plan, lower_bound_seconds=math.nan),
}

STAYS: dict[str, Tamper] = {
    "a value freed in the backward, the figures as before": with_stays(lambda one, two: [replace(one, free=14), two]),
    "a value counted from the end": with_stays(lambda one, two: [replace(one, value=-20), two]),
    "an output": with_graph(lambda g: dataclasses.replace(g, forward_outputs=(*g.forward_outputs, PACKED))),
    "a stay left out, the figures as before": with_stays(lambda one, two: [one]),
    "no stays, the figures as before": with_stays(lambda one, two: []),
    "another form, the figures as before": with_stays(lambda one, two: [one, replace(two, form="host")]),
    "as shards, the figures as before": with_stays(lambda one, two: [replace(one, form="shards"), two]),
    "a store earlier, the figures as before": with_stays(lambda one, two: [one, replace(two, store=8)]),
    "a free later, the figures as before": with_stays(lambda one, two: [one, replace(two, free=12)]),
    "a load earlier, the figures as before": with_stays(lambda one, two: [replace(one, load=14), two]),
    "a need earlier, the figures as before": with_stays(lambda one, two: [one, replace(two, need=two.load)]),
    "more bytes of a form on the device": with_form(device_bytes=9),
    "more bytes of a form on the host": with_form(host_bytes=1),
    "more bytes while a form is made": with_form(store=Transfer(Engine.COMPUTE, 0.0, 4)),
    "more bytes while a form is read": with_form(load=Transfer(Engine.COMPUTE, 0.0, 6)),
    "a value without forms": with_graph(lambda g: changed_value(g, PACKED, forms=())),
    "a budget on the host below nothing": lambda plan: replace(plan, host_budget_bytes=-1),
}

PARTS = (EXECUTIONS, CONSTRAINTS, TIMELINE, PEAK, BUDGET, STAYS)
TAMPERINGS = dict(zip(("executions", "constraints", "timeline", "peak", "budget", "stays"), PARTS, strict=True))

ONLY_FUSED = "fusion groups that hold no buffers"


def cases() -> Iterator[Any]:
    """Each tampering, unfused and fused."""
    for part, kinds in TAMPERINGS.items():
        for (kind, tamper), fuses in itertools.product(kinds.items(), (False, True)):
            planner = planned_with_stays if part == "stays" else planned
            if fuses or kind != ONLY_FUSED:
                yield pytest.param(tamper, planner(fuses), id=f"{part}: {kind}, {'fused' if fuses else 'unfused'}")


@pytest.mark.parametrize(("tamper", "plan"), [*cases()])
def test_a_tampered_plan_is_refused(tamper, plan):
    plan.check()
    with pytest.raises(PlanInvalid):
        tamper(plan).check()


@pytest.mark.parametrize("fuses", [False, True], ids=["unfused", "fused"])
def test_the_refusal_names_the_op_and_the_figure(fuses):
    plan = planned(fuses)
    for tamper, message in (
        (EXECUTIONS["a forward op twice"], "op6 runs twice in the forward"),
        (EXECUTIONS["a backward op again, counted from the end"], "the backward's own ops do not all run once"),
        (CONSTRAINTS["what is to be saved runs in the backward alone"], "op13 is to be saved, but runs .* in the backward"),
        (BUDGET["the true peak exceeds it"], "the peak is"),
        (BUDGET["a bound of seconds that is no number"], "must be numbers of at least 0"),
    ):
        with pytest.raises(PlanInvalid, match=message):
            tamper(plan).check()


def test_the_baseline_may_save_what_is_to_be_recomputed():
    baseline = Planner(planned(True).graph).baseline
    baseline.check(ignores_recompute=True)
    with pytest.raises(PlanInvalid, match="op4 is to be recomputed, but v5 is saved for the backward"):
        baseline.check()


def test_figures_that_follow_from_the_schedule_are_counted_and_never_read():
    plan = planned(True)
    again = Plan.loads(plan.dumps())
    for name in ("saved", "saved_bytes", "recomputed", "added_seconds", "cost_seconds", "peak_bytes"):
        assert getattr(again, name) == getattr(plan, name)
        with pytest.raises(PlanFileError, match=f"a plan file has no field {name!r}"):
            Plan.loads(json.dumps(json.loads(plan.dumps()) | {name: 1}))


def test_a_key_that_stands_twice_in_a_file_is_refused_and_blanks_are_not():
    text = planned(True).dumps()
    assert Plan.loads(text + " \n" * 100).dumps() == text
    with pytest.raises(PlanFileError, match="the key 'version' stands there twice"):
        Plan.loads('{"version":4,' + text[1:])


@pytest.mark.parametrize("value", [{"bytes": -1}, {"workspace_bytes": -1}, {"seconds": -1.0}, {"seconds": float("nan")}])
def test_a_graph_of_negative_figures_is_refused(value):
    change = changed_value if "bytes" in value else changed_op
    with pytest.raises(ValueError, match="bytes"):
        change(graph_of(True), 3, **value)
