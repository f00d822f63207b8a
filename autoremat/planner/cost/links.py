"""Seconds of transfers: between the ranks of a process group, and between a device and the pinned memory of its host.

    seconds of a collective  =  latency  +  steps · step's latency  +  sending,    sending  =  sent bytes / bandwidth
    seconds of a copy        =  latency  +  bytes / rate

NVLink passes a message on in pieces, whose number the library chooses: small pieces wait often, large ones fill the pipeline
slowly. The best choice costs twice the square root of latency and sending more.

``sent bytes`` are those that leave one rank. A gather over ``w`` ranks sends ``(w - 1) / w`` of the gathered bytes, as in a
ring. An all-reduce sends twice that, because it is a reduce-scatter and a gather.

The two directions to and from the host have rates of their own, and reach less than these while both copy. The copies of one
step hardly do: loads begin in the backward, and the last stores may end there. So plans count each direction alone.
"""

import enum
import math
from dataclasses import dataclass, replace

from autoremat.planner.cost.datasheets import GB, UNKNOWN_GPU, contains_word, datasheet, datasheet_name
from autoremat.planner.graph.op import Engine, Form, Transfer


@dataclass(frozen=True)
class Interconnect:
    """Attainable rate of one rank in a process group."""

    bytes_per_second: float
    latency_seconds: float
    is_given: bool = False
    """True if the rate comes from the options, False if from data sheets."""
    step_seconds: float = 0.0
    """Latency of each step, in which all ranks pass a part of the data on."""
    pipelined: bool = False
    """True if pieces of a message are under way at once. A given rate contains what that costs."""

    def seconds(self, sent_bytes: float, steps: int = 0) -> float:
        """Returns the seconds of one collective of ``steps`` steps that sends ``sent_bytes`` from each rank."""
        latency, sending = self.latency_seconds + steps * self.step_seconds, sent_bytes / self.bytes_per_second
        return latency + sending + (2 * math.sqrt(latency * sending) if self.pipelined else 0.0)


class Pattern(enum.Enum):
    """The communication patterns of collectives. The value is the number of times that a ring passes the data."""

    GATHER = 1
    """All-gather, reduce-scatter, all-to-all, broadcast."""
    REDUCE = 2
    """All-reduce."""


def sent_bytes(pattern: Pattern, nbytes: int, ranks: int) -> float:
    """Returns the bytes that each of ``ranks`` sends for ``nbytes``: the gathered bytes, or those before a reduction."""
    return pattern.value * nbytes * (ranks - 1) / ranks


def steps_of(pattern: Pattern, ranks: int) -> int:
    """Returns the number of steps of a ring of ``ranks``."""
    return pattern.value * (ranks - 1)


@dataclass(frozen=True)
class _Reached:
    """What NCCL reaches on one generation of links."""

    share: float
    """Share of the data sheet's rate that a pipeline approaches: more than that of any message of a finite size."""
    latency_seconds: float
    step_seconds: float


# Sources: NVIDIA's data sheets; NVLink's rates in one direction, half of the sum that the sheets name. DGX systems have one
# network card of 400 Gb/s per GPU.
NVLINK = {
    "GB300": 900e9, "GB200": 900e9, "B300": 900e9, "B200": 900e9, "GH200": 450e9,
    "GH200 144GB": 450e9, "H200": 450e9, "H100": 450e9, "H20": 450e9, "H20 3e": 450e9, "H800": 200e9, "A100": 300e9,
    "A100 40GB": 300e9, "A800": 200e9, "A800 40GB": 200e9, "V100": 150e9,
}  # fmt: skip
"""Rates of NVLink in one direction. Cards with "PCIe" in their names have bridges between pairs at most."""

# Sources: NCCL 2.27 and 2.29 in NVIDIA's aiconfigurator (github.com/ai-dynamo/aiconfigurator at 095f58a51, Apache-2.0): A100,
# H100 and B200 with NVLink, RTX PRO 6000 with PCI Express. `benchmarks/card_rates.py` holds the rules against other cards too.
BY_NVLINK = {8: _Reached(0.88, 8.0e-6, 0.85e-6), 9: _Reached(1.00, 4.2e-6, 0.85e-6), 10: _Reached(1.14, 7.7e-6, 1.15e-6)}
"""What NCCL reaches by NVLink, by the major number of the compute capability."""

BY_PCI_EXPRESS = _Reached(0.40, 5.0e-6, 1.5e-6)
PCI_EXPRESS = {7: 16.0 * GB, 8: 32.0 * GB}
"""Rates of PCI Express with 16 lanes in one direction, by the major number of the compute capability."""

PCI_EXPRESS_5 = 64.0 * GB
"""Rate since Hopper."""

INFINITY_FABRIC = {"MI300X": 64.0 * GB, "MI325X": 64.0 * GB, "MI355X": 76.5 * GB}
"""Rates of the link to each other card of a node, in one direction: half of what AMD's data sheets name."""

BY_INFINITY_FABRIC = _Reached(0.70, 8.0e-6, 0.85e-6)
"""An all-reduce of 4 GiB reaches 313 GB/s among 8 MI300X and 48 among two (stas00/ml-engineering, network). Its latencies are
those of NVLink, because none are published."""

NETWORK = 50 * GB
"""A network card of 400 Gb/s for each GPU."""

ETHERNET = 1.25 * GB
"""10 Gb/s, between CPUs."""

NETWORK_SHARE, NETWORK_LATENCY = 0.8, 20e-6
"""Assumed share of the rate between nodes, and latency of a collective there."""

GPUS_OF_A_NODE = 8
GPUS_OF_A_RACK = {"GB200": 72, "GB300": 72}
"""GPUs that share NVLink where these are more than a node's."""


def assumed_interconnect(device: str, ranks: int) -> Interconnect:
    """Returns the interconnect of ``ranks`` devices of the name ``device`` by data sheets.

    Up to :data:`GPUS_OF_A_NODE` GPUs share a node. More communicate at the rate of the network between nodes. Over Infinity
    Fabric, each card has a link to each other card, so few ranks use few links.
    """
    name = datasheet_name(device) or ""
    if device == "cpu":
        return Interconnect(ETHERNET * NETWORK_SHARE, NETWORK_LATENCY)
    most = GPUS_OF_A_RACK.get(name, GPUS_OF_A_NODE)
    if ranks > most:
        within = assumed_interconnect(device, most)  # the slower link of the way passes everything on
        return Interconnect(min(NETWORK * NETWORK_SHARE, within.bytes_per_second), NETWORK_LATENCY)
    generation = (datasheet(device) or UNKNOWN_GPU).capability[0]
    by_nvlink = name in NVLINK and not contains_word("PCIe", device)
    if name in INFINITY_FABRIC:
        rate, reached = INFINITY_FABRIC[name] * max(ranks - 1, 1), BY_INFINITY_FABRIC
    elif by_nvlink:  # each rank also copies its own part, which takes half as long as sending it
        rate, reached = NVLINK[name] * max(ranks - 1, 0.5) / (ranks - 0.5), BY_NVLINK.get(generation, BY_NVLINK[8])
    else:
        rate, reached = PCI_EXPRESS.get(generation, PCI_EXPRESS_5), BY_PCI_EXPRESS
    return Interconnect(rate * reached.share, reached.latency_seconds, step_seconds=reached.step_seconds, pipelined=by_nvlink)


@dataclass(frozen=True)
class Links:
    """The interconnects of all process groups of a step: figures of the options, or else of data sheets."""

    bytes_per_second: float | None = None
    latency_seconds: float | None = None

    def of(self, ranks: int, device: str) -> Interconnect:
        """Returns the interconnect of a process group with ``ranks`` devices of the name ``device``."""
        link = assumed_interconnect(device, ranks)
        if self.latency_seconds is not None:
            link = replace(link, latency_seconds=self.latency_seconds, step_seconds=0.0, pipelined=False)
        if self.bytes_per_second is not None:
            link = replace(link, bytes_per_second=self.bytes_per_second, is_given=True, pipelined=False)
        return link


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

    def __post_init__(self) -> None:
        possible = all(0 < rate < math.inf for rate in (self.to_host, self.from_host))
        if not (possible and 0 <= self.latency_seconds < math.inf):
            raise ValueError(f"{self} is no host link: rates above 0 and a latency of at least 0 must be finite")


# Sources: rates measured with pinned memory. The lowest ones count, because the ranks of a node copy at the same time.
# PCI Express with 16 lanes. 3.0: a 2080 Ti, 10.5 GiB/s. 4.0: an A100, 25 GB/s. 5.0: an H200, 55.06 GB/s to the host and 55.43
# from it (github.com/stas00/ml-engineering, network/README.md); GeForce cards, 55.7 from it.
# GH200: 295 to the host and 342 from it (vllm-project/vllm, issue 6496), 170 and 411 in a node of four (NVIDIA/Megatron-LM,
# issue 6491). GB300: 193 and 211, and 182 and 169 if all four copy (the same issue). GB200 has the same link.
HOST_PCI_EXPRESS = {7: (11.0 * GB, 11.0 * GB), 8: (25.0 * GB, 25.0 * GB)}
"""Rates to the host and from it, by the major number of the compute capability: Volta and Turing, Ampere and Ada."""

HOST_PCI_EXPRESS_5 = (55.0 * GB, 55.0 * GB)
"""Rates to the host and from it since Hopper."""

ONE_BOARD = {"GH200": (170.0 * GB, 342.0 * GB), "GB200": (182.0 * GB, 169.0 * GB), "GB300": (182.0 * GB, 169.0 * GB)}
"""Rates to the host and from it of devices on one board with their CPU (NVLink-C2C)."""

UNIFIED = ("cpu", "mps", "Apple", "GB10", "Thor", "Orin", "Xavier", "MI300A")
"""Words in the names of devices that share the memory of their host."""


def assumed_host_link(device: str) -> HostLink | None:
    """Returns the host link of the device of that name by published rates, or None if it shares the memory of its host.

    An unknown device has PCI Express 4.0.
    """
    if any(contains_word(word, device) for word in UNIFIED):
        return None
    rates = HOST_PCI_EXPRESS.get((datasheet(device) or UNKNOWN_GPU).capability[0], HOST_PCI_EXPRESS_5)
    return HostLink(*next((own for board, own in ONE_BOARD.items() if contains_word(board, device)), rates))


def host_form(value_bytes: int, link: HostLink) -> Form:
    """Returns the form that keeps a value on the host, with the seconds of :data:`PLANNED_SHARE` of the rates of ``link``."""

    def copy(engine: Engine, rate: float) -> Transfer:
        return Transfer(engine, (link.latency_seconds + value_bytes / rate) / PLANNED_SHARE)

    return Form("host", copy(Engine.TO_HOST, link.to_host), copy(Engine.FROM_HOST, link.from_host), host_bytes=value_bytes)
