"""The memory, the devices and the ranks of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from autoremat.basics.errors import OptionsError
from autoremat.torch_private.processes import job

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
