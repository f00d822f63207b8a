"""``autoremat.max_batch`` and ``autoremat.best_batch``: the largest size that fits a budget, and the fastest; none runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat.basics.checks import arguments_of, as_int, options_of, refused
from autoremat.basics.display import PlainTable, Shown, named_figures
from autoremat.basics.errors import BudgetInfeasible, OptionsError
from autoremat.basics.progress import status_if_slow
from autoremat.basics.units import bytes_apart, format_bytes, format_seconds
from autoremat.options.options import Options
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.report.report import Report
from autoremat.report.text_tables import brief
from autoremat.tools.advice import seconds_of
from autoremat.tools.explain import explain_by
from autoremat.torch_private import compilers, fake_tensors

LIMIT = 1 << 20
"""Largest size that is tried if the user gives no limit."""

FASTEST = 16
"""Maximum ratio of the next size to the largest size that fits, however little memory that one needs."""

CLOSE = 32
"""Part of the largest size that is known to fit, by which the least one that does not may exceed it."""

Outcome = Report | BudgetInfeasible
"""The result for one size: the report of a plan that fits, or the error that none fits."""


def minimum_bytes_of(outcome: Outcome) -> int:
    """Returns the minimum peak found in bytes; for several graphs the largest of their minimum peaks."""
    if isinstance(outcome, BudgetInfeasible):
        return outcome.minimum_bytes
    return max(one.minimum_peak_bytes for one in (outcome, *outcome.others))


@dataclass
class SizeSearch:
    """Plans sizes, which are counts of ``step``, by a bisection that takes guesses from a straight line through two peaks."""

    outcome_of: Callable[[int], Outcome]
    limit: int
    step: int = 1
    shows: bool = True
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    fits: int = 0
    """Largest count that is known to fit."""
    misses: int | None = None
    """Smallest count that is known not to fit."""

    def plan(self, count: int) -> None:
        """Plans the size of ``count``, unless that is known."""
        if count in self.outcomes:
            return
        size, told = count * self.step, [f"{self.fits * self.step} fits"] if self.fits else []
        told += [] if self.misses is None else [f"{self.misses * self.step} is too large"]
        try:
            with status_if_slow(f"trying {size}" + (f" ({', '.join(told)})" if told else ""), self.shows):
                self.outcomes[count] = self.outcome_of(count)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(f"stopped while {size} was planned; known: {', '.join(told) or 'nothing'}") from stop
        if isinstance(self.outcomes[count], BudgetInfeasible):
            self.misses = min(count, self.misses or count)
        else:
            self.fits = max(count, self.fits)

    def run(self) -> None:
        """Plans counts until the largest one that fits is known, or one that is close to it."""
        count = 1
        with status_if_slow("looking for the largest size that fits", self.shows):
            while count not in self.outcomes:
                self.plan(count)
                if self.fits:
                    count = self.following()

    def following(self) -> int:
        """Returns the count to plan next, or a known one if the search is over.

        It is the guess of the line, or the neighbour that ends the search if the guess is right. In turns it is a count that
        halves what is left, so a wrong guess costs little.
        """
        low, high, tries = self.fits, self.misses, len(self.outcomes)
        close = max(low // CLOSE, 1)
        if high is None:
            guess = 2 * low if tries % 4 == 1 else max(self.on_a_line(), low + close)
            return min(guess, FASTEST * low, self.limit)
        if high - low <= close:
            return low
        return (low + high) // 2 if tries % 3 == 2 else min(max(self.on_a_line(), low + close), high - close)

    def on_a_line(self) -> int:
        """Returns the count whose peak would equal the budget if peaks lay on the line through the largest count that fits and
        the smallest that does not, or else the next smaller one."""
        nearest = sorted(self.outcomes.items(), key=lambda one: (one[0] != self.misses, abs(one[0] - self.fits)))[:2]
        # A device budget shrinks with the inputs, so the line is that of the excess over the budget.
        excesses = sorted((count, minimum_bytes_of(one) - (one.budget_bytes or 0)) for count, one in nearest)
        (first, below), (second, above) = excesses
        slope = (above - below) / (second - first)
        return int(first - below / slope) if slope > 0 else 2 * second


def _search_of(
    tool: str,
    make_inputs: Callable[[int], Any],
    model_or_fn: Callable[..., Any],
    options: Mapping[str, Any],
    step: int,
    limit: int,
    device: str | torch.device | None,
    lower: bool = False,
) -> SizeSearch:
    if isinstance(budget := options["memory_budget"], float | None):
        raise OptionsError(f'memory_budget={budget!r}: {tool} needs bytes, as in "60GiB", or "auto"')
    if not 1 <= step <= limit:
        raise OptionsError(f"step={step}, limit={limit} is not accepted. Accepted: 1 <= step <= limit")
    parsed = Options.parse({**options, "on_infeasible": "raise"}, None, compilers.inductor_config_names)

    def outcome_of(count: int) -> Outcome:
        with fake_tensors.new_mode():
            args, kwargs = arguments_of(make_inputs(count * step))
        try:
            return explain_by(model_or_fn, args, kwargs, parsed, device, lower)
        except BudgetInfeasible as error:  # the backend would raise this error too
            return error

    return SizeSearch(outcome_of, limit // step, step, parsed.progress)


@dataclass(frozen=True, repr=False)
class Fit(Shown):
    """The largest size that fits, and the sizes that the search tried. Printed as a few lines."""

    size: int
    report: Report
    """Report of a step of ``size``."""
    next_size: int | None
    """Least size that is known not to fit; None if all sizes up to the limit fit."""
    next_minimum_bytes: int | None
    """Minimum peak found for ``next_size``, in bytes."""
    tried: tuple[tuple[int, int, bool], ...]
    """Sizes in the sequence of the search, each with the minimum peak found in bytes, and True if it fits."""

    def line(self) -> str:
        more = "no larger size was allowed" if self.next_size is None else f"{self.next_size} does not"
        return f"{self.size} fits {format_bytes(self.report.budget_bytes or 0)}, {more}, {len(self.tried)} sizes tried"

    def tables(self) -> Sequence[PlainTable]:
        report, budget, told = self.report, self.report.budget_bytes or 0, dict(brief(self.report))
        rows = [("largest size that fits", str(self.size)), *((name, told[name]) for name in ("budget", "peak", "added time"))]
        rows += [("loss", f"in {report.loss_chunks} chunks")] if report.loss_chunks > 1 else []
        held = f"{format_bytes(report.resident_bytes)} of the peak"
        rows += [("gradients of earlier micro-batches", held)] if report.resident_bytes else []
        tried = (f"{n}" if fits else f"{n} (least {bytes_apart(peak, budget)[0]})" for n, peak, fits in self.tried)
        rows.append(("sizes tried", ", ".join(tried) + "; no larger one is allowed" * (self.next_size is None)))
        rows += [("note", text) for text in report.notes]
        return [named_figures(rows)]


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

    A smaller one may train faster: see ``autoremat.best_batch``. Above ``32 * step`` the result may be up to 3 % too small,
    since each size takes about as long as a compilation.

    ``make_inputs`` maps a size to the arguments: a tuple or list, a dict of keyword arguments, or a single one. Its tensors are
    fake, so sizes beyond the memory of this machine can be tried. A larger size is assumed to need more memory.

    ``memory_budget`` is in bytes, or text such as "60GiB", a device budget, or "auto". ``options``, ``device`` and ``lower``
    are those of ``autoremat.explain``. With ``accumulate=True``, every micro-batch of a step fits that accumulates gradients,
    beside those of earlier ones. None means the option of the same name.

    Raises ``BudgetInfeasible`` if even ``step`` does not fit, and ``OptionsError`` for a budget that is not in bytes.
    """
    given = {**options_of(options), "memory_budget": memory_budget} | ({} if accumulate is None else {"accumulate": accumulate})
    search = _search_of("max_batch", make_inputs, model_or_fn, given, step, limit, device, lower)
    search.run()
    fitting = search.outcomes[search.fits or 1]
    if isinstance(fitting, BudgetInfeasible):
        raise fitting
    tried = tuple((n * step, minimum_bytes_of(one), isinstance(one, Report)) for n, one in search.outcomes.items())
    if search.misses is None:
        return Fit(search.fits * step, fitting, None, None, tried)
    least = minimum_bytes_of(search.outcomes[search.misses])
    return Fit(search.fits * step, fitting, search.misses * step, least, tried)


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
    unit, given = 1 if sizes else step, {**options_of(options), "memory_budget": memory_budget}
    search = _search_of("best_batch", make_inputs, model_or_fn, given, unit, limit, device)
    if not sizes:
        search.run()
    for count in sizes or [search.fits >> halvings for halvings in range(4) if search.fits >> halvings]:
        search.plan(count)
    outcomes = sorted(search.outcomes.items())
    seconds = {n: seconds_of(one) if isinstance(one, Report) else float("inf") for n, one in outcomes}
    best = max(seconds, key=lambda count: (count / (seconds[count] + seconds_per_step), -count))
    report = search.outcomes[best]
    if isinstance(report, BudgetInfeasible):
        raise report
    tried = tuple((count * unit, seconds[count], minimum_bytes_of(one)) for count, one in outcomes)
    return BestBatch(best * unit, best * unit / (seconds[best] + seconds_per_step), report, tried)
