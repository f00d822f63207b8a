"""``autoremat.max_batch``: finds the largest batch or sequence whose step fits a budget, without running one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat.basics.checks import arguments_of, options_of
from autoremat.basics.display import PlainTable, Shown, named_figures
from autoremat.basics.errors import BudgetInfeasible, OptionsError
from autoremat.basics.progress import status_if_slow
from autoremat.basics.units import bytes_apart, format_bytes
from autoremat.options.options import Options
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.report.report import Report
from autoremat.request.budgets import refuse_shares
from autoremat.tools.explain import explain_by
from autoremat.torch_private import compilers, fake_tensors

LIMIT = 1 << 20
"""Largest size that is tried if the user gives no limit."""


Outcome = Report | BudgetInfeasible
"""The result for one size: the report of a plan that fits, or the error that none fits."""

FASTEST = 16
"""Maximum ratio of the next size to the largest size that fits, however little memory that one needs."""


def minimum_bytes_of(outcome: Outcome) -> int:
    """Returns the minimum peak found in bytes; for several graphs the largest of their minimum peaks."""
    if isinstance(outcome, BudgetInfeasible):
        return outcome.minimum_bytes
    return max(one.minimum_peak_bytes for one in (outcome, *outcome.others))


@dataclass
class SizeSearch:
    """A bisection that takes its first guesses from a straight line through two peaks."""

    outcome_of: Callable[[int], Outcome]
    limit: int
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    fits: int = 0
    """Largest count that is known to fit."""

    @property
    def misses(self) -> int | None:
        """The smallest count above ``fits`` that is known not to fit; None if there is none."""
        refused = (count for count, outcome in self.outcomes.items() if isinstance(outcome, BudgetInfeasible))
        return min((count for count in refused if count > self.fits), default=None)

    def run(self) -> None:
        """Tries counts until the largest one that fits is known."""
        count: int | None = 1
        while count is not None:
            self.outcomes[count] = self.outcome_of(count)
            if not isinstance(self.outcomes[count], BudgetInfeasible):
                self.fits = max(self.fits, count)
            count = self.next_count(count)

    def next_count(self, last: int) -> int | None:
        """Returns the count to try after ``last``; None if the search is complete."""
        low, high = self.fits, self.misses
        if low == 0 or low >= self.limit or (high is not None and high - low <= 1):
            return None
        if high is None:
            guess = 2 * low if len(self.outcomes) < 2 else max(2 * low, self.on_a_line())
            return min(guess, FASTEST * low, self.limit)
        way = len(self.outcomes) % 3
        # Try the guess, then its neighbour, then the middle. A correct guess is confirmed at once; a wrong one costs little.
        guess = self.on_a_line() if way == 0 else (low + 1 if last == low else high - 1) if way == 1 else (low + high) // 2
        return min(max(guess, low + 1), high - 1)

    def on_a_line(self) -> int:
        """Returns the count whose peak would equal the budget if peaks lay on the line through the two nearest known ones."""
        nearest = sorted(self.outcomes, key=lambda count: abs(count - self.fits))[:2]
        # A device budget shrinks with the inputs, so the line is that of the excess over the budget.
        excesses = {count: minimum_bytes_of(one) - (one.budget_bytes or 0) for count, one in self.outcomes.items()}
        (first, below), (second, above) = sorted((count, excesses[count]) for count in nearest)
        slope = (above - below) / (second - first)
        return int(first - below / slope) if slope > 0 else 2 * second


@dataclass(frozen=True, repr=False)
class Fit(Shown):
    """The largest size that fits, and the sizes that the search tried. Printed as a few lines."""

    size: int
    report: Report
    """Report of a step of ``size``."""
    next_size: int | None
    """Next larger size, which does not fit; None if all sizes up to the limit fit."""
    next_minimum_bytes: int | None
    """Minimum peak found for ``next_size``, in bytes."""
    tried: tuple[tuple[int, int, bool], ...]
    """Sizes in the sequence of the search, each with the minimum peak found in bytes, and True if it fits."""

    def line(self) -> str:
        more = "no larger size was allowed" if self.next_size is None else f"{self.next_size} does not"
        return f"{self.size} fits {format_bytes(self.report.budget_bytes or 0)}, {more}, {len(self.tried)} sizes tried"

    def tables(self) -> Sequence[PlainTable]:
        report, budget = self.report, self.report.budget_bytes or 0
        asked, least = bytes_apart(budget, budget if self.next_minimum_bytes is None else self.next_minimum_bytes)
        none = "not allowed" if self.next_size is None else f"no plan: the minimum peak found for {self.next_size} is {least}"
        again = f", with {report.overhead:.1%} of the forward recomputed"
        rows = [(f"largest size that fits {asked}", str(self.size)), ("peak", f"{format_bytes(report.peak_bytes)}{again}")]
        if report.resident_bytes:
            rows.append(("gradients of earlier micro-batches", f"{format_bytes(report.resident_bytes)} of the peak"))
        return [named_figures([*rows, ("larger sizes", none)])]


def max_batch(
    make_inputs: Callable[[int], Any],
    model_or_fn: Callable[..., Any],
    memory_budget: int | str | DeviceBudget,
    *,
    step: int = 1,
    limit: int = LIMIT,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    lower: bool = False,
    accumulate: bool | None = None,
) -> Fit:
    """Returns the largest multiple of ``step``, up to ``limit``, for which ``model_or_fn`` on ``make_inputs(size)`` fits.

    ``make_inputs`` maps a size to the arguments: a tuple or list of positional arguments, a dict of keyword arguments, or a
    single argument. Its tensors are fake, so sizes beyond the memory of this machine can be tried. The search assumes that a
    larger size needs more memory. It plans for a few sizes only, guided by their peaks.

    ``memory_budget`` is in bytes, or text such as "60GiB", a device budget, or "auto". ``options``, ``device`` and ``lower``
    are those of ``autoremat.explain``. With ``lower=True``, generated code decides for each size that is tried.

    With ``accumulate=True``, every micro-batch of a step fits that accumulates gradients. The first allocates them. Later ones
    compute further gradients and add to these, so both are live. None means the option of the same name.

    Raises ``BudgetInfeasible`` if even ``step`` does not fit, and ``CaptureError`` if the step cannot be traced. Raises
    ``OptionsError`` for a budget that is not in bytes, and for an invalid ``step`` or ``limit``.
    """
    parsed = options_for_sizes("max_batch", memory_budget, step, limit, options, accumulate)
    search = SizeSearch(planning_sizes(make_inputs, model_or_fn, parsed, step, device, lower), limit // step)
    with status_if_slow("looking for the largest size that fits", shown=parsed.progress):
        search.run()
    fitting = search.outcomes.get(search.fits)
    if not isinstance(fitting, Report):
        refused = search.outcomes[1]
        assert isinstance(refused, BudgetInfeasible)
        raise refused
    miss = search.misses
    return Fit(
        search.fits * step,
        fitting,
        None if miss is None else miss * step,
        None if miss is None else minimum_bytes_of(search.outcomes[miss]),
        tuple(
            (count * step, minimum_bytes_of(outcome), isinstance(outcome, Report)) for count, outcome in search.outcomes.items()
        ),
    )


def options_for_sizes(
    tool: str,
    memory_budget: object,
    step: int,
    limit: int,
    options: Mapping[str, Any] | None,
    accumulate: bool | None,
) -> Options:
    """Returns the options under which ``tool`` plans steps of several sizes.

    Raises ``OptionsError`` for a budget that is not in bytes, and for an invalid ``step`` or ``limit``.
    """
    refuse_shares(memory_budget, tool)
    if not 1 <= step <= limit:
        raise OptionsError(f"step={step}, limit={limit} is not accepted. Accepted: 1 <= step <= limit")
    wanted = {**options_of(options), "memory_budget": memory_budget, "on_infeasible": "raise"}
    if accumulate is not None:
        wanted["accumulate"] = accumulate
    return Options.parse(wanted, None, compilers.inductor_config_names)


def planning_sizes(
    make_inputs: Callable[[int], Any],
    model_or_fn: Callable[..., Any],
    options: Options,
    step: int,
    device: str | torch.device | None,
    lower: bool,
) -> Callable[[int], Outcome]:
    """Returns the function that plans a step of ``count * step`` samples, given ``count``."""
    known: dict[str, int] = {}

    def outcome_of(count: int) -> Outcome:
        size, told = count * step, [f"{other} {verdict}" for verdict, other in sorted(known.items())]
        with fake_tensors.new_mode():
            given = make_inputs(size)
        args, kwargs = arguments_of(given)
        try:
            with status_if_slow(f"trying {size}" + (f" ({', '.join(told)})" if told else "")):
                report = explain_by(model_or_fn, args, kwargs, options, device, lower)
            known["fits"] = max(size, known.get("fits", size))
            return report
        except BudgetInfeasible as error:  # the backend would raise this error too
            known["is too large"] = min(size, known.get("is too large", size))
            return error
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"stopped while {size} was planned; known: {', '.join(told) or 'nothing'}") from stop

    return outcome_of
