"""A plan that somebody has changed is refused, or the change makes no difference: with and without fusion."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from strategies import GraphBuilder

from autoremat.basics.errors import PlanFileError, PlanInvalid
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Kind, Role, Trait
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.memory.live_ranges import LiveRanges
from autoremat.planner.memory.simulator import Timeline
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner

LAYERS = 6
RANDOM, TO_SAVE, TO_RECOMPUTE = 0, 2, 4
"""Forward ops with a promise: one that may not run twice, one that is to be saved, one that is to be recomputed."""


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
    loss, gradient = build.op([x], 4, kind=Kind.REDUCTION), build.source(4, Role.TANGENT)
    for value in reversed(made):
        gradient = build.op([gradient, value], 64, 16, forward=False, kind=Kind.EXTERN)
    return build.graph(
        forward_outputs=(loss,), backward_outputs=(gradient,), fuses=fuses, saving_seconds_per_byte=1e-3,
        fusion_groups_hold_buffers=fuses,
    )  # fmt: skip


def planned(fuses: bool) -> Plan:
    """A plan that recomputes some of the layers, with what is known of its budget."""
    graph = graph_of(fuses)
    values = [graph.ops[index].outputs[0] for index in (RANDOM, TO_SAVE, 8)]
    plan = Plan.of(graph, build_schedule(graph, values))
    return dataclasses.replace(plan, budget_bytes=plan.peak_bytes, lower_bound_bytes=8)


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


def live_ranges(change: Callable[[list[Any]], list[Any]]) -> Callable[[Timeline], dict[str, Any]]:
    def changed(timeline: Timeline) -> dict[str, Any]:
        found = timeline.live_ranges
        return {"live_ranges": LiveRanges(*change([found.values, found.computed_at, found.starts, found.ends, found.bytes]))}

    return changed


def with_one_saved_value_less(plan: Plan) -> Plan:
    changed = dataclasses.replace(plan)
    changed.__dict__["saved"] = plan.saved[1:]  # where a cached property keeps its value
    return changed


def first_repeat(backward: list[int]) -> int:
    return next(position for position, op in enumerate(backward) if op < 2 * LAYERS + 1)


TAMPERINGS: dict[str, Callable[[Plan], Plan]] = {
    "a forward op left out": with_schedule(lambda f, b: f.pop(3), simulated=False),
    "the last forward op left out": with_schedule(lambda f, b: f.pop(), simulated=False),
    "a repeat left out": with_schedule(lambda f, b: b.pop(first_repeat(b)), simulated=False),
    "a backward op left out": with_schedule(lambda f, b: b.pop(), simulated=False),
    "a backward op twice": with_schedule(lambda f, b: b.append(b[-1])),
    "two backward ops exchanged": with_schedule(lambda f, b: b.reverse(), simulated=False),
    "two forward ops exchanged": with_schedule(lambda f, b: f.insert(0, f.pop(1)), simulated=False),
    "a forward op that moves to the backward": with_schedule(lambda f, b: b.insert(0, f.pop(1)), simulated=False),
    "a backward op that moves to the forward": with_schedule(lambda f, b: f.append(b.pop(0)), simulated=False),
    "an op that does not belong to the graph twice": with_schedule(lambda f, b: b.insert(0, RANDOM)),
    "what is to be saved runs twice": with_schedule(lambda f, b: b.insert(0, TO_SAVE)),
    "a repeat more, the figures as before": with_schedule(lambda f, b: b.insert(0, 1), simulated=False),
    "a repeat earlier, the figures as before": with_schedule(lambda f, b: b.insert(0, b.pop(b.index(3))), simulated=False),
    "what is to be recomputed is saved": with_schedule(lambda f, b: b.remove(TO_RECOMPUTE)),
    "an op that may not run twice after all": with_graph(lambda g: changed_op(g, 6, traits=Trait.OPAQUE)),
    "an op that is to be saved after all": with_graph(lambda g: changed_op(g, 6, constraint=Constraint.SAVE)),
    "an op that is to be recomputed after all": with_graph(lambda g: changed_op(g, 8, constraint=Constraint.RECOMPUTE)),
    "a value of other bytes": with_graph(lambda g: changed_value(g, g.ops[6].outputs[0], bytes=65)),
    "an op of another workspace": with_graph(lambda g: changed_op(g, 6, workspace_bytes=9)),
    "bytes beside the step": with_graph(lambda g: dataclasses.replace(g, resident_bytes=1)),
    "another call in flight": with_graph(lambda g: dataclasses.replace(g, in_flight=2)),
    "the other kind of code generator": with_graph(lambda g: dataclasses.replace(g, fuses=not g.fuses)),
    "one byte less at the peak": with_timeline(bytes_at(-1, -1)),
    "one byte more at the peak": with_timeline(bytes_at(-1, 1)),
    "one byte less elsewhere": with_timeline(bytes_at(0, -1)),
    "an execution without its bytes": with_timeline(lambda t: {"bytes_at": t.bytes_at[:-1]}),
    "no bytes": with_timeline(lambda t: {"bytes_at": t.bytes_at[:0]}),
    "a live range left out": with_timeline(live_ranges(lambda parts: [part[1:] for part in parts])),
    "a live range twice": with_timeline(live_ranges(lambda parts: [part[[0, *range(len(part))]] for part in parts])),
    "a live range that ends early": with_timeline(live_ranges(lambda p: [*p[:3], p[3] - (p[3] == p[3].max()), p[4]])),
    "a live range that begins late": with_timeline(live_ranges(lambda p: [*p[:2], p[2] + (p[2] == p[2].max()), *p[3:]])),
    "a live range of other bytes": with_timeline(live_ranges(lambda p: [*p[:4], p[4] + (p[2] == p[2].max())])),
    "a live range of another value": with_timeline(live_ranges(lambda p: [p[0][::-1], *p[1:]])),
    "a bound above the peak": lambda plan: dataclasses.replace(plan, lower_bound_bytes=plan.peak_bytes + 1),
    "a saved value left out": with_one_saved_value_less,
}


@pytest.mark.parametrize("fuses", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_a_tampered_plan_is_refused(tamper, fuses):
    plan = planned(fuses)
    plan.check()
    with pytest.raises(PlanInvalid):
        tamper(plan).check()


@pytest.mark.parametrize("fuses", [False, True], ids=["unfused", "fused"])
def test_a_budget_that_the_true_peak_exceeds_is_refused(fuses):
    plan = planned(fuses)
    lower = with_timeline(bytes_at(-1, -1))(plan)
    with pytest.raises(PlanInvalid, match="over the budget of"):
        dataclasses.replace(lower, budget_bytes=lower.peak_bytes).check()


def test_the_baseline_may_save_what_is_to_be_recomputed():
    baseline = Planner(planned(True).graph).baseline
    baseline.check(ignores_recompute=True)
    with pytest.raises(PlanInvalid, match="op4 is to be recomputed, but v5 is saved for the backward"):
        baseline.check()


IN_A_FILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "fewer bytes of a value": lambda r: _cell(r, "values", 6, "bytes", -1),
    "negative seconds": lambda r: _cell(r, "ops", 6, "seconds", -1.0),
    "seconds that are no number": lambda r: _cell(r, "ops", 6, "seconds", float("nan")),
    "negative workspace": lambda r: _cell(r, "ops", 6, "workspace_bytes", -8),
    "a negative budget": lambda r: r.update(budget_bytes=-1),
    "a bound above the peak": lambda r: r.update(lower_bound_bytes=10**6),
    "an op twice": lambda r: r["backward"].insert(0, RANDOM),
    "a backward op in the forward": lambda r: r["forward"].append(r["backward"].pop()),
}


def _cell(record: dict[str, Any], table: str, row: int, column: str, cell: object) -> None:
    columns, rows = record["graph"][table]["columns"], record["graph"][table]["rows"]
    rows[row][columns.index(column)] = cell


@pytest.mark.parametrize("change", IN_A_FILE.values(), ids=IN_A_FILE.keys())
def test_a_tampered_file_is_refused(change):
    record = json.loads(planned(True).dumps())
    change(record)
    with pytest.raises(PlanFileError, match="holds no valid plan"):
        Plan.loads(json.dumps(record))


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
