"""Copies of saved tensors in the host's memory: buffers, streams, and the ops that a graph calls."""

from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch

from autoremat.host_memory.links import moved as moved
from autoremat.host_memory.links import release as release
from autoremat.torch_private.hooks import held

_stands_in: ContextVar[bool] = ContextVar("autoremat_host_memory_stands_in", default=False)


def is_available(device: torch.device) -> bool:
    """Returns True if tensors of ``device`` can be kept on the host, in memory of its own."""
    return device.type == "cuda" or (device.type == "cpu" and _stands_in.get())


def stand_in() -> AbstractContextManager[None]:
    """Lets a CPU be a device whose tensors can be kept on the host, in this thread, while active.

    For tests and benchmarks. The code takes the same way as on an accelerator, without streams. Buffers do not come from
    torch's allocator, so ``track_peak`` measures the bytes on the device alone.
    """
    return held(_stands_in, True)
