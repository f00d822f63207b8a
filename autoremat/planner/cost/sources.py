"""What the predicted seconds of a step rest on."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class CostSources(enum.Enum):
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
    def of(cls, cost_model: str, priced: Iterable[tuple[float, CostSources]], untimed_ops: int = 0) -> Pricing:
        """Sum up (seconds, basis) of all ops of a step."""
        sums = dict.fromkeys(CostSources, 0.0)
        for seconds, basis in priced:
            sums[basis] += seconds
        total = sum(sums.values())
        shares = {basis: part / total if total else float(basis is CostSources.ASSUMED) for basis, part in sums.items()}
        return cls(
            cost_model, shares[CostSources.MEASURED], shares[CostSources.CALIBRATED], shares[CostSources.ASSUMED], untimed_ops
        )
