"""Seconds of an op from its FLOPs and bytes: the roofline model (Williams, Waterman, Patterson, CACM 2009)."""

from __future__ import annotations

from autoremat.planner.cost.devices import Device
from autoremat.planner.cost.rates import BYTE_RATES, FLOP_RATES, UNBOUNDED_RATES, Rate


def roofline_seconds(flops: int, bytes_moved: int, device: Device) -> float:
    """The larger of the time to compute ``flops`` and the time to move ``bytes_moved`` on ``device``, in seconds."""
    return max(flops / device.flops_per_second, bytes_moved / device.bytes_per_second)


def saving_seconds_per_byte(device: Device) -> float:
    """What a saved byte costs in time: it is written in the forward and read in the backward."""
    return 2.0 / device.bytes_per_second


ELEMENT_BYTES = 8
"""Of an element that is read and written."""

SLOWEST, WAITING = 20.0, 1e-4
"""What takes this many times what the data sheet says, and this many seconds, was disturbed rather than slow."""


def datasheet_seconds(rate: Rate, amount: float, device: Device) -> float:
    """Seconds of an amount of work by the data sheet of ``device``; what bytes say where the rate counts elements."""
    if rate in FLOP_RATES:
        return amount / device.flops_per_second
    return amount * (1 if rate in BYTE_RATES else ELEMENT_BYTES) / device.bytes_per_second


def is_plausible(rate: Rate, amount: float, seconds: float, device: Device) -> bool:
    """Whether a measurement of so many ``seconds`` can be taken for the work's own."""
    return rate in UNBOUNDED_RATES or seconds <= WAITING + SLOWEST * datasheet_seconds(rate, amount, device)
