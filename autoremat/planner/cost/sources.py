"""What the predicted seconds of a step rest on."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class CostSource(enum.Enum):
    """Where the seconds of one op come from."""

    CALIBRATED = "calibrated"
    """The measured rates of the device, for ops of its class."""
    ASSUMED = "assumed"
    """A data sheet, or an op of no calibrated class."""


@dataclass(frozen=True)
class Pricing:
    """The cost model of a graph, and the shares of the step's predicted seconds by their source."""

    cost_model: str
    calibrated_share: float
    assumed_share: float

    @classmethod
    def of(cls, cost_model: str, priced: Iterable[tuple[float, CostSource]]) -> Pricing:
        """Returns the sums over the (seconds, source) of all ops of a step."""
        sums = dict.fromkeys(CostSource, 0.0)
        for seconds, source in priced:
            sums[source] += seconds
        total = sum(sums.values())
        calibrated = sums[CostSource.CALIBRATED] / total if total else 0.0
        return cls(cost_model, calibrated, sums[CostSource.ASSUMED] / total if total else 1.0)
