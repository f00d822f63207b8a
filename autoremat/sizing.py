"""``autoremat.max_batch``: the largest batch or sequence of which a step fits a budget, found without running one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat import torch_compat, torch_fake
from autoremat.errors import BudgetInfeasible, Occupant, OptionsError
from autoremat.options import Options
from autoremat.preview import explain_by
from autoremat.progress import said_if_slow
from autoremat.report import Report
from autoremat.units import format_bytes

Call = tuple[Sequence[Any], Mapping[str, Any]]

FASTEST = 16
"""At most so many times the largest size that fits is tried next, however little memory that took."""


@dataclass(frozen=True)
class Fit:
    """The largest size that fits, and what the search saw. Printed: a few lines."""

    size: int
    report: Report
    """Of a step of ``size``."""
    next_size: int | None
    """The next larger size, which does not fit; None if all up to the limit do."""
    next_report: Report | None
    """Of the smallest plan for ``next_size``."""
    tried: tuple[tuple[int, int, bool], ...]
    """Sizes in the order in which they were tried, the smallest peak found for each in bytes, whether it fits."""

    def __str__(self) -> str:
        budget = self.report.budget_bytes or 0
        lines = [
            f"largest size that fits {format_bytes(budget)}: {self.size}",
            f"  its peak is {format_bytes(self.report.predicted_peak_bytes)}, with {self.report.overhead:.1%} of the forward "
            "recomputed",
        ]
        if self.next_report is not None:
            lines.append(f"  {self.next_size} needs at least {format_bytes(self.next_report.minimum_peak_bytes)}")
        else:
            lines.append("  larger ones were not allowed")
        return "\n".join(lines)


def max_batch(
    make_inputs: Callable[[int], Any],
    model_or_fn: Callable[..., Any],
    memory_budget: int | str,
    *,
    step: int = 1,
    limit: int = 1 << 20,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
) -> Fit:
    """The largest multiple of ``step``, up to ``limit``, for which ``model_or_fn`` on ``make_inputs(size)`` fits.

    ``make_inputs`` gets a size and returns the arguments: a tuple or list of positional ones, a dict of keyword ones, or a
    single one. What it allocates is fake, so that sizes beyond the memory at hand can be tried. A larger size is taken to need
    more memory; how much it needs guides the search, which plans for a few sizes. ``memory_budget``: bytes, text such as
    "60GiB", or "auto". ``options`` and ``device`` as in ``autoremat.explain``.

    Raises ``BudgetInfeasible`` if not even ``step`` fits, and ``OptionsError`` for a budget that is no number of bytes.
    """
    if isinstance(memory_budget, float) or memory_budget is None:
        raise OptionsError(f'memory_budget={memory_budget!r}: max_batch needs bytes, as in "60GiB", or "auto"')
    if not 1 <= step <= limit:
        raise OptionsError(f"step={step}, limit={limit} is not accepted. Accepted: 1 <= step <= limit")
    wanted = {**(options or {}), "memory_budget": memory_budget, "on_infeasible": "best_effort"}
    parsed = Options.parse(wanted, None, torch_compat.inductor_config_names)

    def report_for(count: int) -> Report:
        with torch_fake.new_mode():
            given = make_inputs(count * step)
        args, kwargs = _call(given)
        return explain_by(model_or_fn, args, kwargs, parsed, device)

    with said_if_slow("autoremat: looking for the largest size that fits"):
        search = _Search(report_for, limit // step)
        search.run()
    if search.fits == 0:
        raise _nothing_fits(search.reports[1])
    miss = search.misses
    return Fit(
        search.fits * step,
        search.reports[search.fits],
        None if miss is None else miss * step,
        None if miss is None else search.reports[miss],
        tuple((count * step, report.minimum_peak_bytes, _fits(report)) for count, report in search.reports.items()),
    )


def _call(given: Any) -> Call:
    """What ``make_inputs`` returned, as arguments."""
    if isinstance(given, Mapping):
        return (), given
    return (given, {}) if isinstance(given, (tuple, list)) else ((given,), {})


def _fits(report: Report) -> bool:
    return all(one.fits for one in (report, *report.others))


def _nothing_fits(report: Report) -> BudgetInfeasible:
    alive = report.peak_after.alive if report.peak_after is not None else ()
    return BudgetInfeasible(
        budget_bytes=report.budget_bytes or 0,
        minimum_bytes=report.minimum_peak_bytes,
        lower_bound_bytes=report.lower_bound_bytes,
        occupants=[Occupant(tensor.name, tensor.bytes, tensor.module, tensor.source) for tensor in alive],
        device=report.device,
    )


@dataclass
class _Search:
    """Bisection, with a straight line through two peaks for the first guesses."""

    report_for: Callable[[int], Report]
    limit: int
    reports: dict[int, Report] = field(default_factory=dict)
    fits: int = 0
    """The largest count that is known to fit."""
    misses: int | None = None
    """The smallest count that is known not to."""

    def run(self) -> None:
        """Try counts until the largest that fits is known."""
        count: int | None = 1
        while count is not None:
            self.reports[count] = self.report_for(count)
            if _fits(self.reports[count]):
                self.fits = max(self.fits, count)
            else:
                self.misses = count if self.misses is None else min(self.misses, count)
            count = self.next_count(count)

    def next_count(self, last: int) -> int | None:
        """What to try after ``last``; None if nothing is left to know."""
        low, high = self.fits, self.misses
        if low == 0 or low >= self.limit or (high is not None and high - low <= 1):
            return None
        if high is None:
            guess = 2 * low if len(self.reports) < 2 else max(2 * low, self.on_a_line())
            return min(guess, FASTEST * low, self.limit)
        way = len(self.reports) % 3
        # The guess, then beside it, then halfway: a guess that is right is confirmed at once, a wrong one costs little.
        guess = self.on_a_line() if way == 0 else (low + 1 if last == low else high - 1) if way == 1 else (low + high) // 2
        return min(max(guess, low + 1), high - 1)

    def on_a_line(self) -> int:
        """The count whose peak would be the budget, if peaks lay on the line through the two nearest known ones."""
        nearest = sorted(self.reports, key=lambda count: abs(count - self.fits))[:2]
        (first, below), (second, above) = sorted((count, self.reports[count].minimum_peak_bytes) for count in nearest)
        budget = self.reports[first].budget_bytes or 0
        slope = (above - below) / (second - first)
        return int(first + (budget - below) / slope) if slope > 0 else 2 * second
