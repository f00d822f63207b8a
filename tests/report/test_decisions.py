"""Fates and reasons of the forward's values, and snapshots of peaks, on graphs small enough to see through."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GraphBuilder, changed, graphs

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind, Role, Trait
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.report.decisions import Decision, Reason, explain_values
from autoremat.report.peak_snapshot import SAMPLES, TensorCategory, peak_of, profile_of


def explained(graph: Graph, saved: set[int], budget: int | None = None) -> dict[str, tuple[Decision, Reason]]:
    plan = Plan.of(graph, build_schedule(graph, saved))
    return {value.name: (value.decision, value.reason) for value in explain_values(plan, budget)}


def three_ops(**second: object) -> Graph:
    """v1, v2, v3 in a row, of 100 bytes and one second; the backward reads v1, v2 and v3; saving 100 bytes takes 0.1 s."""
    build = GraphBuilder()
    made = [build.source(0)]
    for number in range(3):
        made.append(build.op([made[-1]], 100, **(second if number == 1 else {})))
    tangent = build.source(0, Role.TANGENT)
    gradient = build.op([made[3], made[2], tangent], 10, forward=False)
    gradient = build.op([made[1], gradient], 10, forward=False)
    return build.graph(forward_outputs=(made[3],), backward_outputs=(gradient,), saving_seconds_per_byte=1e-3)


def test_what_is_saved_has_a_reason():
    found = explained(three_ops(), {1, 2, 3})
    assert found == {
        "v1": (Decision.SAVED, Reason.SLOWER),
        "v2": (Decision.SAVED, Reason.SLOWER),
        "v3": (Decision.SAVED, Reason.FORWARD_OUTPUT),
    }


def test_recomputation_starts_from_what_is_saved_for_it():
    found = explained(three_ops(), {1, 3}, budget=10**6)
    assert found["v1"] == (Decision.SAVED, Reason.START)
    assert found["v2"] == (Decision.RECOMPUTED, Reason.NO_GAIN)  # with so much room it should be saved


def test_a_binding_moment_is_named():
    build = GraphBuilder()
    first = build.op([build.source(0)], 100)
    large = build.op([first], 1000)
    output = build.op([large], 10)
    tangent = build.source(0, Role.TANGENT)
    gradient = build.op([output, tangent], 10, forward=False)
    gradient = build.op([first, gradient], 10, forward=False)
    graph = build.graph(forward_outputs=(output,), backward_outputs=(gradient,))
    plan = Plan.of(graph, build_schedule(graph, {output}))
    values = {v.name: v for v in explain_values(plan, 1105)}
    assert values["v1"].reason is Reason.BUDGET
    assert "1.08 KiB at op2" in values["v1"].why  # 1000 + 10 + 100


def test_what_is_cheap_is_called_cheap():
    graph = three_ops(seconds=0.05, kind=Kind.POINTWISE)  # where nothing is fused, saving takes no time
    ops = tuple(op if op.kind is Kind.POINTWISE else dataclasses.replace(op, kind=Kind.REDUCTION) for op in graph.ops)
    found = explained(changed(dataclasses.replace(graph, ops=ops), fuses=True), {1, 3}, budget=1)
    assert found["v2"] == (Decision.RECOMPUTED, Reason.CHEAP)


@pytest.mark.parametrize("name", ["RANDOM", "READS_MUTATED_INPUT", "DISCONTINUOUS"])
def test_what_may_not_run_twice_says_so(name):
    assert explained(three_ops(traits=Trait[name]), {1, 2, 3})["v2"] == (Decision.SAVED, Reason[name])


def test_what_only_feeds_recomputation_is_needed_for_it():
    build = GraphBuilder()
    first = build.op([build.source(0)], 10)
    second = build.op([first], 10)
    third = build.op([second], 10)
    tangent = build.source(0, Role.TANGENT)
    gradient = build.op([third, tangent], 10, forward=False)
    graph = build.graph(must_run=(0, 1, 2), backward_outputs=(gradient,))
    assert explained(graph, {first})["v2"] == (Decision.RECOMPUTED, Reason.NEEDED)
    assert explained(graph, {third}) == {
        "v1": (Decision.FORWARD_ONLY, Reason.NOT_READ),
        "v2": (Decision.FORWARD_ONLY, Reason.NOT_READ),
        "v3": (Decision.SAVED, Reason.SLOWER),
    }


def test_what_only_the_backward_reads_is_made_there():
    build = GraphBuilder()
    needed = build.op([build.source(0)], 10)
    later = build.op([needed], 10)
    gradient = build.op([needed, later], 10, forward=False)
    graph = build.graph(forward_outputs=(needed,), backward_outputs=(gradient,))
    plan = Plan.of(graph, Schedule((0,), (1, 2)))
    postponed = explain_values(plan, None)[1]
    assert (postponed.decision, postponed.reason, postponed.added_seconds) == (Decision.POSTPONED, Reason.ONLY_BACKWARD, 0.0)


def test_what_fuses_is_never_materialised():
    build = GraphBuilder()
    first = build.op([build.source(0)], 10, kind=Kind.EXTERN)
    second = build.op([first], 10, kind=Kind.POINTWISE)
    third = build.op([second], 10, kind=Kind.POINTWISE)
    gradient = build.op([third], 10, forward=False)
    graph = build.graph(backward_outputs=(gradient,), fuses=True, forward_outputs=(third,))
    assert explained(graph, {third})["v2"] == (Decision.FUSED, Reason.INSIDE_READERS)
    assert explained(changed(graph, fuses=False), {third})["v2"] == (Decision.FORWARD_ONLY, Reason.NOT_READ)


@settings(max_examples=40)
@given(graphs(), st.floats(0.3, 1.0))
def test_values_and_snapshots_add_up_to_the_plan(graph, share):
    planner = Planner(graph, 5.0)
    planning = planner.find(Limits(int(share * planner.baseline.peak_bytes)))
    plan = planning.plan or planning.smallest
    values = explain_values(plan, planner.baseline.peak_bytes)
    assert [value.name for value in values] == [graph.values[v].name for v in graph.forward_values]
    assert sum(v.bytes for v in values if v.decision is Decision.SAVED) == plan.saved_bytes
    assert sum(v.added_seconds for v in values) == pytest.approx(
        plan.added_seconds - sum(graph.ops[op].seconds for op in plan.recomputed if not graph.ops[op].outputs)
    )
    assert all(value.why.startswith(value.reason.sentence) for value in values)
    for value in values:
        assert (value.decision is Decision.RECOMPUTED) <= (
            value.reason in (Reason.CONSTRAINT, Reason.CHEAP, Reason.BUDGET, Reason.NEEDED, Reason.NO_GAIN)
        )
    moment = peak_of(plan)
    assert moment.bytes == plan.peak_bytes
    assert moment.bytes == sum(size for _, size in moment.by_sort)
    assert [t.bytes for t in moment.live] == sorted((t.bytes for t in moment.live), reverse=True)
    assert graph.ops[plan.sequence[moment.position]].name == moment.op
    profile = profile_of(plan)
    assert max(profile.totals) == plan.peak_bytes
    assert set(profile.totals) <= set(plan.timeline.bytes_at.tolist())
    assert list(profile.seconds) == sorted(profile.seconds)
    assert len(profile.totals) <= SAMPLES + 2
    if len(plan.sequence) <= SAMPLES:
        assert list(profile.totals) == plan.timeline.bytes_at.tolist()
        assert profile.border == len(plan.schedule.forward)


def test_each_sort_is_recognised():
    build = GraphBuilder()
    source = build.source(8)
    saved = build.op([source], 100)
    again = build.op([saved], 200)
    output = build.op([again], 10)
    tangent = build.source(30, Role.TANGENT)
    first = build.op([again, tangent], 40, forward=False)
    gradient = build.op([again, saved, first], 50, forward=False, workspace_bytes=7)
    build.op([gradient, first], 1, forward=False)
    graph = build.graph(forward_outputs=(output,), backward_outputs=(gradient,))
    moment = peak_of(Plan.of(graph, build_schedule(graph, {saved})))
    assert moment.half == "backward"
    assert dict(moment.by_sort) == {
        TensorCategory.RECOMPUTED: 200, TensorCategory.SAVED: 100, TensorCategory.GRADIENT: 50, TensorCategory.TEMPORARY: 40,
        TensorCategory.TANGENT: 30, TensorCategory.OUTPUT: 10, TensorCategory.WORKSPACE: 7,
    }  # fmt: skip
