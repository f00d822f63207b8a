"""The cost sources of a step: the origin of its predicted seconds."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class CostSource(enum.Enum):
    """The origin of an op's seconds."""

    CALIBRATED = "calibrated"
    """Measured rates of the device, for ops of a calibrated class. Measured or given rates of a process group."""
    ASSUMED = "assumed"
    """A data sheet, or an op of no calibrated class."""


@dataclass(frozen=True)
class Pricing:
    """The cost model of a graph, and the share of each cost source in the step's predicted seconds."""

    cost_model: str
    calibrated_share: float
    assumed_share: float
    interconnect: str = ""
    """The rates of the process groups with their sources, as text; empty if no op communicates."""

    @classmethod
    def of(
        cls,
        cost_model: str,
        priced: Iterable[tuple[float, CostSource]],
        interconnect: str = "",
    ) -> Pricing:
        """Returns the shares for the (seconds, source) of all ops of a step."""
        sums = dict.fromkeys(CostSource, 0.0)
        for seconds, source in priced:
            sums[source] += seconds
        total = sum(sums.values())
        calibrated = sums[CostSource.CALIBRATED] / total if total else 0.0
        return cls(cost_model, calibrated, sums[CostSource.ASSUMED] / total if total else 1.0, interconnect)
