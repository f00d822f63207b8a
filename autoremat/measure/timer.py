"""Measures the seconds of work on a device."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from autoremat.torch_private import symbolic_sizes

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
