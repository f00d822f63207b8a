"""The fullest moment and the profile of a step, against the timeline that they are read from."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GraphBuilder, graphs

from autoremat.planner.graph.op import Role
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.report.peak_snapshot import LISTED, SAMPLES, TensorCategory, module_group, peak_of, profile_of


def plan_of(graph, share=1.0):
    planner = Planner(graph, 5.0)
    planning = planner.find(int(share * planner.baseline.peak_bytes))
    return planning.plan or planning.smallest


@settings(max_examples=40)
@given(graphs(), st.floats(0.3, 1.0))
def test_a_moment_adds_up_to_the_peak(graph, share):
    plan = plan_of(graph, share)
    moment = peak_of(plan)
    assert moment.bytes == plan.peak_bytes
    assert moment.bytes == sum(size for _, size in moment.by_sort)
    assert moment.bytes == sum(tensor.bytes for tensor in moment.live) + moment.others_bytes
    assert [t.bytes for t in moment.live] == sorted((t.bytes for t in moment.live), reverse=True)
    assert len(moment.live) <= LISTED
    assert graph.ops[plan.sequence[moment.position]].name == moment.op


@settings(max_examples=40)
@given(graphs(), st.floats(0.3, 1.0))
def test_a_profile_is_the_timeline(graph, share):
    plan = plan_of(graph, share)
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


def test_modules_are_grouped_below_the_first_number():
    assert module_group("model.layers.3.mlp.up_proj") == "model.layers.*.mlp"
    assert module_group("model.lm_head") == "model.lm_head"
    assert module_group("") == "no module"
