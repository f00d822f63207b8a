"""Seconds of a piece of work on a device."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from autoremat.basics import progress
from autoremat.torch_private import symbolic_sizes

Result = TypeVar("Result")

MAX_RUNS = 100
"""At most so many runs in one sample."""


class Timer(Protocol):
    """What times a run: a :class:`Stopwatch`, or a test's stand-in."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of one ``run()``."""
        ...


@dataclass(frozen=True)
class Stopwatch:
    """The least of a few samples, each of so many runs that the clock's steps and the device's latency do not count.

    Whatever else the machine does only ever adds to a time, and much where several threads wait for each other.
    """

    wait: Callable[[], None]
    """Returns when the device has done all it was given."""
    now: Callable[[], float] = time.perf_counter
    samples: int = 5
    sample_seconds: float = 2e-3

    def seconds(self, run: Callable[[], object]) -> float:
        """The time of ``run()`` after two runs to warm up, in seconds."""
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


def stopwatch_for(device: torch.device) -> Stopwatch:
    """A stopwatch for ``device``, which must be there."""
    return Stopwatch((lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None)


def measurable(device: torch.device) -> bool:
    """Whether work can be run on ``device`` here."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def undisturbed(device: torch.device, measure: Callable[[], Result]) -> Result:
    """Call ``measure`` in a thread of its own, with the random state kept, and return what it returns or raise what it raises.

    While a graph is compiled, modes are active that turn every tensor into a fake one; they belong to the compiling thread.
    """
    threads = torch.get_num_threads()
    # A new thread begins on the first CUDA device, whatever the present one is.
    current = (torch.cuda.current_device() if device.index is None else device.index) if device.type == "cuda" else 0

    def work() -> Result:
        torch.set_num_threads(threads)  # OpenMP keeps the number for each thread that starts parallel work
        on_cuda = device.type == "cuda"
        there = torch.cuda.device(current) if on_cuda else contextlib.nullcontext()
        with there, torch.no_grad(), torch.random.fork_rng([device] if on_cuda else []):
            return measure()

    with ThreadPoolExecutor(1, "autoremat-timing") as worker:
        return worker.submit(progress.carried(symbolic_sizes.carried(work))).result()
