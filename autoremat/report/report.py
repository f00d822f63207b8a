"""A report for people: text, tables, a comparison, one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from autoremat.basics.display import PlainTable, Shown, named_figures
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.report import plots, text_tables
from autoremat.report.data import ReportData
from autoremat.report.decisions import Decision
from autoremat.report.text_tables import ReportDiff


@dataclass(frozen=True, repr=False, kw_only=True)
class Report(Shown, ReportData):
    """The plan of one graph in figures (:class:`ReportData`), with methods to show them."""

    def table(self, decision: Decision | str | None = None, limit: int | None = 40) -> PlainTable:
        """Returns the forward's values, the largest first, as a table of ``rich``.

        ``decision`` selects values with one decision, such as "saved". ``limit=None`` shows all of them.
        """
        wanted = None if decision is None else Decision(decision)
        values = [value for value in self.values if wanted in (None, value.decision)]
        return text_tables.value_table(sorted(values, key=lambda value: -value.bytes), limit)

    def totals_table(self, by: str = "module") -> PlainTable:
        """Returns :meth:`totals` as a table of ``rich``."""
        return text_tables.totals_table(self.totals(by), by)

    def peak_table(self, before: bool = False, limit: int | None = 20) -> PlainTable | None:
        """Returns the live tensors at the peak of the plan as a table; None for an empty graph.

        With ``before``, the peak is that without recomputation.
        """
        moment = self.peak_before if before else self.peak_after
        return None if moment is None else text_tables.moment_table(moment, limit)

    def op_bytes_table(self) -> PlainTable:
        """Returns the simulated live bytes of each execution of one call as a table."""
        return text_tables.op_bytes_table(self.plan)

    def diff(self, other: Report) -> ReportDiff:
        """Returns the differences between this report and ``other``. Values are matched by their names."""
        return ReportDiff(self, other)

    def summary(self) -> str:
        """Returns a line for logs: the peak, the budget, the peak of plain Inductor, the added time."""
        verdict = "within" if self.within_budget else "OVER the budget of"
        budget = "without a budget" if self.budget_bytes is None else f"{verdict} {format_bytes(self.budget_bytes)}"
        clock = ", ENDED BY THE CLOCK" if self.ended_by_clock else ""
        tensors = len(self.plan.schedule.stays)
        stored = f", {tensors} tensors in other forms, stalls {format_seconds(self.stall_seconds)}" if tensors else ""
        words, other = self.compared
        peaks = f"{format_bytes(self.peak_bytes)} {budget}; {words} {format_bytes(other)}"
        return f"{peaks}; time {self.added_share:+.1%}{stored}{clock}"

    def line(self) -> str:
        return self.summary()

    def tables(self) -> Sequence[PlainTable]:
        return [named_figures(text_tables.brief(self))]

    @property
    def details(self) -> Details:
        """All figures, the ledger of the device and the ten largest saved tensors. They print as tables."""
        return Details(self)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes one self-contained HTML file with plots. Raises ``ImportError`` without matplotlib."""
        Path(path).write_text(plots.to_html(self), encoding="utf-8")


@dataclass(frozen=True, repr=False)
class Details(Shown):
    """The figures of a report that its six lines leave out."""

    report: ReportData

    def line(self) -> str:
        return f"{len(text_tables.figures(self.report))} figures"

    def tables(self) -> Sequence[PlainTable]:
        return text_tables.tables(self.report)
