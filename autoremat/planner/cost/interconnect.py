"""Seconds of communication between the ranks of a process group.

    seconds  =  latency  +  sent bytes / bandwidth

``sent bytes`` are those that leave one rank. A gather over ``w`` ranks sends ``(w - 1) / w`` of the gathered bytes, as in a
ring. An all-reduce sends twice that, because it is a reduce-scatter and a gather.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoremat.planner.cost.devices import BANDWIDTH_EFFICIENCY, GB, datasheet_name


class LinkSource(enum.Enum):
    """The origin of an interconnect's figures."""

    GIVEN = "given"
    """The options."""
    MEASURED = "measured"
    ASSUMED = "assumed"
    """Data sheets."""


@dataclass(frozen=True)
class Interconnect:
    """Attainable rate of one rank in a process group. Raises ``ValueError`` for an impossible one."""

    bytes_per_second: float
    latency_seconds: float
    source: LinkSource = LinkSource.ASSUMED

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_second < float("inf") and 0 <= self.latency_seconds < float("inf")):
            raise ValueError(f"{self} is no interconnect: rate above 0 and latency of at least 0 must be finite")

    def seconds(self, sent_bytes: float) -> float:
        """Returns the seconds of one collective that sends ``sent_bytes`` from each rank."""
        return self.latency_seconds + sent_bytes / self.bytes_per_second


class Pattern(enum.Enum):
    """The communication patterns of collectives. The value is the number of times that a ring passes the data."""

    GATHER = 1
    """All-gather, reduce-scatter, all-to-all, broadcast."""
    REDUCE = 2
    """All-reduce."""


def sent_bytes(pattern: Pattern, nbytes: int, ranks: int) -> float:
    """Returns the bytes that each of ``ranks`` sends for ``nbytes``: the gathered bytes, or those before a reduction."""
    return pattern.value * nbytes * (ranks - 1) / ranks


LATENCY_SECONDS = 20e-6
"""Assumed latency of one collective: its launch and the synchronisation of the ranks."""

# Sources: NVIDIA's data sheets; NVLink's rates in one direction, half of the sum that the sheets name. DGX systems have one
# network card of 400 Gb/s per GPU.
NVLINK = {
    "GB200": 900e9, "B300": 900e9, "B200": 900e9, "GH200": 450e9, "H200": 450e9, "H100": 450e9, "H20": 450e9, "A100": 300e9,
    "A100 40GB": 300e9, "V100": 150e9,
}  # fmt: skip
PCI_EXPRESS = 32 * GB
"""PCI Express 4.0 with 16 lanes, in one direction."""

NETWORK = 50 * GB
"""A network card of 400 Gb/s for each GPU."""

ETHERNET = 1.25 * GB
"""10 Gb/s, between CPUs."""

GPUS_OF_A_NODE = 8


def assumed_interconnect(device: str, ranks: int) -> Interconnect:
    """Returns the interconnect of ``ranks`` devices of the name ``device`` by data sheets.

    Up to :data:`GPUS_OF_A_NODE` GPUs share a node. More communicate at the rate of the network between nodes.
    """
    if device == "cpu":
        rate = float(ETHERNET)
    elif ranks > GPUS_OF_A_NODE:
        rate = float(NETWORK)
    else:
        rate = NVLINK.get(datasheet_name(device) or "", float(PCI_EXPRESS))
    return Interconnect(rate * BANDWIDTH_EFFICIENCY, LATENCY_SECONDS)


@dataclass(frozen=True)
class Links:
    """The interconnects of all process groups of a step.

    Figures of the options come first, then those of the measured ``groups``, by name, then data sheets.
    """

    bytes_per_second: float | None = None
    latency_seconds: float | None = None
    groups: Mapping[str, Interconnect] = field(default_factory=dict)

    def of(self, group: str, ranks: int, device: str) -> Interconnect:
        """Returns the interconnect of the process group ``group`` with ``ranks`` devices of the name ``device``."""
        link = self.groups.get(group) or assumed_interconnect(device, ranks)
        if self.latency_seconds is not None:
            link = replace(link, latency_seconds=self.latency_seconds)
        if self.bytes_per_second is not None:
            link = replace(link, bytes_per_second=self.bytes_per_second, source=LinkSource.GIVEN)
        return link
