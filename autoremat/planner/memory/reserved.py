"""Predicts the bytes that CUDA's caching allocator reserves for a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from autoremat.planner.memory.allocations import FREED, Allocations, Event
from autoremat.planner.memory.allocator_settings import AllocatorSettings
from autoremat.planner.memory.caching_allocator import Block, CachingAllocator, OutOfMemory

STEPS = 2
"""Steps that are replayed. The second one finds the segments of the first, cut into other pieces."""

BISECTIONS = 6
"""Halvings of the range in which the least memory of the device is sought."""


@dataclass(frozen=True)
class Reserved:
    """Bytes that the allocator reserves for a step, beyond those of parameters and of other memory that exists anyway."""

    default_bytes: int
    """Bytes without any setting of the allocator."""
    expandable_bytes: int
    """The same with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""
    bytes: int = 0
    """Bytes with the settings of this process. A budget counts them if ``count="reserved"``."""
    least_bytes: int = 0
    """Least memory of the device that suffices with the settings of this process. The allocator then gives free segments back
    to the driver, which waits for the device each time."""
    allocated_bytes: int = 0
    """Most allocated bytes at once, by the same replay."""
    pool_bytes: int | None = None
    """Part of ``bytes`` that the pool of CUDA graphs keeps. None without CUDA graphs."""
    is_expandable: bool = False
    """True if this process has expandable segments."""
    of_code: bool = False
    """True if the sequence of allocations is that of generated code; False if it is that of the simulated plan."""

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that is not allocated at the peak."""
        return 1 - self.allocated_bytes / self.bytes if self.bytes else 0.0


def reserved_for(allocations: Allocations, settings: AllocatorSettings, of_code: bool = False) -> Reserved:
    """Returns the bytes reserved for a step, by a replay from an empty device."""
    expandable = replace(AllocatorSettings(), expandable_segments=True)
    pool, own = _split(allocations)
    used = _replayed(own, settings)
    in_pool = _replayed(pool, settings) if allocations.pooled else None
    total = used.peak_reserved_bytes + (0 if in_pool is None else in_pool.peak_reserved_bytes)
    return Reserved(
        default_bytes=reserved_bytes(allocations, AllocatorSettings()),
        expandable_bytes=reserved_bytes(allocations, expandable),
        bytes=total,
        least_bytes=total - used.peak_reserved_bytes + _least_bytes(own, settings, used),
        allocated_bytes=used.peak_allocated_bytes + (0 if in_pool is None else in_pool.peak_allocated_bytes),
        pool_bytes=None if in_pool is None else in_pool.peak_reserved_bytes,
        is_expandable=settings.expandable_segments,
        of_code=of_code,
    )


def reserved_bytes(allocations: Allocations, settings: AllocatorSettings) -> int:
    """Returns the bytes reserved for a step. The pool of CUDA graphs has segments of its own."""
    return sum(_replayed(events, settings).peak_reserved_bytes for events in _split(allocations))


def unsplit_bytes(allocations: Allocations, settings: AllocatorSettings) -> int:
    """Returns the bytes of blocks at the peak behind the border, beside the allocations in them, by a replay from an empty
    device.

    The allocator rounds sizes, may leave the rest of a block with it, and counts the whole block as allocated.
    """
    found, early = 0, replace(allocations, events=allocations.events[: allocations.border])
    for before, events in zip(_split(early), _split(allocations), strict=True):
        border, sizes = len(before), {number: size for number, size in events if size != FREED}
        live = list(accumulate((-sizes[number] if size == FREED else size for number, size in events), initial=0))
        found += _replayed(events, settings, border=border).peak_allocated_bytes - max(live[border:])
    return found


def _split(allocations: Allocations) -> tuple[Sequence[Event], Sequence[Event]]:
    """Returns the events in the pool of CUDA graphs, and those outside of it."""
    pooled, events = allocations.pooled, allocations.events
    if not pooled:
        return (), events
    return [event for event in events if event[0] in pooled], [event for event in events if event[0] not in pooled]


def _replayed(
    events: Sequence[Event], settings: AllocatorSettings, limit_bytes: float = math.inf, border: int = 0
) -> CachingAllocator:
    """Returns the allocator after consecutive steps, each of which frees all its memory at the end.

    The peak of allocated bytes is that of the events from ``border`` on. Raises ``OutOfMemory`` if a step needs more than
    ``limit_bytes``.
    """
    allocator, peak = CachingAllocator(settings, limit_bytes), 0
    for _ in range(STEPS):
        live: dict[int, Block] = {}
        for position, (number, size) in enumerate(events):
            if position == border:
                allocator.peak_allocated_bytes = allocator.allocated_bytes
            if size == FREED:
                allocator.free(live.pop(number))
            else:
                live[number] = allocator.allocate(size)
        if border == len(events):
            allocator.peak_allocated_bytes = allocator.allocated_bytes
        peak = max(peak, allocator.peak_allocated_bytes)
        for block in live.values():
            allocator.free(block)
    allocator.peak_allocated_bytes = peak
    return allocator


def _least_bytes(events: Sequence[Event], settings: AllocatorSettings, free: CachingAllocator) -> int:
    """Returns the least limit found under which the steps run. ``free`` is the replay without a limit."""
    low, high = free.peak_allocated_bytes, free.peak_reserved_bytes
    for _ in range(BISECTIONS):
        middle = (low + high) // 2
        try:
            high = _replayed(events, settings, middle).peak_reserved_bytes
        except OutOfMemory:
            low = middle
        if high <= low:
            break
    return high
