"""The reports of all ranks of a distributed job, in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoremat.basics.display import PlainTable, Shown
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.report.report import Report


@dataclass(frozen=True, repr=False)
class RankReports(Shown):
    """The reports of several ranks. ``by_rank`` has those of each rank, oldest first."""

    by_rank: Mapping[int, tuple[Report, ...]]

    def line(self) -> str:
        """Returns the one-line representation."""
        peaks = [report.peak_bytes for reports in self.by_rank.values() for report in reports]
        graphs = max(map(len, self.by_rank.values()), default=0)
        return f"{len(self.by_rank)} ranks, up to {graphs} graphs, largest peak {format_bytes(max(peaks, default=0))}"

    def tables(self) -> Sequence[PlainTable]:
        """Returns the printed table: a row for each graph of each rank."""
        columns = ("rank", "graph", "budget", "peak", "baseline", "recomputation", "ops", "plan")
        table = PlainTable("", columns, numbers=7)
        for rank, reports in sorted(self.by_rank.items()):
            for number, report in enumerate(reports):
                table.add_row(
                    rank, number, "none" if report.budget_bytes is None else format_bytes(report.budget_bytes),
                    format_bytes(report.peak_bytes), format_bytes(report.baseline_peak_bytes),
                    format_seconds(report.recompute_seconds), report.recomputed_ops,
                    f"of {len(report.ranks)} ranks" if report.ranks else "its own",
                )  # fmt: skip
        return [table]
