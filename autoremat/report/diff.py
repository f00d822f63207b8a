"""Comparison of two reports: of the same model under other options, or before and after a change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat.basics.display import PlainTable, Shown
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.report.data import ReportData
from autoremat.report.decisions import ForwardValue

CHANGES_SHOWN = 20


@dataclass(frozen=True)
class Change:
    """A forward value whose decision or size differs. A side is None if its report lacks the value."""

    name: str
    before: ForwardValue | None
    after: ForwardValue | None

    @property
    def bytes(self) -> int:
        """The larger of its two sizes."""
        return max(value.bytes for value in (self.before, self.after) if value is not None)


@dataclass(frozen=True, repr=False)
class ReportDiff(Shown):
    """Differences of a second report from a first. They print as a screen of text."""

    before: ReportData
    after: ReportData
    changes: tuple[Change, ...]
    """Changed values, the largest first."""

    @property
    def figures(self) -> tuple[tuple[str, str, str, str], ...]:
        """Rows of (name, before, after, difference), one for each figure of a report."""
        rows = []
        for what, attribute, text in _FIGURES:
            first, second = getattr(self.before, attribute), getattr(self.after, attribute)
            if attribute in _OF_OTHER_FORMS and not (first or second):
                continue
            difference = "" if first is None or second is None else _signed(second - first, text)
            before, after = ("-" if one is None else text(one) for one in (first, second))
            rows.append((what, before, after, difference))
        return tuple(rows)

    def line(self) -> str:
        """Returns the one-line representation."""
        _, before, after, change = next(row for row in self.figures if row[0] == "predicted peak")
        return f"{len(self.changes)} values with another decision, predicted peak {before} -> {after} ({change})"

    def tables(self) -> Sequence[PlainTable]:
        """Returns the printed tables."""
        figures = PlainTable("", ("", "before", "after", "change"), numbers=0)
        for row in self.figures:
            figures.add_row(*row)
        if not self.changes:
            same = PlainTable("", ("",), numbers=0, show_header=False)
            same.add_row("every value of the forward has the same decision")
            return [figures, same]
        shown = self.changes[:CHANGES_SHOWN]
        title = f"{len(self.changes)} values with another decision{', the largest' * (len(shown) < len(self.changes))}"
        table = PlainTable(title, ("bytes", "value", "before", "after", "why", "module"), numbers=1)
        for change in shown:
            known = change.after or change.before
            assert known is not None
            decisions = (_decision(change.before), _decision(change.after))
            table.add_row(format_bytes(change.bytes), change.name, *decisions, known.why, known.module)
        return [figures, table]


_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("budget", "budget_bytes", format_bytes),
    ("predicted peak", "predicted_peak_bytes", format_bytes),
    ("peak of the generated code", "compiled_peak_bytes", format_bytes),
    ("reference peak", "reference_bytes", format_bytes),
    ("baseline", "baseline_peak_bytes", format_bytes),
    ("minimum peak found", "minimum_peak_bytes", format_bytes),
    ("saved for the backward", "saved_bytes", format_bytes),
    ("peak on the host", "host_peak_bytes", format_bytes),
    ("recomputation", "recompute_seconds", format_seconds),
    ("stalls", "stall_seconds", format_seconds),
    ("forward", "forward_seconds", format_seconds),
    ("step", "step_seconds", format_seconds),
)
_OF_OTHER_FORMS = ("host_peak_bytes", "stall_seconds")
"""Figures that are shown only if a plan keeps saved tensors in other forms."""


def compare(before: ReportData, after: ReportData) -> ReportDiff:
    """Returns the differences between two reports."""
    first, second = _by_name(before), _by_name(after)
    changes = []
    for name in dict.fromkeys([*first, *second]):
        old, new = first.get(name), second.get(name)
        if old is None or new is None or (old.decision, old.bytes) != (new.decision, new.bytes):
            changes.append(Change(name, old, new))
    return ReportDiff(before, after, tuple(sorted(changes, key=lambda change: -change.bytes)))


def _by_name(report: ReportData) -> Mapping[str, ForwardValue]:
    return {value.name: value for value in report.values}


def _decision(value: ForwardValue | None) -> str:
    return "-" if value is None else value.decision.value


def _signed(change: float, text: Callable[[Any], str]) -> str:
    return f"+{text(change)}" if change > 0 else text(change) if change else "="
