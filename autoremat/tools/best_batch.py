"""``autoremat.best_batch``: finds the batch with the most samples per predicted second within a budget, without a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoremat.basics.checks import as_int, refused
from autoremat.basics.display import PlainTable, Shown
from autoremat.basics.errors import BudgetInfeasible
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.report.report import Report
from autoremat.tools.advice import seconds_of
from autoremat.tools.max_batch import (
    LIMIT,
    Outcome,
    SizeSearch,
    minimum_bytes_of,
    options_for_sizes,
    planning_sizes,
)


@dataclass(frozen=True, repr=False)
class BestBatch(Shown):
    """The size with the most samples per predicted second. Printed as a table of all sizes that were planned."""

    size: int
    samples_per_second: float
    report: Report
    """Report of a step of ``size``."""
    tried: tuple[tuple[int, float, int], ...]
    """Each size, ascending, with its seconds of forward and backward (infinite if it does not fit) and its minimum peak."""

    def line(self) -> str:
        budget = format_bytes(self.report.budget_bytes or 0)
        return f"{self.size} is best within {budget}: {self.samples_per_second:.4g} samples per second predicted"

    def tables(self) -> Sequence[PlainTable]:
        table = PlainTable(self.line(), ("size", "samples/s", "forward and backward", "least peak"), numbers=4)
        for size, seconds, peak in self.tried:
            speed, time = (f"{size / seconds:.4g}", format_seconds(seconds)) if seconds < float("inf") else ("does not fit", "")
            table.add_row(str(size), speed, time, format_bytes(peak))
        return [table]


def best_batch(
    make_inputs: Callable[[int], Any],
    model_or_fn: Callable[..., Any],
    memory_budget: int | str | DeviceBudget,
    *,
    step: int = 1,
    limit: int = LIMIT,
    candidates: Iterable[int] | None = None,
    seconds_per_step: float = 0.0,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
) -> BestBatch:
    """Returns the size with the most samples per second of ``explain`` for which ``model_or_fn`` on ``make_inputs(size)`` fits.

    Arguments are those of ``autoremat.max_batch``. Plans the largest that fits and three halvings, or exactly ``candidates``.
    ``seconds_per_step`` are those that no batch changes, such as the optimizer's. Raises what ``autoremat.max_batch`` raises.
    """
    sizes = [size for size in map(as_int, candidates or ()) if size]
    if candidates is not None and min(sizes, default=0) < 1:
        raise refused("candidates", candidates, "sizes, ints >= 1, at least one")
    unit, parsed = 1 if sizes else step, options_for_sizes("best_batch", memory_budget, step, limit, options, None)
    outcome_of = planning_sizes(make_inputs, model_or_fn, parsed, unit, device, lower=False)
    search = SizeSearch(outcome_of, limit // unit)
    if not sizes:
        search.run()
        sizes = [search.fits >> halvings for halvings in range(4) if search.fits >> halvings]
    outcomes: dict[int, Outcome] = search.outcomes | {n: outcome_of(n) for n in sizes if n not in search.outcomes}
    seconds = {n: seconds_of(one) if isinstance(one, Report) else float("inf") for n, one in sorted(outcomes.items())}
    best = max(seconds, key=lambda count: (count / (seconds[count] + seconds_per_step), -count))
    report = outcomes[best]
    if isinstance(report, BudgetInfeasible):
        raise report
    tried = tuple((count * unit, time, minimum_bytes_of(outcomes[count])) for count, time in seconds.items())
    return BestBatch(best * unit, best * unit / (seconds[best] + seconds_per_step), report, tried)
