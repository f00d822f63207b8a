"""Measures links: between the ranks of a process group, and between a device and the host's memory.

A small transfer gives the latency. The time that a large one takes longer gives the rate. Ranks of a machine that compile
together measure at the same time, so their rates are those of a link that they share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import partial

import torch
import torch.distributed as dist

from autoremat import host_memory
from autoremat.basics import disk_cache
from autoremat.basics.codec import Codec
from autoremat.basics.progress import now
from autoremat.host_memory.links import new_stream
from autoremat.measure.calibration import device_key, device_name, least_seconds, outside_of_modes, ranks_of_machine
from autoremat.planner.cost.links import HostLink, Interconnect, LinkSource, Pattern, assumed_host_link, sent_bytes
from autoremat.torch_private import process_groups

SMALL_BYTES, LARGE_BYTES = 4 * 2**10, 32 * 2**20
"""Gathered or copied bytes of the two measurements."""

CODEC = Codec()

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
            known = _measured[name] = group, outside_of_modes(device, partial(_interconnect, group, device))
        found[name] = known[1]
    return found


def _interconnect(group: dist.ProcessGroup, device: torch.device) -> Interconnect:
    """Returns the interconnect of ``group``, the same on all of its ranks, which must call this at the same point.

    It takes well below a second, and it allocates twice :data:`LARGE_BYTES` on ``device``.
    """
    small, large = (_seconds_on_all_ranks(nbytes, group, device) for nbytes in (SMALL_BYTES, LARGE_BYTES))
    sent = sent_bytes(Pattern.GATHER, LARGE_BYTES - SMALL_BYTES, max(group.size(), 2))
    return Interconnect(sent / max(large - small, LEAST_SECONDS), small, LinkSource.MEASURED)


def _seconds_on_all_ranks(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    shard = torch.zeros(nbytes // group.size(), dtype=torch.uint8, device=device)
    gathered = torch.empty(shard.numel() * group.size(), dtype=torch.uint8, device=device)
    least = least_seconds(device, lambda: dist.all_gather_into_tensor(gathered, shard, group))
    slowest = torch.tensor([least], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest.item())


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
