"""What the predicted seconds of a step rest on."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Basis(enum.Enum):
    """Where the seconds of one op come from."""

    MEASURED = "measured"
    """The op itself was timed."""
    CALIBRATED = "calibrated"
    """Ops of its class were."""
    ASSUMED = "assumed"
    """A data sheet, or an op of no calibrated class."""


@dataclass(frozen=True)
class Pricing:
    """The cost model of a graph, and which shares of the step's predicted seconds are measured, calibrated and assumed."""

    cost_model: str
    measured_share: float
    calibrated_share: float
    assumed_share: float
    untimed_ops: int = 0
    """Ops that were to be timed and were not: time ran out, or they could not be run by themselves."""

    @classmethod
    def of(cls, cost_model: str, priced: Iterable[tuple[float, Basis]], untimed_ops: int = 0) -> Pricing:
        """Sum up (seconds, basis) of all ops of a step."""
        sums = dict.fromkeys(Basis, 0.0)
        for seconds, basis in priced:
            sums[basis] += seconds
        total = sum(sums.values())
        shares = {basis: part / total if total else float(basis is Basis.ASSUMED) for basis, part in sums.items()}
        return cls(cost_model, shares[Basis.MEASURED], shares[Basis.CALIBRATED], shares[Basis.ASSUMED], untimed_ops)
