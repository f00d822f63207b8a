"""Computes seconds from FLOPs and bytes by the roofline model (Williams, Waterman, Patterson, CACM 2009)."""

from __future__ import annotations

from autoremat.planner.cost.devices import CPU, Device
from autoremat.planner.cost.rates import BYTE_RATES, FLOP_RATES, UNBOUNDED_RATES, Rate


def roofline_seconds(flops: int, bytes_moved: int, device: Device) -> float:
    """Returns the larger of two times in seconds: computing ``flops`` and moving ``bytes_moved`` on ``device``."""
    return max(flops / device.flops_per_second, bytes_moved / device.bytes_per_second)


def saving_seconds_per_byte(device: Device) -> float:
    """Returns the seconds to write one byte in the forward and to read it in the backward."""
    return 2.0 / device.bytes_per_second


ELEMENT_BYTES = 8
"""Bytes moved per element: one 32-bit float read and one written."""

SLOWEST, WAITING = 20.0, 1e-4
"""A measurement counts as disturbed above ``WAITING`` seconds plus ``SLOWEST`` times the data sheet's time."""


CPU_ARITHMETIC = {
    Rate.CHEAP: 2, Rate.DIVISION: 25, Rate.EXPONENTIAL: 50, Rate.TANH: 200, Rate.SPECIAL: 110, Rate.LAYOUT: 55,
    Rate.RANDOM: 1300, Rate.REDUCTION: 5, Rate.NORMALISATION: 100,
}  # fmt: skip
"""FLOPs of products in the time of one element's arithmetic in a fused kernel, from a calibration of a CPU with AVX-512."""


def datasheet_seconds(rate: Rate, amount: float, device: Device) -> float:
    """Returns the seconds of ``amount`` by the data sheet of ``device``.

    Fused arithmetic of a CPU is charged by the FLOPs that take as long, other elements by their bytes.
    """
    if rate in FLOP_RATES:
        return amount / device.flops_per_second
    if device.name == CPU and rate in CPU_ARITHMETIC:
        return amount * CPU_ARITHMETIC[rate] / device.flops_per_second
    return amount * (1 if rate in BYTE_RATES else ELEMENT_BYTES) / device.bytes_per_second


def is_plausible(rate: Rate, amount: float, seconds: float, device: Device) -> bool:
    """Returns True if ``seconds`` is a plausible time for the work, so that the measurement was not disturbed."""
    return rate in UNBOUNDED_RATES or seconds <= WAITING + SLOWEST * datasheet_seconds(rate, amount, device)
