"""Comparison of two reports: of the same model under other options, or before and after a change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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

    @property
    def differs(self) -> bool:
        """True if the decision or the size differs."""
        old, new = self.before, self.after
        return old is None or new is None or (old.decision, old.bytes) != (new.decision, new.bytes)


@dataclass(frozen=True, repr=False)
class ReportDiff(Shown):
    """Differences of a second report from a first. They print as a screen of text."""

    before: ReportData
    after: ReportData

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Changed values, the largest first. They are matched by their names."""
        first, second = ({value.name: value for value in report.values} for report in (self.before, self.after))
        pairs = {name: (first.get(name), second.get(name)) for name in (*first, *second)}
        differing = [one for one in (Change(name, *pair) for name, pair in pairs.items()) if one.differs]
        return tuple(sorted(differing, key=lambda change: -change.bytes))

    @property
    def figures(self) -> tuple[tuple[str, str, str, str], ...]:
        """Rows of (name, before, after, difference), one for each figure that either report has."""
        rows = []
        for what, attribute, text in _FIGURES:
            first, second = getattr(self.before, attribute), getattr(self.after, attribute)
            if not (first or second):
                continue
            difference = "" if first is None or second is None else _signed(second - first, text)
            before, after = ("-" if one is None else text(one) for one in (first, second))
            rows.append((what, before, after, difference))
        return tuple(rows)

    def line(self) -> str:
        """Returns the one-line representation."""
        old, new = self.before.predicted_peak_bytes, self.after.predicted_peak_bytes
        peaks = f"{format_bytes(old)} -> {format_bytes(new)} ({_signed(new - old, format_bytes)})"
        return f"{len(self.changes)} values with another decision, predicted peak {peaks}"

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
    ("step", "step_seconds", format_seconds),
)


def _decision(value: ForwardValue | None) -> str:
    return "-" if value is None else value.decision.value


def _signed(change: float, text: Callable[[Any], str]) -> str:
    return f"+{text(change)}" if change > 0 else text(change) if change else "="
