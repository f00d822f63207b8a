"""Comparison of two reports: of the same model under other options, or before and after a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoremat.basics.display import PlainTable, Shown
from autoremat.basics.units import format_bytes
from autoremat.report.data import ReportData
from autoremat.report.decisions import ForwardValue
from autoremat.report.text_tables import figure_text

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

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Changed values, the largest first. They are matched by their names."""
        first, second = ({value.name: value for value in report.values} for report in (self.before, self.after))
        names = dict.fromkeys((*first, *second))
        changes = [Change(n, first.get(n), second.get(n)) for n in names if _decided(first.get(n)) != _decided(second.get(n))]
        return tuple(sorted(changes, key=lambda change: -change.bytes))

    @property
    def figures(self) -> tuple[tuple[str, str, str, str], ...]:
        """Rows of (name, before, after, difference), one for each figure that either report has."""
        rows = []
        for name in COMPARED:
            first, second = getattr(self.before, name), getattr(self.after, name)
            if first or second:
                difference = "" if first is None or second is None else _signed(name, second - first)
                rows.append((name, figure_text(name, first) or "-", figure_text(name, second) or "-", difference))
        return tuple(rows)

    def line(self) -> str:
        old, new = self.before.predicted_peak_bytes, self.after.predicted_peak_bytes
        peaks = f"{format_bytes(old)} -> {format_bytes(new)} ({_signed('bytes', new - old)})"
        return f"{len(self.changes)} values with another decision, predicted peak {peaks}"

    def tables(self) -> Sequence[PlainTable]:
        figures = PlainTable("", ("", "before", "after", "change"), numbers=0)
        for row in self.figures:
            figures.add_row(*row)
        title = f"{len(self.changes) or 'no'} values with another decision"
        table = PlainTable(title, ("bytes", "value", "before", "after", "why", "module"), numbers=1)
        for change in self.changes[:CHANGES_SHOWN]:
            sides = ["-" if side is None else side.decision.value for side in (change.before, change.after)]
            known = change.after or change.before
            table.add_row(format_bytes(change.bytes), change.name, *sides, known and known.why, known and known.module)
        return [figures, table]


COMPARED = (
    "budget_bytes", "predicted_peak_bytes", "compiled_peak_bytes", "reference_bytes", "baseline_peak_bytes",
    "minimum_peak_bytes", "saved_bytes", "host_peak_bytes", "recompute_seconds", "stall_seconds", "step_seconds",
)  # fmt: skip


def _decided(value: ForwardValue | None) -> tuple[object, ...]:
    return () if value is None else (value.decision, value.bytes)


def _signed(name: str, change: float) -> str:
    return f"{'+' if change > 0 else ''}{figure_text(name, change)}" if change else "="
