"""Reports: figures, text, JSON, and the list that a process keeps."""

from __future__ import annotations

import dataclasses
import json
from collections import deque

import pytest
from reports import LENGTH, SIZE, network, report_for

from autoremat.basics.units import format_bytes
from autoremat.planner.search.planner import Planner
from autoremat.report import data, registry, text_tables
from autoremat.report.decisions import Decision
from autoremat.report.registry import add_report, reports
from autoremat.report.report import Report


@pytest.fixture
def no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_reports", deque(maxlen=registry.KEPT))


def test_figures_come_from_the_plan():
    planning = Planner(network()).find(16 * SIZE)
    plan, report = planning.plan, report_for(16 * SIZE)
    assert report.budget_bytes == 16 * SIZE
    assert report.predicted_peak_bytes == plan.peak_bytes <= 16 * SIZE
    assert report.baseline_peak_bytes == planning.baseline.peak_bytes > 16 * SIZE
    assert report.minimum_peak_bytes == planning.smallest.peak_bytes
    assert report.lower_bound_bytes == planning.lower_bound_bytes <= report.minimum_peak_bytes
    assert report.saved_bytes == plan.saved_bytes == sum(t.bytes for t in report.saved)
    assert report.recomputed_ops == len(plan.recomputed) > 0
    assert report.recompute_seconds == pytest.approx(1e-3 * report.recomputed_ops)
    assert report.forward_seconds == pytest.approx(1e-3 * LENGTH)
    assert report.overhead == pytest.approx(report.recomputed_ops / LENGTH)
    assert report.predicted_seconds == pytest.approx(1e-3 * (2 * LENGTH + report.recomputed_ops))
    assert "for forward and backward, with recomputation" in str(report)
    assert report.ops == 2 * LENGTH
    assert not report.time_limited


def test_the_gap_is_the_distance_to_the_bound_in_steps():
    report = dataclasses.replace(report_for(16 * SIZE), recompute_seconds=0.3, lower_bound_seconds=0.2, step_seconds=0.8)
    assert report.gap == pytest.approx(0.1)
    assert "at most 10.0%" in str(report)
    assert "at most 10.0%" in report.summary()
    infeasible = dataclasses.replace(report, lower_bound_seconds=None)
    assert infeasible.gap is None


def test_saved_tensors_are_listed_largest_first_with_their_origin():
    report = report_for(None)
    assert len(report.saved) == LENGTH
    sizes = [tensor.bytes for tensor in report.saved]
    assert sizes == sorted(sizes, reverse=True)
    assert report.saved[0] == data.SavedTensor("v1", SIZE, "test.op", "layers.1", "/home/user/project/net/model.py:1")


@pytest.mark.parametrize(
    ("budget", "predicted", "compiled", "fits"),
    [
        (None, 10**12, None, True),
        (100, 100, None, True),
        (100, 101, None, False),
        (100, 101, 100, True),  # what the code generator says is better known than the prediction
        (100, 99, 101, False),
        (100, 101, 0, True),
    ],
)
def test_fits(budget, predicted, compiled, fits):
    report = dataclasses.replace(
        report_for(None), budget_bytes=budget, predicted_peak_bytes=predicted, compiled_peak_bytes=compiled
    )
    assert report.fits is fits


def test_json_round_trip_keeps_everything():
    report = report_for(16 * SIZE, compiled_peak_bytes=123, replans=2)
    assert Report.from_json(report.to_json()) == report
    fields = json.loads(report.to_json())
    assert fields["budget_bytes"] == 16 * SIZE
    assert fields["saved"][0].keys() == {"name", "bytes", "op", "module", "source"}


@pytest.mark.parametrize("text", ["{", "[]", '{"saved": [{"name": "x"}]}', '{"saved": [], "more": 1}'])
def test_what_is_no_report_is_a_value_error(text):
    with pytest.raises(ValueError, match="not a report|Expecting"):
        Report.from_json(text)


def test_text_has_every_figure_a_person_asks_for():
    report = report_for(16 * SIZE)
    text = str(report)
    for expected in ("16.00 MiB", f"{report.recomputed_ops} ops", f"{report.overhead:.1%}", "250.00 ms", "peak snapshot"):
        assert expected in text, f"{expected!r} is not in\n{text}"
    assert "peak of the generated code" not in text
    assert "3.00 MiB; memory of the budget stays free, because nothing needs it" in str(
        dataclasses.replace(report, compiled_peak_bytes=3 * SIZE, room_left_because="nothing needs it")
    )
    assert all(line == line.rstrip() and len(line) <= 120 for line in text.splitlines())
    assert "\x1b" not in text


def test_text_shows_the_ten_largest_saved_tensors():
    text = str(report_for(None))
    assert text.count("1.00 MiB") >= 10
    assert [f"layers.{i}" in text.split() for i in (1, 10, 11, 24)] == [True, True, False, False]
    assert "project/net/model.py:1" in text.split()
    assert "/home/user" not in text


def test_text_shows_the_pool_of_cuda_graphs():
    report = dataclasses.replace(report_for(None, compiled_peak_bytes=3 * SIZE), graph_pool_bytes=2 * SIZE)
    assert f"{format_bytes(2 * SIZE)}" in str(report)


@pytest.mark.usefixtures("no_reports")
def test_reports_are_listed_oldest_first_and_the_list_is_a_copy():
    first, second = report_for(None), report_for(16 * SIZE)
    add_report(first)
    add_report(second)
    assert reports() == [first, second]
    reports().clear()
    assert len(reports()) == 2


@pytest.mark.usefixtures("no_reports")
def test_old_reports_lose_their_plans_and_then_go():
    made = report_for(None)
    for number in range(registry.KEPT + 5):
        add_report(dataclasses.replace(made, planning_seconds=float(number)))
    kept = reports()
    assert [r.planning_seconds for r in kept] == list(range(5, registry.KEPT + 5))
    assert [r.plan is not None for r in kept[-101:]] == [False] + [True] * 100
    assert not any(r.plan for r in kept[:-100])
    assert made.plan is not None


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


def test_tables_show_values_and_what_is_alive():
    report = report_for(16 * SIZE)
    text = text_tables.as_text(report.table(Decision.RECOMPUTED, limit=3))
    assert "3 of " in text
    assert text.count("recomputed ") >= 3
    assert "layers." in text
    assert len(text_tables.as_text(report.table(limit=None)).splitlines()) >= LENGTH
    assert "layers.*" in text_tables.as_text(report.totals_table()) == str(report.totals_table())
    before, after = (text_tables.as_text(report.peak_table(before=before)) for before in (True, False))
    assert "26.00 MiB" in before
    assert "saved" in after
    with pytest.raises(ValueError, match="not a valid Decision"):
        report.table("kept")
    assert dataclasses.replace(report, peak_after=None).peak_table() is None


def test_each_execution_has_its_simulated_bytes():
    report = report_for(16 * SIZE)
    lines = text_tables.as_text(report.op_bytes_table()).splitlines()
    first = report.plan.graph.ops[report.plan.schedule.forward[0]].name
    assert lines[2].split() == [*format_bytes(int(report.plan.timeline.bytes_at[0])).split(), first, "forward"]
    assert dataclasses.replace(report, plan=None).op_bytes_table() is None


def test_the_report_says_what_binds_the_peak_of_its_plan_and_keeps_it_in_json():
    report = report_for(16 * SIZE)
    assert sum(part.bytes for part in report.parts_after) == report.predicted_peak_bytes
    largest = report.parts_after[0]
    rows = dict(text_tables.figures(report))
    assert rows["binds the peak"].startswith(f"{format_bytes(largest.bytes)} (")
    assert f"of {largest.name}" in rows["binds the peak"]
    assert Report.from_json(report.to_json()).parts_after == report.parts_after


def test_a_report_of_an_earlier_version_is_read():
    report = report_for(16 * SIZE)
    fields = json.loads(report.to_json())
    for name in ("values", "peak_before", "peak_after", "parts_after", "profile_before", "profile_after", "notes", "others"):
        del fields[name]
    old = Report.from_json(json.dumps(fields))
    assert old.saved == report.saved
    assert old.values == ()
    assert "peak snapshot" not in str(old)
    assert report.diff(old).changes


def test_diff_says_what_changed():
    loose, tight = report_for(None), report_for(16 * SIZE)
    diff = loose.diff(tight)
    assert {change.after.decision for change in diff.changes} == {Decision.RECOMPUTED}
    assert len(diff.changes) == tight.recomputed_ops
    assert f"{len(diff.changes)} values" in str(diff)
    figures = {what: change for what, _, _, change in diff.figures}
    assert figures["budget"] == ""
    assert figures["baseline"] == "="
    assert figures["predicted peak"].startswith("-")
    assert figures["recomputation"].startswith("+")
    assert "same decision" in str(loose.diff(loose))
    gone = loose.diff(dataclasses.replace(loose, values=()))
    assert gone.changes
    assert {change.after for change in gone.changes} == {None}
