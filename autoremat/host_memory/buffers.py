"""Buffers in the host's memory, and the pool that lends them.

A buffer is lent as a tensor, and comes back when that tensor's storage is freed. So autograd decides how long a copy lives: a
graph that is kept for a second backward keeps its copies, and an error between the halves returns them.

                 lend                      the tensor's storage is freed
    free buffer ──────► tensor on the host ──────────────────────────────► free buffer
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from autoremat.basics.units import format_bytes
from autoremat.torch_private.hooks import when_dropped


class Buffer:
    """Memory of the host at one address, in pages of its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        # Not by torch: its allocator of page-locked memory rounds up to a power of two.
        self.memory: NDArray[numpy.uint8] = numpy.frombuffer(mmap.mmap(-1, size), numpy.uint8)
        self.stored, self.loaded = new_event(device), new_event(device)
        """The events behind the newest copy into the buffer, and behind the newest copy out of it."""
        self.source: torch.Tensor | None = None
        """What is being copied into the buffer, until the compute stream has waited for that."""
        if device.type == "cuda":
            _lock_pages(self)

    @property
    def address(self) -> int:
        """The address of the memory, which is that of each tensor that the buffer is lent as."""
        return int(self.memory.ctypes.data)


def _lock_pages(buffer: Buffer) -> None:
    size, driver = buffer.memory.nbytes, torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if status := int(driver.cudaHostRegister(buffer.address, size, 0)):
        raise MemoryError(
            f"{format_bytes(size)} of the host's memory cannot be locked for copies from and to the device (CUDA error "
            f"{status}). Free memory of the host, raise the limit of locked memory (`ulimit -l`), or allow less host memory"
        )
    when_dropped(buffer, _unlock_pages, buffer.memory, (buffer.stored, buffer.loaded))


def _unlock_pages(memory: NDArray[numpy.uint8], copies: tuple[Any, Any]) -> None:
    for event in copies:
        event.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]


def _give_back(buffer: Buffer, free: deque[Buffer]) -> None:
    """Makes ``buffer`` free. As a finalizer this may run anywhere, so it takes no lock."""
    buffer.source = None
    free.append(buffer)


class Pool:
    """The buffers for copies from and to one device, by size.

    A size gets a buffer when all of its buffers are lent, so the pool grows to the calls in flight and no further.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held_bytes = 0
        self._free: dict[int, deque[Buffer]] = {}
        self._by_address: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
        self._growing = threading.Lock()

    def lend(self, size: int) -> torch.Tensor:
        """Returns the memory of a buffer of ``size`` bytes as a tensor of bytes."""
        free = self._free.setdefault(size, deque())
        try:
            buffer = free.pop()
        except IndexError:
            buffer = self._grow(size)
        lent = buffer.memory[:]  # an object of its own, which the tensor's storage keeps
        when_dropped(lent, _give_back, buffer, free)
        return torch.from_numpy(lent)

    def _grow(self, size: int) -> Buffer:
        buffer = Buffer(size, self.device)
        with self._growing:
            self.held_bytes += size
            self._by_address[buffer.address] = buffer
        return buffer

    def buffer_of(self, tensor: torch.Tensor) -> Buffer | None:
        """Returns the buffer that was lent as ``tensor``; None for any other memory."""
        return self._by_address.get(tensor.data_ptr())

    @property
    def used_bytes(self) -> int:
        """Bytes of the buffers that are lent."""
        return self.held_bytes - sum(size * len(free) for size, free in list(self._free.items()))

    def release(self) -> None:
        """Drops the buffers that are not lent."""
        for size, free in list(self._free.items()):
            while free:
                free.pop()
                with self._growing:
                    self.held_bytes -= size


class _Immediate(contextlib.AbstractContextManager[None]):
    """A stream on which all work is complete, and an event on it."""

    def wait_event(self, event: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def record_event(self, event: object) -> object:
        return event

    def synchronize(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


_IMMEDIATE = _Immediate()


def new_event(device: torch.device) -> Any:
    """Returns an event for work on the streams of ``device``. Until it is recorded, it counts as complete."""
    return _IMMEDIATE if device.type == "cpu" else torch.Event(device)


def new_stream(device: torch.device) -> Any:
    """Returns a stream of its own on ``device``."""
    return _IMMEDIATE if device.type == "cpu" else torch.Stream(device)


def compute_stream(device: torch.device) -> Any:
    """Returns the stream on which this thread computes on ``device``."""
    return _IMMEDIATE if device.type == "cpu" else torch.accelerator.current_stream(device)
