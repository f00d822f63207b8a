"""What binds a peak: all its bytes by kind, and the remedy that fits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from strategies import GraphBuilder, graphs

from autoremat.planner.graph.op import Constraint, Role
from autoremat.planner.search.planner import Planner
from autoremat.report.binding import REMEDIES, parts_of_peak, remedies_for_model


@settings(max_examples=30, deadline=None)
@given(graphs(max_ops=20))
def test_the_parts_add_up_to_the_peak(graph):
    plan = Planner(graph).baseline
    parts = parts_of_peak(plan)
    assert sum(part.bytes for part in parts) == plan.peak_bytes
    assert [part.bytes for part in parts] == sorted((part.bytes for part in parts), reverse=True)


def test_gradients_and_operands_are_told_apart():
    build = GraphBuilder()
    out = build.op([build.source(0)], 0)
    tangent = build.source(0, Role.TANGENT)
    weights = build.op([tangent], 500, forward=False)
    wide = build.op([tangent], 200, forward=False)
    last = build.op([wide], 100, forward=False, workspace_bytes=50)
    graph = build.graph(forward_outputs=(out,), backward_outputs=(weights, last))
    gradients, operands, workspace = parts_of_peak(Planner(graph).lowest)
    assert (gradients.name, gradients.bytes, gradients.remedy) == ("gradients", 600, REMEDIES["gradients"])
    assert (operands.name, operands.bytes) == ("operands of op3", 200)
    assert "in parts along the rows" in operands.remedy
    assert (workspace.name, workspace.bytes) == ("workspace of op3", 50)


def test_what_the_model_itself_decides_is_named():
    """A tensor that its checkpoint policy saves, and one that a loop makes."""
    for changes, words in (({"constraint": Constraint.SAVE}, "MUST_SAVE"), ({"target": "scan"}, "write the scan"), ({}, "")):
        build = GraphBuilder()
        kept = build.op([build.source(8)], 500)
        build.ops[-1] = replace(build.ops[-1], **changes)
        out = build.op([kept], 0)
        gradient = build.op([build.source(0, Role.TANGENT), kept], 8, forward=False)
        graph = build.graph(forward_outputs=(out,), backward_outputs=(gradient,))
        remedies = remedies_for_model(Planner(graph).baseline, graph)
        assert [words in remedy for remedy in remedies] == [True] * bool(words)
