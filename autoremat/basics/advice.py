"""Advice for a step that does not fit its budget: what was tried in its place, and the cheapest trial that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoremat.basics.error_text import aligned
from autoremat.basics.units import bytes_apart, format_seconds

FITS_SHOWN = 2
"""Number of fitting trials that the sentence of advice names."""


@dataclass(frozen=True)
class Trial:
    """A plan of the same step under further options, or in micro-batches."""

    options: Mapping[str, object]
    """Options to add to those that were given."""
    peak_bytes: int
    """Predicted peak; if it does not fit, the minimum peak found."""
    limit_bytes: int
    """The bytes that the peak may have: those of the budget, or of the whole device under a device budget."""
    seconds: float | None = None
    """Predicted seconds of forward and backward of the whole batch, micro-batches together; None if no plan fits."""
    batch: int | None = None
    """Samples of one micro-batch; None for the batch as it was given."""
    micro_batches: int = 1

    @property
    def fits(self) -> bool:
        """True if a plan within the budget was found."""
        return self.seconds is not None

    @property
    def settings(self) -> str:
        """The options and the micro-batches, as text."""
        texts = [f"{name}={value!r}" for name, value in self.options.items()]
        if self.micro_batches > 1:
            texts.append(f"{self.micro_batches} micro-batches of {self.batch}")
        return ", ".join(texts) or "the same options"

    @property
    def figures(self) -> str:
        """The predicted peak and time, as text."""
        peak = " of ".join(bytes_apart(self.peak_bytes, self.limit_bytes))
        return peak if self.seconds is None else f"{peak}, predicted {format_seconds(self.seconds)} per step"


@dataclass(frozen=True)
class Advice:
    """What to do about a step that does not fit. Printed as the trials and one sentence."""

    trials: tuple[Trial, ...]
    """The plans that were tried, in sequence."""
    otherwise: str = ""
    """What to do if none of them fits."""
    failed: tuple[str, ...] = ()
    """What could not be tried because of an error, each with that error."""

    @property
    def fitting(self) -> tuple[Trial, ...]:
        """The trials that fit, the fastest first; among equals those with the fewest micro-batches, then options."""
        fitting = (one for one in self.trials if one.fits)
        return tuple(sorted(fitting, key=lambda one: (one.seconds, one.micro_batches, len(one.options))))

    @property
    def best(self) -> Trial | None:
        """The fastest trial that fits; None if none does."""
        return next(iter(self.fitting), None)

    @property
    def sentence(self) -> str:
        """The cheapest trials that fit; without one, what to do instead."""
        shown = [f"with {one.settings}: {one.figures}" for one in self.fitting[:FITS_SHOWN]]
        return f"It fits {'; or '.join(shown)}." if shown else self.otherwise

    def __str__(self) -> str:
        rows = [(one.settings, one.figures, "" if one.fits else "does not fit") for one in self.trials]
        failed = [f"Could not be tried: {one}" for one in self.failed]
        return "\n".join([*(["Tried:", *aligned(rows, "<<<"), ""] if rows else []), *failed, self.sentence])
