"""The link between a device and the host's memory: a stream for each direction, the pool of buffers, and what was moved.

The compute stream waits for a copy where the plan says. Until then the copy's source and its result are kept, so no memory is
recorded on two streams. Memory of the device is allocated and freed on the compute stream alone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from autoremat.host_memory.buffers import Pool, compute_stream, new_event, new_stream
from autoremat.torch_private.dynamo import resets


@dataclass(frozen=True)
class Statistics:
    """The bytes on the host for one device, and the bytes that were moved since the link began."""

    held_bytes: int = 0
    """Bytes of all buffers."""
    used_bytes: int = 0
    """Bytes of the buffers that hold a copy."""
    to_host_bytes: int = 0
    from_host_bytes: int = 0


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
        self._moved = {"to_host_bytes": 0, "from_host_bytes": 0}
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
            self._moved[direction] += copied.nbytes

    def statistics(self) -> Statistics:
        """Returns the bytes at present."""
        return Statistics(self.pool.held_bytes, self.pool.used_bytes, **self._moved)


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


def statistics(device: torch.device | str) -> Statistics:
    """Returns the bytes on the host for ``device``, and the bytes that were moved since the last reset of torch."""
    return link_of(torch.empty(0, device=device).device).statistics()  # of the current card, if no number is named


def release() -> None:
    """Drops the buffers that hold no copy, for all devices."""
    for link in list(_links.values()):
        link.pool.release()
