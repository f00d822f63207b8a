"""Seconds of an op from its FLOPs and bytes: the roofline model (Williams, Waterman, Patterson, CACM 2009)."""

from __future__ import annotations

from autoremat.cost.devices import Device


def roofline_seconds(flops: int, bytes_moved: int, device: Device) -> float:
    """The larger of the time to compute ``flops`` and the time to move ``bytes_moved`` on ``device``, in seconds."""
    return max(flops / device.flops_per_second, bytes_moved / device.bytes_per_second)


def saving_seconds_per_byte(device: Device) -> float:
    """What a saved byte costs in time: it is written in the forward and read in the backward."""
    return 2.0 / device.bytes_per_second
