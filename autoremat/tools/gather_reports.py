"""``autoremat.gather_reports``: collects the reports of all ranks of a distributed job."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from autoremat.agreement.joining import membership
from autoremat.basics.errors import OptionsError
from autoremat.report.rank_reports import RankReports
from autoremat.report.registry import reports
from autoremat.report.report import Report

PATIENCE = 300.0
"""Seconds to wait for the slowest rank."""

_numbers = itertools.count()


def gather_reports(ranks: Iterable[int] | None = None) -> RankReports:
    """Returns the reports of all ranks of the job, or of ``ranks``. All of these ranks call it, as often as each other.

    In a process without a job, the result holds the reports of rank 0, which is this process. Reports travel as JSON through
    the job's store, so their ``plan`` stays behind.

    Raises ``OptionsError`` for ranks that the job does not have. Raises ``AgreementError`` if a rank is lost, or does not come
    within five minutes and half of the process group's timeout.
    """
    present = membership()
    if present is None:
        return RankReports({0: tuple(reports())})
    wanted = range(present.job.world_size) if ranks is None else sorted(set(ranks))
    if unknown := [rank for rank in wanted if not 0 <= rank < present.job.world_size]:
        raise OptionsError(
            f"the job has ranks 0 to {present.job.world_size - 1}, and reports of rank {unknown[0]} are asked for"
        )
    channel, name = present.channel, f"reports/{next(_numbers)}"
    channel.write(f"{name}/{channel.rank}", [report.to_json() for report in reports()])
    texts = {rank: channel.wait_for(f"{name}/{rank}", rank, PATIENCE) for rank in wanted}
    return RankReports({rank: tuple(map(Report.from_json, of_rank)) for rank, of_rank in texts.items()})
