"""The number of parts of a graph for early gradients: that of the least predicted seconds among those that keep the budget.

More parts hand over gradients earlier. That leaves memory, so less is recomputed. But each cut ends fusion, and each part is a
call. Each number is planned anew, which takes seconds. So it is planned only if what is known predicts that it is better: its
cuts, and the plans of other numbers under a budget that is larger by the gradients that leave earlier.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

from autoremat.agreement.joining import session_at
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.compiler.agreed_profile import AgreedStep

log = logging.getLogger("autoremat")

FIRST = 4
"""The number that is planned first, and the number without a budget."""

MOST = 16
"""The largest number that is considered, because each part is compiled by itself."""

SECONDS_OF_A_PART = 1e-4
"""Seconds that the calls of one more forward and backward take: the difference of a step of small linear layers in one and in
sixteen parts, uncompiled and by Inductor, per part."""

WORTH = 0.01
"""Share of the step's seconds that another number must save by prediction, because its planning takes time."""

FEWER_BYTES = 0.9
"""The most that doubling the parts may leave of the largest gradients of one part, for more parts to be considered."""


@dataclass(frozen=True)
class Candidate:
    """A number of parts, and what the cuts alone tell of it."""

    number: int
    count: int
    """The number of parts that the places to cut allow, at most ``number``."""
    gradient_bytes: int
    """The most bytes of gradients that one part hands over and hooks free; 0 if all gradients stay."""
    crossing_bytes: int
    """Bytes of the tensors that cross a cut, all cuts together."""
    widest_bytes: int
    """The most bytes that cross one cut."""

    def distance(self, other: Candidate) -> float:
        """Returns the distance between two numbers, in doublings."""
        return abs(math.log2(self.number / other.number))


@dataclass(frozen=True, eq=False)
class Trial:
    """A number of parts whose step was planned, under a budget in bytes."""

    candidate: Candidate
    agreed: AgreedStep

    @property
    def budget_bytes(self) -> int:
        """The budget of the step."""
        assert self.agreed.budget_bytes is not None
        return self.agreed.budget_bytes

    @property
    def fits(self) -> bool:
        """True if a choice of plans keeps to the budget."""
        return self.agreed.profile is not None

    @property
    def minimum_bytes(self) -> int:
        """The minimum peak found."""
        return self.agreed.step.minimum_peak_bytes

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step; infinite if it does not fit."""
        if self.agreed.profile is None:
            return math.inf
        return self.agreed.profile.predicted_seconds + SECONDS_OF_A_PART * self.candidate.count

    def minimum_of(self, other: Candidate) -> int:
        """Returns the minimum peak that this trial predicts for another number."""
        return self.minimum_bytes - self._relief(other)

    def seconds_of(self, other: Candidate) -> float:
        """Returns the seconds of the step that this trial, which fits, predicts for another number."""
        step = self.agreed.step
        present, predicted = (step.least_seconds(self.budget_bytes + more) for more in (0, self._relief(other)))
        per_byte = max(graph.seconds_per_border_byte for graph in step.graphs)
        # What crosses a cut is written and read again in the forward, and its gradient in the backward.
        borders = 2 * per_byte * (other.crossing_bytes - self.candidate.crossing_bytes)
        calls = SECONDS_OF_A_PART * (other.count - self.candidate.count)
        return self.seconds + predicted - present + borders + calls

    def _relief(self, other: Candidate) -> int:
        """Returns the bytes by which the peak is lower with another number: gradients, less the tensors that its cuts keep."""
        own = self.candidate
        return own.gradient_bytes - other.gradient_bytes + own.crossing_bytes - other.crossing_bytes


def candidates(divide: Callable[[int], Candidate], frees: bool, least: int) -> list[Candidate]:
    """Returns the numbers of parts that may be best, ``FIRST`` at the front, from ``least`` to at most ``MOST``.

    ``frees`` is True if hooks free gradients. Otherwise more parts leave no more memory. No cut of more parts is wider than
    all those of ``FIRST``: cuts inside of layers would keep more, and separate the readers of a residual.
    """
    found = [divide(FIRST)]
    number = FIRST
    while frees and number < MOST:
        number *= 2
        finer = divide(number)
        is_allowed = finer.count == number and finer.widest_bytes <= found[0].widest_bytes
        if not is_allowed or finer.gradient_bytes > FEWER_BYTES * found[-1].gradient_bytes:
            break
        found.append(finer)
    return [*found, *(divide(number) for number in (2, 1) if least <= number < found[0].count)]


def agreed_candidates(found: Sequence[Candidate], agreement: str | tuple[int, ...]) -> Sequence[Candidate]:
    """Returns the candidates of the lowest of all ranks, so that all of them try the same numbers in the same sequence."""
    with session_at("the number of parts for early gradients", agreement, communicates=False) as session:
        if session is None:
            return found
        own = [[*astuple(one)] for one in found]
        told = session.round("numbers of parts", own, lambda parts: parts[min(parts)])
    return [Candidate(*map(int, one)) for one in told]


def best_trial(
    found: Sequence[Candidate], plan: Callable[[Candidate], AgreedStep | None], hooks_bytes: int
) -> tuple[Trial, Sequence[Trial]] | None:
    """Returns the trial of the least predicted seconds, or of the least minimum peak if none fits, and all trials.

    The first of ``found`` is planned in any case. Returns None if one cannot be planned and falls back.
    """
    trials: list[Trial] = []
    following: Candidate | None = found[0]
    while following is not None:
        planned = plan(following)
        if planned is None:
            return None
        # A share of the reference peak depends on the parts, so that of the first number holds for all.
        trials.append(Trial(following, replace(planned, budget_bytes=trials[0].budget_bytes) if trials else planned))
        log.info("early gradients: %s", described(trials[-1:]))
        tried = {trial.candidate.number for trial in trials}
        left = [one for one in found if one.number not in tried]
        may_fit = [one for one in left if one.gradient_bytes + hooks_bytes <= trials[0].budget_bytes]
        following = _next(may_fit if may_fit or trials[0].fits else left, trials)
    return min(trials, key=lambda trial: (trial.seconds, trial.minimum_bytes)), trials


def _next(left: Sequence[Candidate], trials: Sequence[Trial]) -> Candidate | None:
    """Returns the candidate to plan next; None if none of ``left`` is predicted to be better than the trials."""
    budget, last = trials[0].budget_bytes, trials[-1].candidate
    minimum = {one: max(trial.minimum_of(one) for trial in trials) for one in left}
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        least = min(trial.minimum_bytes for trial in trials)
        lower = [one for one in left if minimum[one] <= least]
        return min(lower, key=lambda one: (max(minimum[one], budget), one.distance(last)), default=None)
    best = min(trial.seconds for trial in fitting)
    seconds = {one: max(trial.seconds_of(one) for trial in fitting) for one in left if minimum[one] <= budget}
    cheapest = min(seconds, key=lambda one: (seconds[one], one.distance(last)), default=None)
    return cheapest if cheapest is not None and seconds[cheapest] < best * (1 - WORTH) else None


def described(trials: Sequence[Trial]) -> str:
    """Returns the numbers that were tried, with their minimum peaks and predicted seconds."""
    ordered = sorted(trials, key=lambda trial: trial.candidate.number)
    return ", ".join(
        f"{trial.candidate.count} (minimum {format_bytes(trial.minimum_bytes)}"
        + ("" if not trial.fits else f", {format_seconds(trial.seconds)} a step")
        + ")"
        for trial in ordered
    )


def note_of(best: Trial, trials: Sequence[Trial]) -> str:
    """Returns the line for reports, or for the error if ``best`` does not fit."""
    tried = f"numbers of parts that were tried: {described(trials)}"
    if best.fits:
        return tried
    return f"{tried}. None fits, and {best.candidate.count} need the least. early_gradients=... sets the number"
