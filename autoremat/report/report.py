"""A report as people see it: text, tables, a comparison, one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from autoremat.basics.display import PlainTable, Shown
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.report import html_report, text_tables
from autoremat.report.data import ReportData
from autoremat.report.decisions import Decision
from autoremat.report.diff import ReportDiff, compare


@dataclass(frozen=True, repr=False)
class Report(ReportData, Shown):
    """The plan of one graph in figures: :class:`ReportData`, and the ways to show it."""

    def table(self, decision: Decision | str | None = None, limit: int | None = 40) -> PlainTable:
        """Returns the forward's values, the largest first, as a table of ``rich``.

        ``decision`` shows only those that were saved, recomputed, ...; ``limit=None`` shows all.
        """
        wanted = None if decision is None else Decision(decision)
        values = [value for value in self.values if wanted in (None, value.decision)]
        return text_tables.value_table(sorted(values, key=lambda value: -value.bytes), limit)

    def totals_table(self, by: str = "module") -> PlainTable:
        """:meth:`totals` as a table of ``rich``."""
        return text_tables.totals_table(self.totals(by), by)

    def peak_table(self, before: bool = False, limit: int | None = 20) -> PlainTable | None:
        """What is alive where memory is fullest, with the plan or ``before``, without recomputation; None if not known."""
        moment = self.peak_before if before else self.peak_after
        return None if moment is None else text_tables.moment_table(moment, limit)

    def diff(self, other: Report) -> ReportDiff:
        """What ``other`` does otherwise than this report; values are told apart by their names."""
        return compare(self, other)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write one HTML file that needs nothing else, with pictures. Raises ``ImportError`` without matplotlib and Jinja."""
        html_report.write(self, path)

    def summary(self) -> str:
        """One line, for logs."""
        budget = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        gap = "" if self.gap is None else f" (at most {self.gap:.1%} of the step over the optimum)"
        over = "" if self.within_budget else ", OVER THE BUDGET"
        return (
            f"{budget}: peak {format_bytes(self.baseline_peak_bytes)} -> {format_bytes(self.peak_bytes)}{over}, "
            f"recomputation {self.overhead:.1%} of the forward{gap}, planned in {format_seconds(self.planning_seconds)}"
        )

    def line(self) -> str:
        """All that a prompt shows."""
        return self.summary()

    def tables(self) -> Sequence[PlainTable]:
        """All that ``print`` shows."""
        return text_tables.tables(self)
