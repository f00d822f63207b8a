"""Measures the link between a device and the host's memory, once per device, and stores its rates on disk.

Each direction is measured alone, and then both at once. Ranks of a machine that compile together measure at the same time, so
their rates are those of a link that they share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial

import torch

from autoremat import host_memory
from autoremat.basics import disk_cache
from autoremat.basics.progress import now
from autoremat.host_memory.buffers import new_stream
from autoremat.measure.calibration import device_key, device_name
from autoremat.measure.machine import ranks_of_machine
from autoremat.planner.cost.host_link import HostLink, assumed_host_link

SMALL_BYTES, LARGE_BYTES = 4 * 2**10, 64 * 2**20
"""Copied bytes of the two measurements: the small one gives the latency."""

REPETITIONS = 5
LEAST_SECONDS = 1e-7
"""Least difference of two measurements."""

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
        _known[key] = _stored(key) or _measured(device, key)
    return _known[key]


def measure_link(device: torch.device, seconds: Callable[[Callable[[], None]], float] | None = None) -> HostLink:
    """Returns the link of an accelerator, by copies of two sizes in each direction and of the large one in both.

    It takes well below a second, and allocates twice :data:`LARGE_BYTES` on the device and on the host. ``seconds`` times a
    run.
    """
    timed = seconds or partial(_least_seconds, device)
    ways = [_Way(device, to_host) for to_host in (True, False)]
    small = [timed(partial(way.copy, SMALL_BYTES)) for way in ways]
    large = [timed(partial(way.copy, LARGE_BYTES)) for way in ways]
    both = timed(partial(_copy_at_once, ways, LARGE_BYTES))
    moved = LARGE_BYTES - SMALL_BYTES
    to_host, from_host = (moved / max(long - short, LEAST_SECONDS) for long, short in zip(large, small, strict=True))
    return HostLink(to_host, from_host, max(small), min(1.0, max(large) / max(both, LEAST_SECONDS)))


class _Way:
    """Copies between a device and the host in one direction, on a stream of its own."""

    def __init__(self, device: torch.device, to_host: bool) -> None:
        pinned = device.type != "cpu"
        here, there = (torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=where) for where in ("cpu", device))
        here = here.pin_memory() if pinned else here
        self.source, self.target = (there, here) if to_host else (here, there)
        self.stream = new_stream(device)

    def copy(self, nbytes: int) -> None:
        """Begins to copy the first ``nbytes``."""
        with self.stream:
            self.target[:nbytes].copy_(self.source[:nbytes], non_blocking=True)


def _copy_at_once(ways: Sequence[_Way], nbytes: int) -> None:
    for way in ways:
        way.copy(nbytes)


def _least_seconds(device: torch.device, run: Callable[[], None]) -> float:
    found = []
    for _ in range(REPETITIONS + 1):  # the first one also makes the device ready
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - start)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def least_link(links: Sequence[HostLink]) -> HostLink:
    """Returns the link whose rates the slowest of ``links`` has, for ranks that follow one plan."""
    return HostLink(
        min(link.to_host for link in links),
        min(link.from_host for link in links),
        max(link.latency_seconds for link in links),
        min(link.both_ways for link in links),
    )


def _stored(key: str) -> HostLink | None:
    try:
        to_host, from_host, latency_seconds, both_ways = json.loads(disk_cache.read_text("host_links", key) or "")
        return HostLink(float(to_host), float(from_host), float(latency_seconds), float(both_ways))
    except disk_cache.UNUSABLE:
        return None


def _measured(device: torch.device, key: str) -> HostLink:
    now(f"measuring the link between {device} and the host")
    with ThreadPoolExecutor(1, "autoremat-host-link") as thread:  # fake-tensor modes belong to the compiling thread
        link = thread.submit(measure_link, device).result()
    disk_cache.write_text("host_links", key, json.dumps(astuple(link)))
    return link
