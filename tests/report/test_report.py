"""Reports: figures, text, JSON, pictures, what binds a peak, and the list that a process keeps."""

import dataclasses
import json
import math
import re
from collections import deque
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from reports import LENGTH, SIZE, report_for
from strategies import GraphBuilder, graphs

from autoremat.basics.units import format_bytes
from autoremat.planner.graph.op import Constraint, Role
from autoremat.planner.search.planner import Planner
from autoremat.report import plots, registry, text_tables
from autoremat.report.decisions import Decision
from autoremat.report.peak_snapshot import REMEDIES, parts_of_peak, remedies_for_model, remedy_for
from autoremat.report.registry import add_report, reports
from autoremat.report.report import Report
from autoremat.tools.pareto import BOUND, OURS, POLICY, TORCH, Point


def test_the_gap_is_the_distance_to_the_bound_in_steps():
    report = report_for(16 * SIZE)
    bound, step = report.plan.cost_seconds / 2, report.step_seconds
    bounded = dataclasses.replace(report, plan=dataclasses.replace(report.plan, lower_bound_seconds=bound))
    assert bounded.gap == pytest.approx(bound / (step + bound))
    assert dict(text_tables.figures(bounded))["gap"] == f"{bounded.gap:.1%}"
    infeasible = dataclasses.replace(report, plan=dataclasses.replace(report.plan, lower_bound_seconds=math.inf))
    assert infeasible.gap is infeasible.lower_bound_seconds is None
    assert Report.from_json(infeasible.to_json()) == infeasible


@pytest.mark.parametrize(
    ("room", "compiled", "fits"),
    [
        (None, None, True),
        (0, None, True),
        (-1, None, False),
        (-1, -1, True),  # what the code generator says is better known than the prediction
        (0, 1, False),
    ],
)
def test_fits(room, compiled, fits):
    """``room`` and ``compiled`` are bytes above the predicted peak, of the budget and of the code."""
    report = report_for(None)
    budget, code = (None if more is None else report.predicted_peak_bytes + more for more in (room, compiled))
    plan = dataclasses.replace(report.plan, budget_bytes=budget)
    assert dataclasses.replace(report, plan=plan, compiled_peak_bytes=code).fits is fits


def test_json_round_trip_keeps_everything():
    report = report_for(16 * SIZE, compiled_peak_bytes=123, replans=2)
    assert Report.from_json(report.to_json()) == report
    fields = json.loads(report.to_json())
    assert (fields["budget_bytes"], fields["compiled_peak_bytes"]) == (16 * SIZE, 123)
    assert fields["predicted_peak_bytes"] == report.plan.peak_bytes


@pytest.mark.parametrize("text", ["{", "[]", '{"plan": {"format": "x"}}', '{"saved": [], "more": 1}'])
def test_what_is_no_report_is_a_value_error(text):
    with pytest.raises(ValueError, match="not a report|Expecting"):
        Report.from_json(text)


def test_a_report_prints_six_lines_that_compare_with_plain_inductor():
    report = report_for(16 * SIZE, compiler="inductor", budget_share=0.5, reference_bytes=32 * SIZE, hints=("more",))
    words = [line.split("  ")[0] for line in str(report).splitlines()]
    assert words == ["verdict", "budget", "peak", "added time", "least possible", "largest saved tensors", "hint"]
    assert "16.00 MiB (memory_budget=0.5)" in str(report)
    assert "plain Inductor 32.00 MiB (-5" in str(report)
    assert report.added_share == pytest.approx(report.recomputed_ops / (2 * LENGTH))
    assert len(f"autoremat: {report.summary()}") <= 80
    assert "OVER THE BUDGET by" in str(replace(report, compiled_peak_bytes=17 * SIZE))


def test_old_reports_go(monkeypatch):
    monkeypatch.setattr(registry, "_reports", deque(maxlen=registry.KEPT))
    made = report_for(None)
    for number in range(registry.KEPT + 5):
        add_report(dataclasses.replace(made, planning_seconds=float(number)))
    assert [r.planning_seconds for r in reports()] == list(range(5, registry.KEPT + 5))


def test_totals_add_up():
    report = report_for(16 * SIZE)
    for by in ("module", "op"):
        totals = report.totals(by)
        assert sum(total.saved_bytes for total in totals) == report.saved_bytes
        assert sum(total.added_seconds for total in totals) == pytest.approx(report.recompute_seconds)
        assert sum(total.values for total in totals) == len(report.values) == LENGTH
    (layers,) = report.totals("module")
    assert layers.name == "layers.*"
    with pytest.raises(ValueError, match="module"):
        report.totals("line")


def test_the_report_says_what_binds_the_peak_of_its_plan_and_keeps_it_in_json():
    report = report_for(16 * SIZE)
    assert sum(size for _, size in report.parts_after) == report.predicted_peak_bytes
    kind, size = report.parts_after[0]
    rows = dict(text_tables.figures(report))
    assert rows["binds the peak"].startswith(f"{format_bytes(size)} (")
    assert f"of {kind}" in rows["binds the peak"]
    assert Report.from_json(report.to_json()).parts_after == report.parts_after


def test_diff_says_what_changed():
    loose, tight = report_for(None), report_for(16 * SIZE)
    diff = loose.diff(tight)
    assert {change.after.decision for change in diff.changes} == {Decision.RECOMPUTED}
    assert len(diff.changes) == tight.recomputed_ops
    assert f"{len(diff.changes)} values" in str(diff)
    figures = {what: change for what, _, _, change in diff.figures}
    assert figures["budget_bytes"] == ""
    assert figures["baseline_peak_bytes"] == "="
    assert figures["predicted_peak_bytes"].startswith("-")
    assert figures["recompute_seconds"].startswith("+")
    assert "no values with another decision" in str(loose.diff(loose))


@settings(max_examples=30, deadline=None)
@given(graphs(max_ops=20))
def test_the_parts_add_up_to_the_peak(graph):
    plan = Planner(graph).baseline
    parts = parts_of_peak(plan)
    assert sum(size for _, size in parts) == plan.peak_bytes
    assert [size for _, size in parts] == sorted((size for _, size in parts), reverse=True)


def test_gradients_and_operands_are_told_apart():
    build = GraphBuilder()
    out = build.op([build.source(0)], 0)
    tangent = build.source(0, Role.TANGENT)
    weights = build.op([tangent], 500, forward=False)
    wide = build.op([tangent], 200, forward=False)
    last = build.op([wide], 100, forward=False, workspace_bytes=50)
    graph = build.graph(forward_outputs=(out,), backward_outputs=(weights, last))
    gradients, operands, workspace = parts_of_peak(Planner(graph).lowest)
    assert (gradients, operands, workspace) == (("gradients", 600), ("operands of op3", 200), ("workspace of op3", 50))
    assert remedy_for("gradients") == REMEDIES["gradients"]
    assert 'tiles="auto"' in remedy_for("operands of op3")


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


@pytest.fixture(scope="module")
def report():
    return report_for(16 * SIZE)


def test_pictures_are_written_in_both_formats(report, tmp_path):
    figure = plots.memory(report)
    figure.savefig(tmp_path / "memory.png")
    figure.savefig(tmp_path / "memory.svg")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    svg = plots.as_svg(figure)
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "backward" in svg
    assert svg == plots.as_svg(figure)  # the same bytes every time


def test_the_pareto_picture_has_every_family():
    points = [Point(family, "sqrt", size << 20, 1.0, 4.0) for family in (OURS, BOUND, POLICY, TORCH) for size in (10, 20)]
    svg = plots.as_svg(plots.pareto(points))
    assert all(text in svg for text in (OURS, "lower bound", "sqrt", "policy"))


def test_the_html_report_is_whole_and_alone(report, tmp_path):
    report.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    for tag in ("html", "body", "table", "tr", "td", "svg", "script"):
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>")
    assert not re.findall(r"""(src|href)=["']?[^"'#]""", text)  # what a page would load
    rows = re.findall(r"<tr[^>]* data-decision=[\"']?([\w-]+)", text)
    assert sorted(rows) == sorted(value.decision.value for value in report.values)
    assert text.count("<svg") == 2
    assert "16.00 MiB" in text


def test_names_from_outside_are_escaped(report):
    names = {"module": "<script>alert(1)</script>", "source": 'a"b&c.py:1'}
    values = tuple(replace(value, **names) for value in report.plan.graph.values)
    plan = replace(report.plan, graph=replace(report.plan.graph, values=values))
    text = plots.to_html(replace(report, plan=plan, notes=("<b>",), others=(report,)))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "&lt;b&gt;" in text
    assert "Graph 2 of 2" in text
    assert text.count("<svg") == 4
