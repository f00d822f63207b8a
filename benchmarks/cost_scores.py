"""The scores of the steps that `costs.py` measures: errors of cost models, and the faster plan at the same peak."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass

from autoremat.options.options import COST_MODELS

RESOLVED = 0.04
"""Measured steps that differ by a smaller share count as equal."""


@dataclass(frozen=True)
class Row:
    """One plan of one model. Overheads are added seconds as shares of plain Inductor's step."""

    model: str
    method: str
    step_seconds: float
    peak_bytes: int
    """Measured, above those live when the step begins."""
    measured: float
    predicted: dict[str, float]


@dataclass(frozen=True)
class Duel:
    """A plan that is not ours, and the fastest of ours at the same or a lower measured peak; None if there is none."""

    rival: Row
    ours: Row | None

    @property
    def ratio(self) -> float | None:
        """The seconds of our step, in steps of the rival."""
        return None if self.ours is None else self.ours.step_seconds / self.rival.step_seconds


@dataclass(frozen=True)
class Score:
    """The errors of a cost model over all plans."""

    median_error: float
    """Of the predicted overhead, in shares of the step."""
    ranked_rightly: float | None
    """Of the pairs of plans of one model whose measured steps differ by more than RESOLVED."""
    pairs: int


def scores(rows: list[Row]) -> dict[str, Score]:
    """Returns a score for each cost model. Plain Inductor's own overhead is 0 by definition and has no error."""
    plans = [row for row in rows if row.method != "plain"]
    pairs = [
        (one, other)
        for one, other in itertools.combinations(rows, 2)
        if one.model == other.model and abs(one.step_seconds / other.step_seconds - 1) > RESOLVED
    ]
    found = {}
    for model in COST_MODELS:
        errors = [abs(row.predicted[model] - row.measured) for row in plans]
        right = sum(
            (one.predicted[model] - other.predicted[model]) * (one.measured - other.measured) > 0 for one, other in pairs
        )
        found[model] = Score(statistics.median(errors), right / len(pairs) if pairs else None, len(pairs))
    return found


def duels(rows: list[Row]) -> list[Duel]:
    """Returns each plan that is not ours, with the fastest of ours that needs no more memory."""
    found = []
    for rival in (row for row in rows if not row.method.startswith("autoremat")):
        ours = [
            r for r in rows if r.model == rival.model and r.method.startswith("autoremat") and r.peak_bytes <= rival.peak_bytes
        ]
        found.append(Duel(rival, min(ours, key=lambda r: r.step_seconds, default=None)))
    return found


def summary_of(found: list[Duel]) -> str:
    """Returns the ratios of steps in words."""
    ratios = [duel.ratio for duel in found if duel.ratio is not None]
    if not ratios:
        return "no plan of ours needs as little memory as another's"
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    return (
        f"against {len(found)} plans of others, ours at the same or a lower measured peak: {len(ratios)} have one; step "
        f"{mean:.3f} x in the geometric mean, {min(ratios):.3f} to {max(ratios):.3f}"
    )
