"""The memory, the devices and the ranks of this machine; the rates of a device and of its link to the host: measured on
request, and stored on disk.

A card with a data sheet is not measured: kernels of its architecture were, and their shapes tell more than a few typical ops.
Stored rates are specific to device, torch version, number of threads and precision of matrix products.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch

from autoremat import host_memory
from autoremat.basics import disk_cache
from autoremat.basics.codec import Codec
from autoremat.basics.errors import OptionsError
from autoremat.basics.progress import now
from autoremat.host_memory.links import new_stream
from autoremat.planner.cost.datasheets import datasheet
from autoremat.planner.cost.device import Rates
from autoremat.planner.cost.links import HostLink, assumed_host_link
from autoremat.torch_private import compilers, symbolic_sizes
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
    """Returns the bytes that this process could allocate on the host, under the limit of its control group too.

    Linux estimates the free memory; elsewhere half of all memory counts.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found = [int(lines["MemAvailable"].removesuffix("kB")) * 2**10]
    except (OSError, KeyError, ValueError):
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]
    for limit, used in CONTROL_GROUPS:
        try:
            found.append(max(0, int((control / limit).read_text()) - int((control / used).read_text())))
        except (OSError, ValueError):  # no such version, or "max"
            continue
    return min(found)


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

REPETITIONS = 5


def least_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Returns the least seconds of a few runs. The first one also makes the device ready."""
    wait = bool if device.type == "cpu" else partial(torch.accelerator.synchronize, device)
    found = []
    for _ in range(REPETITIONS + 1):
        wait()
        start = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start)
    return min(found)


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


log = logging.getLogger("autoremat")

VERSION = 4
"""Number of the measurements, which rises if one of them measures something else. Stored rates have that of theirs."""

LONGEST_WAIT = 90.0
"""Seconds to wait for another process that calibrates the same device. After that, this process calibrates too."""

TINY, LAUNCHES = 8, 100
"""Side of matrices whose product costs little more than the launch, and number of such products in a run."""

SIDES = {"cpu": 512, "cuda": 4096}
"""Sides of the matrices of a large product."""

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

STREAMED = 2**24
"""Elements of each operand of a sum, more than caches hold."""


def device_name(device: torch.device) -> str:
    """Returns the device's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()} {_cpu_model()}"


@cache
def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def device_key(device: torch.device) -> str:
    """Returns a name for files. It is equal for devices and settings that give the same measurements."""
    settings = (str(torch.get_num_threads()), compilers.float32_precision())
    parts = (device_name(device), torch.__version__, *settings, str(VERSION))
    return f"{device.type}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}"


_known: dict[str, Rates] = {}


def takes_measured_rates(device: torch.device) -> bool:
    """Returns False if data sheets give the rates: of a card that has one, and of a device that cannot be measured."""
    return measurable(device) and (device.type == "cpu" or datasheet(device_name(device)) is None)


def rates_of(device: torch.device) -> Rates | None:
    """Returns the rates of ``device``, from disk or by measuring them; None if data sheets take their place.

    That a device cannot be measured is logged once.
    """
    if not takes_measured_rates(device):
        if not measurable(device):
            _say_unmeasurable(device.type)
        return None
    key = device_key(device)
    if key not in _known:
        # Ranks of a job start together. One rank measures, and all ranks that share a cache folder plan with its rates.
        with disk_cache.locked("rates", key, LONGEST_WAIT):
            try:
                _known[key] = Rates.from_json(disk_cache.read_text("rates", key) or "")
            except disk_cache.UNUSABLE:
                _known[key] = measure(device)
    return _known[key]


def measure(device: torch.device) -> Rates:
    """Returns new rates of ``device``, and stores them."""
    now(f"calibrating {device}")
    rates = outside_of_modes(device, lambda: _measured(device))
    disk_cache.write_text("rates", device_key(device), rates.to_json())
    return rates


@cache
def _say_unmeasurable(device_type: str) -> None:
    log.warning("a %s device cannot be calibrated here: costs are taken from data sheets", device_type)


def _measured(device: torch.device) -> Rates:
    def of_products(side: int, dtype: torch.dtype, count: int = 1) -> float:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        return least_seconds(device, lambda: [left @ right for _ in range(count)]) / count

    side, by_type = SIDES[device.type], list[tuple[str, float]]()
    for dtype in TYPES:
        with contextlib.suppress(RuntimeError):  # the device has no such product
            by_type.append((str(dtype).removeprefix("torch."), 2 * side**3 / of_products(side, dtype)))
    left, right, out = (torch.zeros(STREAMED, device=device) for _ in range(3))
    streaming = least_seconds(device, lambda: torch.add(left, right, out=out))
    launch, bandwidth = of_products(TINY, torch.float32, LAUNCHES), 3 * out.nbytes / streaming
    if device.type == "cuda":  # else what the products took stays reserved
        del left, right, out
        torch.cuda.empty_cache()
    return Rates(launch, bandwidth, tuple(by_type))


# -- the link to the host ----------------------------------------------------------------------------------------------

# A small copy gives the latency. The time that a large one takes longer gives the rate. Ranks of a machine that compile
# together measure at the same time, so their rates are those of a link that they share.

SMALL_BYTES, LARGE_BYTES = 4 * 2**10, 32 * 2**20
"""Copied bytes of the two measurements."""

LEAST_SECONDS = 1e-7
"""Least difference of the two measurements."""

STAND_IN = HostLink(50e9, 50e9)
"""The link of a CPU that stands for an accelerator: that of a card at PCI Express 5.0."""

_links: dict[str, HostLink] = {}


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
    if key not in _links:
        try:
            _links[key] = Codec().read(HostLink, json.loads(disk_cache.read_text("host_links", key) or ""))
        except disk_cache.UNUSABLE:
            now(f"measuring the link between {device} and the host")
            _links[key] = outside_of_modes(device, partial(measure_link, device))
            disk_cache.write_text("host_links", key, json.dumps(astuple(_links[key])))
    return _links[key]


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
