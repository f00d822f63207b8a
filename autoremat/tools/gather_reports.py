"""``autoremat.gather_reports``: collects the reports of all ranks of a distributed job."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoremat.basics.display import PlainTable, Shown
from autoremat.basics.errors import OptionsError
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.compiler.exchange import Session
from autoremat.report.registry import reports
from autoremat.report.report import Report
from autoremat.torch_private.process_groups import job


@dataclass(frozen=True, repr=False)
class RankReports(Shown):
    """The reports of several ranks. ``by_rank`` has those of each rank, oldest first."""

    by_rank: Mapping[int, tuple[Report, ...]]

    def line(self) -> str:
        peaks = [report.peak_bytes for of_rank in self.by_rank.values() for report in of_rank]
        graphs = max(map(len, self.by_rank.values()), default=0)
        return f"{len(self.by_rank)} ranks, up to {graphs} graphs, largest peak {format_bytes(max(peaks, default=0))}"

    def tables(self) -> Sequence[PlainTable]:
        columns = ("rank", "graph", "budget", "peak", "baseline", "recomputation", "ops", "plan")
        table = PlainTable("", columns, numbers=7)
        for rank, of_rank in sorted(self.by_rank.items()):
            for number, report in enumerate(of_rank):
                table.add_row(
                    rank, number, "none" if report.budget_bytes is None else format_bytes(report.budget_bytes),
                    format_bytes(report.peak_bytes), format_bytes(report.baseline_peak_bytes),
                    format_seconds(report.recompute_seconds), report.recomputed_ops,
                    f"of {len(report.ranks)} ranks" if report.ranks else "its own",
                )  # fmt: skip
        return [table]


def gather_reports(ranks: Iterable[int] | None = None) -> RankReports:
    """Returns the reports of all ranks of the job, or of ``ranks``. All of these ranks call it, as often as each other.

    In a process without a job, the result holds the reports of rank 0, which is this process. Reports travel as JSON through
    the job's store, so their ``plan`` stays behind.

    Raises ``OptionsError`` for ranks that the job does not have. Raises ``AgreementError`` if a rank is lost, or does not come
    within five minutes or half of the process group's timeout.
    """
    present = job()
    if present is None:
        return RankReports({0: tuple(reports())})
    wanted = tuple(range(present.world_size) if ranks is None else sorted(set(ranks)))
    if unknown := [rank for rank in wanted if not 0 <= rank < present.world_size]:
        raise OptionsError(f"the job has ranks 0 to {present.world_size - 1}, and reports of rank {unknown[0]} are asked for")
    session = Session(present, f"reports/{present.arrivals['reports']}", wanted)
    present.arrivals["reports"] += 1
    texts = session.exchange("reports", [report.to_json() for report in reports()])
    return RankReports({rank: tuple(map(Report.from_json, of_rank)) for rank, of_rank in texts.items()})
