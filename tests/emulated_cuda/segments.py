"""The segments that CUDA's caching allocator would reserve for the card's own allocations, by its rules.

The card's memory is the host's, so it has no segments. The sequence of its allocations is that of a real card.
"""

from __future__ import annotations

import ctypes

from autoremat.planner.memory.allocations import FREED, Allocations
from autoremat.planner.memory.caching_allocator import Block, CachingAllocator

POOL_MEMORY = 1
"""The pool of CUDA graphs: `Memory` in `device.cpp`."""


class Log:
    """The allocations and frees of the card in sequence."""

    def __init__(self, device: ctypes.CDLL) -> None:
        self.device = device
        device.emulated_events.restype = ctypes.c_int64

    def __len__(self) -> int:
        return int(self.device.emulated_events())

    def since(self, begin: int) -> list[tuple[int, int, bool, int]]:
        """Returns the events from `begin` on: numbers, bytes or `FREED`, True in the pool of CUDA graphs, and streams."""
        end = len(self)
        numbers = (ctypes.c_int64 * (4 * (end - begin)))()
        self.device.emulated_copy_events(ctypes.c_int64(begin), ctypes.c_int64(end), numbers)
        rows = zip(*[iter(numbers)] * 4, strict=True)
        return [(number, size, memory == POOL_MEMORY, stream) for number, size, memory, stream in rows]

    def step_since(self, begin: int) -> Allocations:
        """Returns the events from `begin` on as the allocations of a step."""
        events = [event for event in self.since(begin) if event[0] >= begin]  # others free what was there before
        pooled = frozenset(number for number, _, in_pool, _ in events if in_pool)
        return Allocations(tuple((number, size) for number, size, _, _ in events), pooled)


class Segments:
    """The segments that are reserved for all allocations until now."""

    def __init__(self, log: Log) -> None:
        self.log, self.read = log, 0
        self.allocators = {in_pool: CachingAllocator() for in_pool in (False, True)}
        self.live: dict[int, Block] = {}

    def update(self) -> None:
        """Replays the events since the last call."""
        events = self.log.since(self.read)
        self.read += len(events)
        for number, size, in_pool, stream in events:
            if size == FREED:
                self.allocators[in_pool].free(self.live.pop(number))
            else:
                self.live[number] = self.allocators[in_pool].allocate(size, stream)

    def bytes(self) -> tuple[int, int]:
        """Returns the bytes that are reserved now, and the most until now."""
        self.update()
        found = self.allocators.values()
        return sum(one.reserved_bytes for one in found), sum(one.peak_reserved_bytes for one in found)

    def empty_cache(self) -> None:
        """Returns free segments to the driver. Those of the pool stay."""
        self.update()
        self.allocators[False].empty_cache()

    def reset_peak(self) -> None:
        """Forgets the peak."""
        self.update()
        for one in self.allocators.values():
            one.peak_reserved_bytes = one.reserved_bytes


present: list[Segments] = []
"""The segments of the card, once installed."""
