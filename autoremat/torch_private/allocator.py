"""Torch's private names for its allocators: the allocations of one thread, and the settings of the process.

The measurement is independent of a profiler that records the process.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from autoremat.torch_private import resolve

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def settings_of_process() -> str:
    """Returns the settings of CUDA's caching allocator: those of the environment, or those that the process has set later."""
    present = resolve("torch._C:_accelerator_getAllocatorSettings")
    text = "" if present is None else present()
    return text or next(filter(None, map(os.environ.get, VARIABLES)), "")


def peak_on_cpu(run: Callable[[], object]) -> tuple[int, object]:
    """Returns the peak of ``run()`` in this thread, in bytes above the CPU memory live before, and its result.

    ``torch.profiler``, of which a process has one, may run in another thread at the same time.
    """
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    private: Any = torch._C._autograd
    # The third argument, for memory, is the only flag that is set.
    private._enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        result = run()
    finally:
        threads = private._disable_profiler_legacy()
    live = peak = 0
    for event in (event for thread in threads for event in thread if event.kind() == "memory_alloc"):
        live += event.cpu_memory_usage()
        peak = max(peak, live)
    return peak, result


def peak_on_cuda(run: Callable[[], object], device: torch.device) -> tuple[int, object]:
    """Returns the same as :func:`peak_on_cpu` for a CUDA device, over all threads.

    Resets the device's peak counter.
    """
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, result
