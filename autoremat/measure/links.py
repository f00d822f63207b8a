"""Measures the link between a device and the host's memory.

A small copy gives the latency. The time that a large one takes longer gives the rate. Ranks of a machine that compile together
measure at the same time, so their rates are those of a link that they share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial

import torch

from autoremat import host_memory
from autoremat.basics import disk_cache
from autoremat.basics.codec import Codec
from autoremat.basics.progress import now
from autoremat.host_memory.links import new_stream
from autoremat.measure.calibration import device_key, device_name, least_seconds, outside_of_modes, ranks_of_machine
from autoremat.planner.cost.links import HostLink, assumed_host_link

SMALL_BYTES, LARGE_BYTES = 4 * 2**10, 32 * 2**20
"""Copied bytes of the two measurements."""

CODEC = Codec()

LEAST_SECONDS = 1e-7
"""Least difference of the two measurements."""

STAND_IN = HostLink(50e9, 50e9)
"""The link of a CPU that stands for an accelerator: that of a card at PCI Express 5.0."""

_known: dict[str, HostLink] = {}


def host_link_of(device: torch.device, measures: bool = True) -> HostLink | None:
    """Returns the link of ``device``; None if its tensors cannot be kept on the host.

    Its rates are from disk or measured, or those of its data sheet if nothing may be measured.
    """
    if not host_memory.is_available(device):
        return None
    if device.type == "cpu":
        return STAND_IN
    assumed = assumed_host_link(device_name(device))
    if assumed is None or not measures:  # the device shares the host's memory
        return assumed
    key = f"{device_key(device)}-{ranks_of_machine()}"
    if key not in _known:
        try:
            _known[key] = CODEC.read(HostLink, json.loads(disk_cache.read_text("host_links", key) or ""))
        except disk_cache.UNUSABLE:
            now(f"measuring the link between {device} and the host")
            _known[key] = outside_of_modes(device, partial(measure_link, device))
            disk_cache.write_text("host_links", key, json.dumps(astuple(_known[key])))
    return _known[key]


def measure_link(device: torch.device) -> HostLink:
    """Returns the link of an accelerator, by copies of two sizes in each direction.

    It takes well below a second, and allocates :data:`LARGE_BYTES` on the device and on the host.
    """
    here, there = (torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=where) for where in ("cpu", device))
    here, stream = here.pin_memory() if device.type != "cpu" else here, new_stream(device)

    def seconds(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> float:
        def copy() -> None:
            with stream:
                target[:nbytes].copy_(source[:nbytes], non_blocking=True)

        return least_seconds(device, copy)

    ways = ((here, there), (there, here))
    small, large = ([seconds(*way, nbytes) for way in ways] for nbytes in (SMALL_BYTES, LARGE_BYTES))
    moved = LARGE_BYTES - SMALL_BYTES
    to_host, from_host = (moved / max(long - short, LEAST_SECONDS) for long, short in zip(large, small, strict=True))
    return HostLink(to_host, from_host, max(small))


def least_link(links: Sequence[HostLink]) -> HostLink:
    """Returns the link whose rates the slowest of ``links`` has, for ranks that follow one plan."""
    to_host, from_host, latencies = zip(*map(astuple, links), strict=True)
    return HostLink(min(to_host), min(from_host), max(latencies))
