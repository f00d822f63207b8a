"""Memory and seconds of training steps on a CUDA device: counters of the allocator, events in turn."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from torch import nn

TURN = FileLock(Path(tempfile.gettempdir()) / "autoremat-gpu-steps.lock")
"""Held while steps are timed, so that those of other stages wait."""

WARM_STEPS = 3
"""Steps before one is measured. CUDA graphs are recorded in the second."""

Step = Callable[[], torch.Tensor]
"""Runs forward and backward and returns the loss."""


@dataclass(frozen=True)
class Memory:
    """The peaks of one step, in bytes above the step's start."""

    allocated_bytes: int
    """Blocks of the allocator. Of a block above 1 MiB, up to 1 MiB can be unused."""
    requested_bytes: int
    """Bytes of the tensors."""
    reserved_bytes: int
    """Segments that the allocator took from the device in two steps, after it had given all free ones back."""


def training_step(model: nn.Module, compiled: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> Step:
    """Returns a step of ``compiled``, whose parameters are those of ``model``, with new gradients."""

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)
        loss = compiled(*inputs)
        loss.backward()
        return loss.detach()

    return step


def memory_of(model: nn.Module, step: Step) -> Memory:
    """Returns the peaks of one more step."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    kinds, before = ("allocated", "requested", "reserved"), torch.cuda.memory_stats()
    step()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    step()  # finds the segments of the first one, cut into other pieces
    torch.cuda.synchronize()
    after["reserved_bytes.all.peak"] = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
    return Memory(*(after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"] for kind in kinds))


def reserved_bytes() -> int:
    """Returns the bytes that the allocator holds of the device once it has given back free segments."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_stats()["reserved_bytes.all.current"]


def largest_difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Returns the largest difference of two gradients, over the largest element of ``expected``."""
    largest = max(float(tensor.abs().max()) for tensor in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


@dataclass(frozen=True)
class Seconds:
    """The seconds of a step: median, least and most of some samples."""

    median: float
    least: float
    most: float


def in_turn(steps: Mapping[str, Step], rounds: int, steps_per_sample: int) -> dict[str, list[float]]:
    """Returns the seconds of each step in each round, by CUDA events.

    All take turns, so that a slow moment of the device meets them all.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    with TURN:
        for _ in range(rounds):
            for name, step in steps.items():
                samples[name].append(_seconds_of(step, steps_per_sample))
    return samples


def _seconds_of(step: Callable[[], object], steps: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()  # brings caches and clocks into the state that this step leaves
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / steps


def summary_of(samples: list[float]) -> Seconds:
    return Seconds(statistics.median(samples), min(samples), max(samples))


def ratio_of(ours: list[float], theirs: list[float]) -> float:
    """Returns the median ratio of samples that were taken in the same round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
