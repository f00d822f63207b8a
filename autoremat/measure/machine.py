"""The memory, the devices and the ranks of this machine, and the seconds of work on its devices."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from autoremat.basics.errors import OptionsError
from autoremat.torch_private import symbolic_sizes
from autoremat.torch_private.process_groups import job

CONTROL_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""The files with the limit and the use of a control group's memory, under ``/sys/fs/cgroup``: of versions 2 and 1."""


def share_of_host_memory() -> int:
    """Returns the bytes that one rank may keep on the host: half of what is free, divided by the ranks of the machine.

    It is rounded down to a power of two, so that a later process finds the same number, and its plans in the caches.
    """
    share = free_host_bytes() // 2 // ranks_of_machine()
    return 1 << share.bit_length() - 1 if share else 0


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), control: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that this process could allocate on the host, under the limit of its control group too."""
    found = [_available(meminfo)]
    for limit, used in CONTROL_GROUPS:
        try:
            found.append(max(0, int((control / limit).read_text()) - int((control / used).read_text())))
        except (OSError, ValueError):  # no such version, or "max"
            continue
    return min(found)


def _available(meminfo: Path) -> int:
    """Returns the bytes of free memory by Linux's estimate; elsewhere half of all memory."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].removesuffix("kB")) * 2**10
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def checked_device(device: torch.device) -> torch.device:
    """Returns ``device``, unless it is of a kind that torch does not find here. Fake tensors on one would abort the process.

    Cards of CUDA pass, because they can be planned for by name. Raises ``OptionsError`` for others.
    """
    if device.type in ("cpu", "cuda", "meta"):
        return device
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != device.type:
        known = "cpu" if present is None else f"cpu, {present.type}"
        raise OptionsError(
            f"device={str(device)!r} cannot be planned for: torch finds no such device here, only {known}. Cards that are not "
            'here can be planned for if they are CUDA\'s, by name: device="H100-80GB"'
        )
    return device


def ranks_of_machine() -> int:
    """Returns the number of processes of the job on this machine; all of the job if the launcher does not tell."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if os.environ.get(name, "").isdecimal():
            return max(1, int(os.environ[name]))
    known = job()
    return 1 if known is None else known.world_size


Result = TypeVar("Result")

MAX_RUNS = 100
"""The most runs in one sample."""


@dataclass
class Stopwatch:
    """A timer that returns the least of a few samples, each with enough runs to hide the clock's resolution."""

    wait: Callable[[], object]
    """Returns when the device has finished all its work."""
    now: Callable[[], float] = time.perf_counter
    samples: int = 10
    sample_seconds: float = 1e-3

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the seconds of ``run()``, after two runs to warm up."""
        run()
        once = self._sample(run, 1)
        runs = min(MAX_RUNS, max(1, math.ceil(self.sample_seconds / max(once, 1e-9))))
        return min(self._sample(run, runs) for _ in range(self.samples))

    def _sample(self, run: Callable[[], object], runs: int) -> float:
        self.wait()
        begin = self.now()
        for _ in range(runs):
            run()
        self.wait()
        return (self.now() - begin) / runs


def measurable(device: torch.device) -> bool:
    """Returns True if work can run on ``device`` here."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def outside_of_modes(device: torch.device, measure: Callable[[], Result]) -> Result:
    """Calls ``measure`` in a thread of its own and returns its result, or raises its error. The random state is preserved.

    During a compilation, active modes turn every tensor into a fake one. These modes belong to the compiling thread.
    """
    threads = torch.get_num_threads()
    # A new thread starts on the first CUDA device, not on the current one.
    current = (torch.cuda.current_device() if device.index is None else device.index) if device.type == "cuda" else 0

    def work() -> Result:
        torch.set_num_threads(threads)  # OpenMP has this setting per thread
        on_cuda = device.type == "cuda"
        there = torch.cuda.device(current) if on_cuda else contextlib.nullcontext()
        with there, torch.no_grad(), torch.random.fork_rng([device] if on_cuda else []):
            return measure()

    with ThreadPoolExecutor(1, "autoremat-timing") as worker:
        return worker.submit(symbolic_sizes.carried(work)).result()
