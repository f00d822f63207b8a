"""Measures the interconnect of a process group by all-gathers of two sizes.

The small one gives the latency. The time that the large one takes longer gives the bandwidth. A thread of its own measures,
because fake-tensor modes belong to the compiling thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from autoremat.planner.cost import Interconnect, LinkSource, Pattern, sent_bytes
from autoremat.torch_private import process_groups

SMALL_BYTES, LARGE_BYTES = 4 * 2**10, 32 * 2**20
"""Gathered bytes of the two measurements."""

REPETITIONS = 5
LEAST_SECONDS = 1e-7
"""Least difference of the two measurements, for a group that sends nothing."""


_measured: dict[str, tuple[dist.ProcessGroup, Interconnect]] = {}
"""The interconnects that this process has measured, by the name of the group."""


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
    least = min(_seconds(gathered, shard, group) for _ in range(REPETITIONS + 1))  # the first one also connects the ranks
    slowest = torch.tensor([least], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return float(slowest.item())


def _seconds(gathered: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> float:
    _synchronize(shard.device)
    start = time.perf_counter()
    dist.all_gather_into_tensor(gathered, shard, group)
    _synchronize(shard.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
