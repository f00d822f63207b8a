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
from autoremat.report.text_tables import PART, ReportDiff, where


@dataclass(frozen=True, repr=False, kw_only=True)
class Report(Shown, ReportData):
    """The plan of one graph in figures (:class:`ReportData`), with methods to show them."""

    def table(self, decision: Decision | str | None = None, limit: int | None = 40) -> PlainTable:
        """Returns the forward's values, the largest first, as a table of ``rich``.

        ``decision`` selects values with one decision, such as "saved". ``limit=None`` shows all of them.
        """
        wanted = None if decision is None else Decision(decision)
        values = [value for value in self.values if wanted in (None, value.decision)]
        shown = sorted(values, key=lambda value: -value.bytes)[:limit]
        title = f"{len(shown)} of {len(values)} values" if len(shown) < len(values) else f"{len(values)} values"
        table = PlainTable(title, ("bytes", "added", "value", "decision", "where, and why"), numbers=2)
        for value in shown:
            added = format_seconds(value.added_seconds) if value.added_seconds else ""
            lines = "\n".join(filter(None, (where(value), value.why)))  # side by side, neither is readable at 80 columns
            table.add_row(format_bytes(value.bytes), added, value.name, value.decision.value, lines)
        return table

    def totals_table(self, by: str = "module") -> PlainTable:
        """Returns :meth:`totals` as a table of ``rich``."""
        totals, has_others = self.totals(by), bool(self.plan.schedule.stays)
        others = ("in other forms",) if has_others else ()
        columns = ("saved", *others, "recomputed", "fused", "run", "run again", "values", by)
        table = PlainTable(f"by {by}", columns, numbers=len(columns) - 1)
        for total in totals:
            table.add_row(
                format_bytes(total.saved_bytes), *([format_bytes(total.stored_bytes)] if has_others else []),
                format_bytes(total.recomputed_bytes), format_bytes(total.fused_bytes),
                format_seconds(total.seconds), format_seconds(total.added_seconds), total.values, total.name or "-",
            )  # fmt: skip
        return table

    def peak_table(self, before: bool = False, limit: int | None = 20) -> PlainTable | None:
        """Returns the live tensors at the peak of the plan as a table; None for an empty graph.

        With ``before``, the peak is that without recomputation.
        """
        moment = self.peak_before if before else self.peak_after
        if moment is None:
            return None
        title, shown = f"{format_bytes(moment.bytes)} live in the {text_tables.place(moment)}", moment.live[:limit]
        table = PlainTable(title, ("bytes", "tensor", "kind", "where"), numbers=1)
        for tensor in shown:
            table.add_row(format_bytes(tensor.bytes), tensor.name, tensor.sort.value, where(tensor))
        if unseen := moment.live[len(shown) :]:
            table.add_row(format_bytes(sum(tensor.bytes for tensor in unseen)), f"{len(unseen)} others", "", "")
        return table

    def op_bytes_table(self) -> PlainTable:
        """Returns the simulated live bytes of each execution of one call as a table."""
        plan = self.plan
        table = PlainTable(f"{len(plan.sequence)} executions", ("simulated", "op", "half", "where"), numbers=1)
        for position, (index, live) in enumerate(zip(plan.sequence, plan.timeline.bytes_at, strict=True)):
            op, in_forward = plan.graph.ops[index], position < len(plan.schedule.forward)
            half = "forward" if in_forward else "recomputed" if op.forward else "backward"
            table.add_row(format_bytes(int(live) - plan.timeline.beside_bytes), op.name, half, op.module)
        return table

    def diff(self, other: Report) -> ReportDiff:
        """Returns the differences between this report and ``other``. Values are matched by their names."""
        return ReportDiff(self, other)

    def summary(self) -> str:
        """Returns a line for logs: the peak, the budget, the peak of plain Inductor, the added time."""
        verdict = "within" if self.within_budget else "over its share of" if PART in self.notes else "OVER the budget of"
        budget = "without a budget" if self.budget_bytes is None else f"{verdict} {format_bytes(self.budget_bytes)}"
        clock = ", ENDED BY THE CLOCK" if self.ended_by_clock else ""
        tensors = len(self.plan.schedule.stays)
        stored = f", {tensors} tensors in other forms, stalls {format_seconds(self.stall_seconds)}" if tensors else ""
        words, other = self.compared
        peaks = f"{format_bytes(self.peak_bytes)} {budget}; {words} {format_bytes(other)}"
        return f"{peaks}; time {self.added_share:+.1%}{stored}{clock}"

    line = summary

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
