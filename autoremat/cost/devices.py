"""Rates of devices: dense matrix FLOPs and memory bandwidth, from the vendors' data sheets.

Attainable rates are lower than peaks; :data:`MATMUL_EFFICIENCY` and :data:`BANDWIDTH_EFFICIENCY` take both to what large
kernels reach. Only the ratio of the two rates ranks plans, so an unknown device still gets usable plans.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MATMUL_EFFICIENCY = 0.7
BANDWIDTH_EFFICIENCY = 0.8

CPU_FLOPS_PER_CORE = 48e9
"""float32: 8-wide fused multiply-add units, two of them, at about 3 GHz, halved for what real kernels reach."""

CPU_BYTES_PER_SECOND_PER_CORE = 6e9
CPU_MAX_BYTES_PER_SECOND = 100e9


@dataclass(frozen=True)
class Device:
    """Attainable rates of one device."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    allocation_bytes: int = 1
    """Allocations are rounded up to a multiple of this (512 for CUDA's caching allocator)."""


@dataclass(frozen=True)
class Datasheet:
    """Peak dense rates: 16-bit matrix FLOP/s, 32-bit (TF32 where there is one), bytes/s; and the memory in bytes."""

    half_flops: float
    single_flops: float
    bandwidth: float
    memory: int


GB = 10**9

# Sources: NVIDIA data sheets of the products named (SXM variants where not said), dense rates without sparsity.
DATASHEETS = {
    "H200": Datasheet(989e12, 494e12, 4.8e12, 141 * GB),
    "H100": Datasheet(989e12, 494e12, 3.35e12, 80 * GB),
    "H100 PCIe": Datasheet(756e12, 378e12, 2.0e12, 80 * GB),
    "A100": Datasheet(312e12, 156e12, 2.0e12, 80 * GB),
    "A100 40GB": Datasheet(312e12, 156e12, 1.555e12, 40 * GB),
    "L40S": Datasheet(362e12, 183e12, 0.864e12, 48 * GB),
    "L4": Datasheet(121e12, 60e12, 0.3e12, 24 * GB),
    "A10": Datasheet(125e12, 62e12, 0.6e12, 24 * GB),
    "V100": Datasheet(125e12, 15.7e12, 0.9e12, 32 * GB),
    "T4": Datasheet(65e12, 8.1e12, 0.32e12, 16 * GB),
    "RTX 4090": Datasheet(165e12, 83e12, 1.008e12, 24 * GB),
    "RTX 3090": Datasheet(71e12, 36e12, 0.936e12, 24 * GB),
}
UNKNOWN_GPU = Datasheet(150e12, 75e12, 1.0e12, 0)


def datasheet(name: str) -> Datasheet | None:
    """The data sheet of the CUDA device that calls itself ``name``, such as "NVIDIA A100-SXM4-40GB"; None if there is none."""
    # Whole numbers only: a "T400" is not a "T4". The longest match wins: an "H100 PCIe" is not an "H100".
    matches = [key for key in DATASHEETS if all(re.search(rf"(?<!\d){part}(?!\d)", name, re.I) for part in key.split())]
    return DATASHEETS[max(matches, key=len)] if matches else None


def device_memory(name: str) -> int | None:
    """Bytes of memory of the CUDA device ``name``, by a size at the end of the name ("V100-16GB") or else by its data sheet;
    None if there is none."""
    sheet = datasheet(name)
    if sheet is None:
        return None
    size = re.search(r"(\d+) ?GB$", name, re.IGNORECASE)
    return int(size[1]) * GB if size else sheet.memory


def cuda_device(name: str, half_precision: bool) -> Device:
    """The rates of the CUDA device that calls itself ``name``; a middling card if the table does not know it."""
    sheet = datasheet(name) or UNKNOWN_GPU
    peak = sheet.half_flops if half_precision else sheet.single_flops
    return Device(name, peak * MATMUL_EFFICIENCY, sheet.bandwidth * BANDWIDTH_EFFICIENCY, allocation_bytes=512)


def cpu_device(threads: int) -> Device:
    """The rates of ``threads`` CPU cores."""
    bandwidth = min(threads * CPU_BYTES_PER_SECOND_PER_CORE, CPU_MAX_BYTES_PER_SECOND)
    return Device("cpu", threads * CPU_FLOPS_PER_CORE, bandwidth)
