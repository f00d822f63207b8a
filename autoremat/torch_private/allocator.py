"""Torch's private way to see what one thread does with the CPU's memory, beside whatever profiles the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def can_see_allocations() -> bool:
    """Whether this version of torch can tell what one thread allocates."""
    return hasattr(torch._C._autograd, "_enable_profiler_legacy")


def peak_on_cpu(run: Callable[[], object]) -> tuple[int, object]:
    """The most bytes that ``run()`` holds at once on the CPU beyond those from before, in this thread; and its result.

    ``torch.profiler``, of which a process has one, may run in another thread meanwhile.
    """
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    private: Any = torch._C._autograd
    # Of the flags only that for memory is set.
    private._enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        result = run()
    finally:
        threads = private._disable_profiler_legacy()
    alive = peak = 0
    for event in (event for thread in threads for event in thread if event.kind() == "memory_alloc"):
        alive += event.cpu_memory_usage()
        peak = max(peak, alive)
    return peak, result


def peak_on_cuda(run: Callable[[], object], device: torch.device) -> tuple[int, object]:
    """As :func:`peak_on_cpu` on a CUDA device, of all threads; the device's counter of its peak begins anew."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, result
