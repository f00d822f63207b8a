"""The link between a device and the host's memory: a stream for each direction, the pool of buffers, and what was moved.

The compute stream waits for a copy where the plan says. Until then the copy's source and its result are kept, so no memory is
recorded on two streams. Memory of the device is allocated and freed on the compute stream alone.

A buffer is lent as a tensor, and comes back when that tensor's storage is freed. So autograd decides how long a copy lives: a
graph that is kept for a second backward keeps its copies, and an error between the halves returns them.
"""

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
from autoremat.torch_private.dynamo import resets
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
            buffer = Buffer(size, self.device)
            with self._growing:
                self.held_bytes += size
                self._by_address[buffer.address] = buffer
        lent = buffer.memory[:]  # an object of its own, which the tensor's storage keeps
        when_dropped(lent, _give_back, buffer, free)
        return torch.from_numpy(lent)

    def buffer_of(self, tensor: torch.Tensor) -> Buffer | None:
        """Returns the buffer that was lent as ``tensor``; None for any other memory."""
        return self._by_address.get(tensor.data_ptr())

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


class Moved(threading.local):
    """The bytes of the buffers that this thread has copied to and from, for all devices. They are the planned sizes."""

    to_host_bytes = 0
    from_host_bytes = 0
    replaced = 0
    """Number of loads from other memory than a buffer."""


moved = Moved()


class Link:
    """Copies tensors between one device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, Pool(device)
        self._to_host, self._from_host = new_stream(device), new_stream(device)
        self._loads: dict[int, torch.Tensor] = {}
        """Loaded tensors that the compute stream has not waited for, by address."""
        self.moved = {"to_host_bytes": 0, "from_host_bytes": 0}
        """All bytes so far, for tests and benchmarks."""
        self._counting = threading.Lock()
        self._copying = threading.Lock()
        """Held while a stream of the link is current, because torch keeps the stream before it in the stream itself."""

    def copy_to_host(self, source: torch.Tensor, capacity: int) -> torch.Tensor:
        """Returns a tensor on the host with the layout of ``source``, into which ``source`` is being copied.

        Its buffer has ``capacity`` bytes, or more if the layout needs more.
        """
        if self._loads:  # for a backward that an error ended; freed before the copy is complete, the memory could serve others
            compute_stream(self.device).wait_event(self._from_host.record_event(new_event(self.device)))
            self._loads.clear()
        flat = _flat(source)
        lent = self.pool.lend(max(capacity, flat.nbytes, 1))
        copy = lent[: flat.nbytes].view(source.dtype)
        buffer = self.pool.buffer_of(lent)
        assert buffer is not None
        buffer.source = source  # generated code may pass a temporary, which nothing else keeps
        self._to_host.wait_stream(compute_stream(self.device))
        self._to_host.wait_event(buffer.loaded)
        with self._copying, self._to_host:
            copy.copy_(flat, non_blocking=True)
        self._to_host.record_event(buffer.stored)
        self._count("to_host_bytes", flat)
        moved.to_host_bytes += buffer.memory.nbytes
        return copy.as_strided(source.size(), source.stride())

    def wait_for_copy_to_host(self, copy: torch.Tensor) -> torch.Tensor:
        """Returns ``copy``, a result of :meth:`copy_to_host`, once the compute stream waits until it is complete."""
        buffer = self.pool.buffer_of(copy)
        if buffer is not None:
            compute_stream(self.device).wait_event(buffer.stored)
            buffer.source = None
        return copy

    def copy_from_host(self, host: torch.Tensor) -> torch.Tensor:
        """Returns a tensor on the device with the layout of ``host``, into which ``host`` is being copied."""
        copy = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.device)
        buffer = self.pool.buffer_of(host)
        self._count("from_host_bytes", _flat(host))
        if buffer is None:  # a saved-tensor hook of the user's has put another tensor in its place
            moved.replaced += 1
            return copy.copy_(host)
        moved.from_host_bytes += buffer.memory.nbytes
        self._from_host.wait_stream(compute_stream(self.device))
        self._from_host.wait_event(buffer.stored)
        with self._copying, self._from_host:
            _flat(copy).copy_(_flat(host), non_blocking=True)
        self._from_host.record_event(buffer.loaded)
        self._loads[copy.data_ptr()] = copy
        return copy

    def wait_for_copy_from_host(self, copy: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """Returns ``copy``, a result of :meth:`copy_from_host`, once the compute stream waits until it is complete."""
        buffer = self.pool.buffer_of(host)
        if buffer is not None:
            compute_stream(self.device).wait_event(buffer.loaded)
        self._loads.pop(copy.data_ptr(), None)
        return copy

    def _count(self, direction: str, copied: torch.Tensor) -> None:
        with self._counting:
            self.moved[direction] += copied.nbytes


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of ``tensor`` from its first element to its last, in one dimension, with any gaps between."""
    last = sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


_links: dict[torch.device, Link] = {}
_reset = 0
_opening = threading.Lock()


def link_of(device: torch.device) -> Link:
    """Returns the link of ``device``. A reset of torch ends all links, and buffers are dropped after their last use."""
    global _reset
    with _opening:
        if _reset != resets():
            _links.clear()
            _reset = resets()
        if device not in _links:
            _links[device] = Link(device)
        return _links[device]


def release() -> None:
    """Drops the buffers that hold no copy, for all devices."""
    for link in list(_links.values()):
        link.pool.release()
