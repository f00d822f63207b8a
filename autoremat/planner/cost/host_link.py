"""Rates of host links: of the copies between a device and the pinned memory of its host.

    seconds of a copy  =  latency  +  bytes / rate

The two directions have rates of their own, and reach less than these while both copy. The copies of one step hardly do: loads
begin in the backward, and the last stores may end there. So plans count each direction alone, and reports tell what both at
once would cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoremat.planner.cost.datasheets import GB, UNKNOWN_GPU, contains_word, datasheet
from autoremat.planner.graph.forms import Engine, Form, Transfer

PLANNED_SHARE = 0.8
"""The share of a link's rate by which plans are made. A plan for the full rate puts each late copy on the critical path, so it
stalls wherever the link is slower. A plan for less leaves a margin."""

LATENCY_SECONDS = 10e-6
"""Assumed latency of one copy: its launch, and the events between the streams."""


@dataclass(frozen=True)
class HostLink:
    """Attainable rates of one device's copies, in bytes per second. Raises ``ValueError`` for impossible ones."""

    to_host: float
    from_host: float
    latency_seconds: float = LATENCY_SECONDS
    both_ways: float = 1.0
    """The share of its rate that each direction has while both copy."""

    def __post_init__(self) -> None:
        possible = all(0 < rate < float("inf") for rate in (self.to_host, self.from_host)) and 0 < self.both_ways <= 1
        if not (possible and 0 <= self.latency_seconds < float("inf")):
            raise ValueError(
                f"{self} is no host link: rates above 0 and a latency of at least 0 must be finite, and a share at most 1"
            )


# Sources: rates measured with pinned memory. The lowest ones count, because the ranks of a node copy at the same time.
# PCI Express with 16 lanes. 3.0: a 2080 Ti, 10.5 GiB/s. 4.0: an A100, 25 GB/s. 5.0: an H200, 55.06 GB/s to the host and 55.43
# from it (github.com/stas00/ml-engineering, network/README.md); GeForce cards, 55.7 from it.
# GH200: 295 to the host and 342 from it (vllm-project/vllm, issue 6496), 170 and 411 in a node of four (NVIDIA/Megatron-LM,
# issue 6491). GB300: 193 and 211, and 182 and 169 if all four copy (the same issue). GB200 has the same link.
PCI_EXPRESS = {7: (11.0 * GB, 11.0 * GB), 8: (25.0 * GB, 25.0 * GB)}
"""Rates to the host and from it, by the major number of the compute capability: Volta and Turing, Ampere and Ada."""

PCI_EXPRESS_5 = (55.0 * GB, 55.0 * GB)
"""Rates to the host and from it since Hopper."""

ONE_BOARD = {"GH200": (170.0 * GB, 342.0 * GB), "GB200": (182.0 * GB, 169.0 * GB), "GB300": (182.0 * GB, 169.0 * GB)}
"""Rates to the host and from it of devices on one board with their CPU (NVLink-C2C)."""

# Sources: an A100's copies to the host keep 24 of 25 GB/s, those from it 11 to 13 (NVIDIA/nvbandwidth, issues 11 and 53): equal
# bytes in both directions take 1.5 times as long as in one. An H100 keeps 0.84 to 0.95 of 55 GB/s
# (benchmarks/results/gpu_rows.jsonl). A GB300 keeps 172 and 175 of 377 and 359 GB/s, because the host's
# memory serves both (stas00/ml-engineering, network/README.md); a GH200 about half (NVIDIA/nvbandwidth, issue 41).
BOTH_WAYS, BOTH_WAYS_OF_5, BOTH_WAYS_ON_ONE_BOARD = 0.66, 0.84, 0.48
"""Shares of the rates that remain while both directions copy: PCI Express, its version 5, and beside a CPU on one board."""

UNIFIED = ("cpu", "mps", "Apple", "GB10", "Thor", "Orin", "Xavier", "MI300A")
"""Words in the names of devices that share the memory of their host."""


def assumed_host_link(device: str) -> HostLink | None:
    """Returns the host link of the device of that name by published rates, or None if it shares the memory of its host.

    An unknown device has PCI Express 4.0.
    """
    if any(contains_word(word, device) for word in UNIFIED):
        return None
    rates = next((rates for board, rates in ONE_BOARD.items() if contains_word(board, device)), None)
    if rates is not None:
        return HostLink(*rates, both_ways=BOTH_WAYS_ON_ONE_BOARD)
    rates = PCI_EXPRESS.get((datasheet(device) or UNKNOWN_GPU).capability[0])
    return HostLink(*PCI_EXPRESS_5, both_ways=BOTH_WAYS_OF_5) if rates is None else HostLink(*rates, both_ways=BOTH_WAYS)


def host_form(value_bytes: int, link: HostLink) -> Form:
    """Returns the form that keeps a value on the host, with the seconds of :data:`PLANNED_SHARE` of the rates of ``link``."""

    def copy(engine: Engine, rate: float) -> Transfer:
        return Transfer(engine, (link.latency_seconds + value_bytes / rate) / PLANNED_SHARE, both_ways=link.both_ways)

    return Form("host", copy(Engine.TO_HOST, link.to_host), copy(Engine.FROM_HOST, link.from_host), host_bytes=value_bytes)
