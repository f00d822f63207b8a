"""Measures the seconds of work on a device."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from autoremat.basics import progress
from autoremat.torch_private import symbolic_sizes

Result = TypeVar("Result")

MAX_RUNS = 100
"""The most runs in one sample."""

UNDISTURBED = 0.05
"""The largest share of a sample that a thread may wait for a processor if the sample counts as undisturbed."""

TASKS = "/proc/self/task"


def run_delays() -> dict[str, float]:
    """Returns the run delay of each thread of this process, in seconds since its start; empty where the system counts none.

    It is the time that a thread waits for a processor because other programs run. Linux counts it
    (https://docs.kernel.org/scheduler/sched-stats.html).
    """
    found = {}
    with contextlib.suppress(OSError):
        for task in os.listdir(TASKS):
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"{TASKS}/{task}/schedstat") as file:
                found[task] = int(file.read().split()[1]) * 1e-9
    return found


def longest_delay(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Returns the largest increase of the run delay of one thread, in seconds."""
    return max((seconds - before.get(task, 0.0) for task, seconds in after.items()), default=0.0)


class Timer(Protocol):
    """The interface of clocks that time a run: a :class:`Stopwatch`, or a test's substitute."""

    def now(self) -> float:
        """Returns the seconds since a fixed time."""
        ...

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the seconds of one ``run()``."""
        ...

    @property
    def disturbed_share(self) -> float:
        """Share of the timings so far that had no undisturbed sample."""
        ...


@dataclass
class Stopwatch:
    """A timer that returns the least of a few samples during which no thread of this process waited for a processor.

    Each sample has enough runs to hide the clock's resolution and the device's latency. Beside other programs, a sample takes
    many times as long, because threads wait for a thread that is not running. Short samples often fit between two
    such delays, so the stopwatch waits for undisturbed ones. Without any, it subtracts the delays and takes the median.
    """

    wait: Callable[[], None]
    """Returns when the device has finished all its work."""
    now: Callable[[], float] = time.perf_counter
    delays: Callable[[], Mapping[str, float]] = dict
    """Returns the run delay of each thread in seconds; empty if no sample counts as disturbed."""
    samples: int = 5
    sample_seconds: float = 1e-3
    patience: float = 0.3
    """Seconds after which a timing waits no longer for undisturbed samples."""
    timings: int = 0
    disturbed_timings: int = 0

    @property
    def disturbed_share(self) -> float:
        """Share of the timings so far that had no undisturbed sample."""
        return self.disturbed_timings / max(self.timings, 1)

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the seconds of ``run()``, after two runs to warm up."""
        run()
        once, _ = self._sample(run, 1)
        runs = min(MAX_RUNS, max(1, math.ceil(self.sample_seconds / max(once, 1e-9))))
        undisturbed: list[float] = []
        disturbed: list[float] = []
        begin = self.now()
        while len(undisturbed) < self.samples:
            if len(undisturbed) + len(disturbed) >= self.samples and self.now() - begin > self.patience:
                break
            seconds, delay = self._sample(run, runs)
            if delay <= UNDISTURBED * seconds:
                undisturbed.append(seconds)
            else:
                disturbed.append(max(seconds - delay, UNDISTURBED * seconds))
        self.timings += 1
        self.disturbed_timings += not undisturbed
        return min(undisturbed) if undisturbed else statistics.median(disturbed)

    def _sample(self, run: Callable[[], object], runs: int) -> tuple[float, float]:
        """Returns the seconds of one of ``runs`` runs, and the part of them in which a thread waited for a processor."""
        self.wait()
        delays, begin = self.delays(), self.now()
        for _ in range(runs):
            run()
        self.wait()
        seconds = self.now() - begin
        return seconds / runs, longest_delay(delays, self.delays()) / runs


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Returns a stopwatch for ``device``, which must be present. Other programs disturb timings of the CPU alone."""
    if device.type == "cuda":
        return Stopwatch(lambda: torch.cuda.synchronize(device))
    return Stopwatch(lambda: None, delays=run_delays)


def measurable(device: torch.device) -> bool:
    """Returns True if work can run on ``device`` here."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def undisturbed(device: torch.device, measure: Callable[[], Result]) -> Result:
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
        return worker.submit(progress.carried(symbolic_sizes.carried(work))).result()
