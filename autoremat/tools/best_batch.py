"""``autoremat.best_batch``: finds the batch with the most samples per predicted second within a budget, without a run.

A larger batch spreads the fixed seconds of a step over more samples, and may need recomputation to fit. Which batch is best
depends on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from autoremat.basics.checks import as_float, as_int, refused
from autoremat.basics.display import PlainTable, Shown
from autoremat.basics.errors import BudgetInfeasible
from autoremat.basics.progress import status_if_slow
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.report.report import Report
from autoremat.tools.max_batch import LIMIT, options_for_sizes, planning_sizes
from autoremat.tools.size_search import Outcome, SizeSearch, minimum_bytes_of, seconds_of

FINENESS = 16
"""The search ends if the sizes next to the best one differ from it by at most this part of it."""


@dataclass(frozen=True)
class TriedBatch:
    """A size that was planned. Seconds are estimates of the cost model; figures of a size that does not fit are None."""

    size: int
    peak_bytes: int
    """Best-known peak; for a size that does not fit, the minimum peak found."""
    samples_per_second: float | None = None
    seconds: float | None = None
    """Seconds of forward and backward."""
    recomputed_share: float | None = None
    """Seconds of recomputation, as a share of the forward and backward without it."""

    @property
    def fits(self) -> bool:
        """True if a plan within the budget was found."""
        return self.samples_per_second is not None


@dataclass(frozen=True, repr=False)
class BestBatch(Shown):
    """The size with the most samples per predicted second, and all sizes that were planned. Printed as a table."""

    size: int
    samples_per_second: float
    """Samples per second of forward, backward and ``seconds_per_step``, by the cost model."""
    report: Report
    """Report of a step of ``size``."""
    tried: tuple[TriedBatch, ...]
    """The sizes that were planned, the smallest first."""

    @property
    def largest(self) -> int:
        """The largest of the planned sizes that fit."""
        return max(one.size for one in self.tried if one.fits)

    def line(self) -> str:
        """Returns the one line that a prompt shows."""
        return (
            f"{self.size} is best within {format_bytes(self.report.budget_bytes or 0)}: {self.samples_per_second:.4g} samples "
            f"per second predicted, {len(self.tried)} sizes tried, {self.largest} is the largest that fits"
        )

    def tables(self) -> Sequence[PlainTable]:
        """Returns the printed tables."""
        head = PlainTable("", ("",), numbers=0, show_header=False)
        head.add_row(self.line())
        table = PlainTable("", ("size", "samples/s", "of the best", "step", "peak", "recomputed"), numbers=6)
        for one in self.tried:
            if one.samples_per_second is None:
                table.add_row(str(one.size), "does not fit", "", "", format_bytes(one.peak_bytes), "")
                continue
            table.add_row(
                str(one.size), f"{one.samples_per_second:.4g}", f"{one.samples_per_second / self.samples_per_second:.1%}",
                format_seconds(one.seconds or 0.0), format_bytes(one.peak_bytes), f"{one.recomputed_share or 0.0:.1%}",
            )  # fmt: skip
        return [head, table]


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
    lower: bool = False,
    accumulate: bool | int | None = None,
) -> BestBatch:
    """Returns the size with the most samples per predicted second for which ``model_or_fn`` on ``make_inputs(size)`` fits.

    The first three arguments, ``step``, ``limit``, ``options``, ``device`` and ``lower`` are those of ``autoremat.max_batch``.
    Sizes are multiples of ``step``: the largest that fits, its halves, and ever nearer neighbours of the best one. With
    ``candidates``, exactly these sizes are planned instead. Samples per second are ``size`` over the seconds of the cost model,
    with ``lower=True`` those of the kernels of the generated code.

    ``seconds_per_step`` are seconds of a step that no batch changes, such as the optimizer's. They favour larger batches. With
    ``accumulate=4``, they are spread over four micro-batches of ``size``, and the gradients of earlier ones are counted, as
    with ``accumulate=True``.

    Raises ``BudgetInfeasible`` if no size fits, ``CaptureError`` if the step cannot be traced, and ``OptionsError`` for a value
    that is not accepted.
    """
    sizes = None if candidates is None else _checked(candidates)
    overhead = _seconds(seconds_per_step) / _micro_batches(accumulate)
    counted = accumulate if isinstance(accumulate, bool | None) else accumulate > 1
    parsed = options_for_sizes("best_batch", memory_budget, step, limit, options, counted)
    unit = 1 if sizes is not None else step
    outcome_of = planning_sizes(make_inputs, model_or_fn, parsed, unit, device, lower)
    with status_if_slow("looking for the best batch", shown=parsed.progress):
        if sizes is not None:
            outcomes = {size: outcome_of(size) for size in sizes}
        else:
            found = SizeSearch(outcome_of, limit // step)
            found.run()
            outcomes = found.outcomes
            if found.fits:
                Descent(outcome_of, outcomes, overhead, lower).run()
    return _result(outcomes, unit, overhead, lower)


def _checked(candidates: Iterable[int]) -> list[int]:
    """Returns the sizes, ascending and without repetition."""
    sizes = [as_int(size) for size in candidates]
    if not sizes or any(size is None or size < 1 for size in sizes):
        raise refused("candidates", sizes, "sizes, ints >= 1, at least one")
    return sorted({size for size in sizes if size is not None})


def _seconds(value: object) -> float:
    """Returns ``seconds_per_step`` as a float."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= as_float(value) < math.inf:
        raise refused("seconds_per_step", value, "a finite number of seconds >= 0")
    return as_float(value)


def _micro_batches(accumulate: bool | int | None) -> int:
    """Returns the number of micro-batches over which the seconds of a step are spread."""
    if accumulate is None or isinstance(accumulate, bool):
        return 1
    count = as_int(accumulate)
    if count is None or count < 1:
        raise refused("accumulate", accumulate, "True, False, None, or a number of micro-batches, an int >= 1")
    return count


def _result(outcomes: Mapping[int, Outcome], unit: int, overhead: float, by_code: bool) -> BestBatch:
    """Returns the result for the planned sizes ``count * unit``. Raises the error of the smallest one if none fits."""
    tried = tuple(_tried(count * unit, outcome, overhead, by_code) for count, outcome in sorted(outcomes.items()))
    best = max(tried, key=lambda one: (one.samples_per_second or 0.0, -one.size))
    report = outcomes[best.size // unit]
    if isinstance(report, BudgetInfeasible):
        smallest = outcomes[min(outcomes)]
        assert isinstance(smallest, BudgetInfeasible)
        raise smallest
    return BestBatch(best.size, best.samples_per_second or 0.0, report, tried)


def _tried(size: int, outcome: Outcome, overhead: float, by_code: bool) -> TriedBatch:
    if isinstance(outcome, BudgetInfeasible):
        return TriedBatch(size, minimum_bytes_of(outcome))
    seconds, graphs = seconds_of(outcome, by_code), (outcome, *outcome.others)
    recomputed, whole = sum(one.recompute_seconds for one in graphs), sum(one.step_seconds for one in graphs)
    total = seconds + overhead
    speed = size / total if total else math.inf
    return TriedBatch(size, max(one.peak_bytes for one in graphs), speed, seconds, recomputed / whole if whole else 0.0)


@dataclass
class Descent:
    """A search for the best count, from the largest that fits by halves, then between the neighbours of the best."""

    outcome_of: Callable[[int], Outcome]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    overhead: float = 0.0
    """Seconds of a step beside forward and backward."""
    by_code: bool = False
    """True if sizes are compared by the kernels of their code: all of them have code, or none."""

    def speed(self, count: int) -> float:
        """Returns the samples per second of ``count``, which is planned if it was not; 0 if it does not fit."""
        if count not in self.outcomes:
            self.outcomes[count] = self.outcome_of(count)
        return _tried(count, self.outcomes[count], self.overhead, self.by_code).samples_per_second or 0.0

    def fitting(self) -> list[int]:
        """Returns the planned counts that fit, ascending."""
        return sorted(count for count, outcome in self.outcomes.items() if isinstance(outcome, Report))

    def best(self) -> int:
        """Returns the best planned count; among equals the smallest."""
        return max(self.fitting(), key=lambda count: (self.speed(count), -count))

    def run(self) -> None:
        """Plans counts until the neighbours of the best are near."""
        count = self.fitting()[-1]
        while count > 1:
            lower = count // 2
            # Without recomputation, a smaller batch only spreads the fixed seconds over fewer samples.
            if self.speed(lower) < self.speed(self.best()) and not self._recomputes(lower):
                break
            count = lower
        while (middle := self._between_neighbours()) is not None:
            self.speed(middle)

    def _recomputes(self, count: int) -> bool:
        outcome = self.outcomes[count]
        return isinstance(outcome, Report) and any(one.recompute_seconds > 0 for one in (outcome, *outcome.others))

    def _between_neighbours(self) -> int | None:
        """Returns the middle of the wider gap beside the best count; None if both are narrow."""
        known, best = self.fitting(), self.best()
        place = known.index(best)
        gaps = [(known[place + 1] - best, best)] if best < known[-1] else []
        gaps += [(best - known[place - 1], known[place - 1])] if place else []
        gap, start = max(gaps, default=(0, 0))
        return start + gap // 2 if gap > max(1, best // FINENESS) else None
