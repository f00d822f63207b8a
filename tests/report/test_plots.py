"""Pictures show the figures that they are drawn from, and the HTML report is whole, alone and alive."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from reports import LENGTH, SIZE, report_for

from autoremat.planner.search.pareto_front import BOUND, OURS, POLICY, TORCH, Point
from autoremat.report import html_report, plots

VOID = frozenset({"meta", "input", "br", "link", "img", "wbr"})


@pytest.fixture(scope="module")
def report():
    return report_for(16 * SIZE)


def texts(figure) -> list[str]:
    (axes,) = figure.axes
    return [t.get_text() for t in (*axes.texts, *axes.get_legend().get_texts(), axes.title)] + [
        axes.get_xlabel(), axes.get_ylabel(), axes.get_title("left"),
    ]  # fmt: skip


def test_the_memory_picture_shows_peak_budget_and_border(report):
    figure = plots.memory(report)
    (axes,) = figure.axes
    tops = [path.vertices[:, 1].max() for band in axes.collections for path in band.get_paths()]
    assert max(tops) == pytest.approx(report.predicted_peak_bytes / 2**20)
    lines = {line.get_label(): line for line in axes.lines}
    budget = next(line for label, line in lines.items() if "budget" in label)
    assert set(budget.get_ydata()) == {16.0}
    before = next(line for label, line in lines.items() if "without" in label)
    assert max(before.get_ydata()) == pytest.approx(report.baseline_peak_bytes / 2**20)
    border = report.profile_after.seconds[report.profile_after.border]
    assert any(list(line.get_xdata()) == [border * 1e3] * 2 for line in axes.lines)
    shown = " ".join(texts(figure))
    assert all(expected in shown for expected in ("MiB", "milliseconds", *report.profile_after.groups))
    assert not any("budget" in text for text in texts(plots.memory(report_for(None))))


def test_layers_add_up_to_what_the_forward_makes(report):
    figure = plots.saved_by_layer(report)
    (axes,) = figure.axes
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(LENGTH)
    saved = sum(bar.get_width() for bar in next(c for c in axes.containers if c.get_label() == "saved"))
    assert saved == pytest.approx(report.saved_bytes / 2**20)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"layers.{i}" for i in range(1, LENGTH + 1)]


def test_the_pareto_picture_has_every_family():
    points = [
        Point(OURS, "", 10 << 20, 1.0, 4.0), Point(OURS, "", 20 << 20, 0.0, 4.0), Point(BOUND, "", 10 << 20, 0.5, 4.0),
        Point(BOUND, "", 20 << 20, 0.0, 4.0), Point(TORCH, "0.5", 15 << 20, 2.0, 4.0),
        Point(POLICY, "sqrt", 12 << 20, 3.0, 4.0),
    ]  # fmt: skip
    figure = plots.pareto(points)
    (axes,) = figure.axes
    ours = next(line for line in axes.lines if line.get_label() == OURS)
    assert list(ours.get_xdata()) == [10.0, 20.0]
    assert list(ours.get_ydata()) == [25.0, 0.0]
    for expected in ("0.5", "sqrt", "lower bound", "policy"):
        assert any(expected in text for text in texts(figure))


def test_pictures_are_written_in_both_formats(report, tmp_path):
    figure = plots.memory(report)
    figure.savefig(tmp_path / "memory.png")
    figure.savefig(tmp_path / "memory.svg")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    svg = plots.as_svg(figure)
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert "backward" in svg
    assert svg == plots.as_svg(figure)  # the same bytes every time


class Page(HTMLParser):
    """Checks that tags are closed in order and collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.rows: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]
        if tag == "tr" and "data-decision" in given:
            self.rows.append(given["data-decision"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_report_is_whole_and_alone(report, tmp_path):
    report.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.loads == []
    assert sorted(page.rows) == sorted(value.decision.value for value in report.values)
    assert text.count("<svg") == 2
    assert "16.00 MiB" in text


def test_names_from_outside_are_escaped(report):
    value = dataclasses.replace(report.values[0], module="<script>alert(1)</script>", source='a"b&c.py:1')
    text = html_report.to_html(dataclasses.replace(report, values=(value,), notes=("<b>",)))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "&lt;b&gt;" in text


def test_graphs_after_breaks_and_old_reports_have_their_place(report):
    old = dataclasses.replace(report, values=(), profile_after=None, profile_before=None, peak_after=None, peak_before=None)
    text = html_report.to_html(dataclasses.replace(report, others=(old,)))
    assert "Graph 2 of 2" in text
    assert text.count("<svg") == 2
