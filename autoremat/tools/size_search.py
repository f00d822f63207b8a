"""Outcomes of plans for one size, and the search for the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autoremat.basics.errors import BudgetInfeasible
from autoremat.report.report import Report

Outcome = Report | BudgetInfeasible
"""The result for one size: the report of a plan that fits, or the error that none fits."""

FASTEST = 16
"""Maximum ratio of the next size to the largest size that fits, however little memory that one needs."""


def minimum_bytes_of(outcome: Outcome) -> int:
    """Returns the minimum peak found in bytes; for several graphs the largest of their minimum peaks."""
    if isinstance(outcome, BudgetInfeasible):
        return outcome.minimum_bytes
    return max(one.minimum_peak_bytes for one in (outcome, *outcome.others))


def seconds_of(report: Report) -> float:
    """Returns the predicted seconds of the step under its plans, for all graphs that train."""
    return sum(one.predicted_seconds for one in (report, *report.others))


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
