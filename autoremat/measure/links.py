"""Measures links: between the ranks of a process group, and between a device and the host's memory.

A small transfer gives the latency. The time that a large one takes longer gives the rate. A thread of its own measures, because
fake-tensor modes belong to the compiling thread. Ranks of a machine that compile together measure at the same time, so their
rates are those of a link that they share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial

import torch
import torch.distributed as dist

from autoremat import host_memory
from autoremat.basics import disk_cache
from autoremat.basics.progress import now
from autoremat.host_memory.buffers import new_stream
from autoremat.measure.calibration import device_key, device_name, ranks_of_machine
from autoremat.planner.cost.links import HostLink, Interconnect, LinkSource, Pattern, assumed_host_link, sent_bytes
from autoremat.torch_private import process_groups

SMALL_BYTES, LARGE_BYTES = 4 * 2**10, 32 * 2**20
"""Gathered or copied bytes of the two measurements."""

REPETITIONS = 5
LEAST_SECONDS = 1e-7
"""Least difference of the two measurements, for a group that sends nothing."""

STAND_IN = HostLink(50e9, 50e9)
"""The link of a CPU that stands for an accelerator: that of a card at PCI Express 5.0."""

_measured: dict[str, tuple[dist.ProcessGroup, Interconnect]] = {}
"""The interconnects that this process has measured, by the name of the group."""

_known: dict[str, HostLink] = {}


def interconnects_of(names: Iterable[str]) -> Mapping[str, Interconnect]:
    """Returns the interconnects of the process groups with these names, each measured once in a process.

    It is a collective: all ranks of these groups must call it at the same point, with the groups in the same sequence.
    """
    found = {}
    for name in dict.fromkeys(names):
        group = process_groups.group_of(name)
        if group is None:
            continue
        known = _measured.get(name)
        if known is None or known[0] is not group:
            is_on_cuda = dist.get_backend(group) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if is_on_cuda else torch.device("cpu")
            with ThreadPoolExecutor(1, "autoremat-interconnect") as thread:
                known = _measured[name] = group, thread.submit(measure_bandwidth, group, device).result()
        found[name] = known[1]
    return found


def measure_bandwidth(group: dist.ProcessGroup, device: torch.device) -> Interconnect:
    """Returns the interconnect of ``group``, the same on all of its ranks.

    It is a collective: all ranks of the group must call it at the same point. It takes well below a second, and it allocates
    twice :data:`LARGE_BYTES` on ``device``.
    """
    small, large = (_seconds_on_all_ranks(nbytes, group, device) for nbytes in (SMALL_BYTES, LARGE_BYTES))
    sent = sent_bytes(Pattern.GATHER, LARGE_BYTES - SMALL_BYTES, max(group.size(), 2))
    return Interconnect(sent / max(large - small, LEAST_SECONDS), small, LinkSource.MEASURED)


def _seconds_on_all_ranks(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    shard = torch.zeros(nbytes // group.size(), dtype=torch.uint8, device=device)
    gathered = torch.empty(shard.numel() * group.size(), dtype=torch.uint8, device=device)
    least = _least_seconds(device, lambda: dist.all_gather_into_tensor(gathered, shard, group))
    slowest = torch.tensor([least], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest.item())


def _least_seconds(device: torch.device, run: Callable[[], object]) -> float:
    found = []
    for _ in range(REPETITIONS + 1):  # the first one also makes the device ready, and connects the ranks
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - start)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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
        _known[key] = _stored(key) or _measure(device, key)
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


def _measure(device: torch.device, key: str) -> HostLink:
    now(f"measuring the link between {device} and the host")
    with ThreadPoolExecutor(1, "autoremat-host-link") as thread:  # fake-tensor modes belong to the compiling thread
        link = thread.submit(measure_link, device).result()
    disk_cache.write_text("host_links", key, json.dumps(astuple(link)))
    return link
