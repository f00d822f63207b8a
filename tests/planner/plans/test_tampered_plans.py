"""A plan that somebody has changed is refused, in each of the ways that the table names."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from strategies import GraphBuilder, changed, with_forms

from autoremat.basics.errors import PlanFileError, PlanInvalid
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Kind, Role, Trait
from autoremat.planner.graph.schedule import Schedule, Stay, build_schedule
from autoremat.planner.memory.simulator import Timeline
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner

Tamper = Callable[[Plan], Plan]

LAYERS = 6
RANDOM, TO_SAVE, TO_RECOMPUTE, ASIDE = 0, 2, 4, 2 * LAYERS + 1
"""Forward ops with a promise: one that may not run twice, one that is to be saved, one that is to be recomputed, and one to be
saved that only the backward needs."""


def graph_of() -> Graph:
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
        forward_outputs=(loss,), backward_outputs=(gradient,), fuses=True, saving_seconds_per_byte=1e-3,
        fusion_groups_hold_buffers=True,
    )  # fmt: skip


PACKED = 9
"""The result of forward op 8, which is packed as bits between the halves."""


def planned() -> Plan:
    """A plan that recomputes some of the layers, with what is known of its budget."""
    graph = changed(with_forms(graph_of()), in_flight=2)
    values = [graph.ops[index].outputs[0] for index in (RANDOM, TO_SAVE, 8, ASIDE)]
    schedule = replace(build_schedule(graph, values), stays=(Stay(PACKED, "bits", 9, 10, 14, 15),))
    plan = Plan.of(graph, schedule)
    return replace(plan, budget_bytes=plan.peak_bytes, host_budget_bytes=plan.host_bytes, lower_bound_bytes=8)


def with_timeline(change: Callable[[Timeline], dict[str, Any]]) -> Tamper:
    return lambda plan: replace(plan, timeline=replace(plan.timeline, **change(plan.timeline)))


def with_graph(change: Callable[[Graph], Graph]) -> Tamper:
    return lambda plan: replace(plan, graph=change(plan.graph))


def with_row(table: str, number: int, **fields: Any) -> Tamper:
    """A tampering with an op or a value of the graph alone."""

    def change(graph: Graph) -> Graph:
        rows = list(getattr(graph, table))
        rows[number] = replace(rows[number], **fields)
        return replace(graph, **{table: tuple(rows)})

    return with_graph(change)


def lowered(timeline: Timeline) -> dict[str, Any]:
    """One byte less wherever the peak is reached."""
    return {"bytes_at": timeline.bytes_at - (timeline.bytes_at == timeline.peak_bytes)}


def with_another_sequence(plan: Plan) -> Plan:
    schedule = replace(plan.schedule)
    schedule.__dict__["sequence"] = (*plan.sequence[:-1], plan.sequence[-2])
    return replace(plan, schedule=schedule)


def with_stay(materialised: tuple[int, ...] = (), **fields: Any) -> Tamper:
    """A tampering with the stay or with buffers alone. The figures are those of before."""

    def tamper(plan: Plan) -> Plan:
        schedule = replace(plan.schedule, stays=(replace(plan.schedule.stays[0], **fields),), materialised=materialised)
        return replace(plan, schedule=schedule, timeline=replace(plan.timeline, schedule=schedule), budget_bytes=None)

    return tamper


TAMPERINGS: dict[str, tuple[Tamper, str | None]] = {
    "a sequence that is not that of the halves": (with_another_sequence, "are not those of the graph's halves"),
    "an execution without its bytes": (with_timeline(lambda t: {"bytes_at": t.bytes_at[:-1]}), "another schedule"),
    "one byte less at the peak": (with_timeline(lowered), "the peak is"),
    "another schedule": (with_timeline(lambda t: {"schedule": Schedule(t.schedule.forward, ())}), "another schedule"),
    "an op of another workspace": (with_row("ops", 6, workspace_bytes=9), None),
    "bytes beside the step": (with_graph(lambda g: changed(g, resident_bytes=1)), "the peak is"),
    "the other kind of code generator": (with_graph(lambda g: changed(g, fuses=False)), None),
    "the true peak exceeds the budget": (
        lambda p: replace(with_timeline(lowered)(p), budget_bytes=p.peak_bytes - 1), "the peak is"
    ),
    "a budget below nothing": (lambda p: replace(p, budget_bytes=-1), "must be numbers of at least 0"),
    "a budget on the host below nothing": (lambda p: replace(p, host_budget_bytes=-1), "must be numbers of at least 0"),
    "a bound of bytes above the peak": (lambda p: replace(p, lower_bound_bytes=p.peak_bytes + 1), "no plan has a lower peak"),
    "a bound of seconds that is no number": (lambda p: replace(p, lower_bound_seconds=math.nan), "must be numbers"),
    "a free in the backward": (with_stay(free=14), "positions"),
    "a value counted from the end": (with_stay(value=-20), "a stay is that of value -20"),
    "a buffer of the forward": (with_stay(materialised=(PACKED,)), "not results of the backward's own ops"),
    "a buffer counted from the end": (with_stay(materialised=(-1,)), "not results of the backward's own ops"),
    "an output": (with_graph(lambda g: replace(g, forward_outputs=(*g.forward_outputs, PACKED))), "which the caller holds"),
    "another form": (with_stay(form="host"), None),
    "a load earlier": (with_stay(load=13), None),
    "a value without forms": (with_row("values", PACKED, forms=()), "no form 'bits'"),
}  # fmt: skip


@pytest.mark.parametrize(("tamper", "message"), TAMPERINGS.values(), ids=TAMPERINGS)
def test_a_tampered_plan_is_refused(tamper, message):
    plan = planned()
    plan.check()
    with pytest.raises(PlanInvalid, match=message):
        tamper(plan).check()


def test_the_baseline_may_save_what_is_to_be_recomputed():
    baseline = Planner(planned().graph).baseline
    baseline.check(ignores_recompute=True)
    with pytest.raises(PlanInvalid, match="op4 is to be recomputed, but v5 is saved for the backward"):
        baseline.check()


def test_a_key_that_stands_twice_in_a_file_is_refused_and_blanks_are_not():
    text = planned().dumps()
    assert Plan.loads(text + " \n" * 100).dumps() == text
    with pytest.raises(PlanFileError, match="the key 'version' stands there twice"):
        Plan.loads('{"version":4,' + text[1:])
