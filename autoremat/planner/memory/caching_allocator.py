"""Replays allocations by the rules of CUDA's caching allocator, which reserves more memory than is allocated.

The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp``; torch's "CUDA semantics" notes describe its settings.

- Sizes are rounded up to 512 bytes. Blocks of at most 1 MiB come from the small pool, others from the large pool.
- A *segment* is memory taken from the driver: 2 MiB in the small pool, 20 MiB for blocks below 10 MiB, for larger ones their
  size rounded up to 2 MiB. Segments stay reserved after their blocks are freed.
- A request takes the smallest free block of its pool and stream that is large enough, at the lowest address. The rest is split
  off: from 512 bytes on in the small pool, if more than 1 MiB in the large pool.
- A freed block merges with its free neighbours in the segment.
- With *expandable segments*, each pool and stream has one segment that grows by pages of 2 MiB or 20 MiB, and every rest from
  512 bytes on is split off.
- With a *largest split size*, larger blocks are never split, and serve only requests above that size and at most 20 MiB
  smaller.

The replay never runs out of memory, so nothing is returned to the driver.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

MIB = 2**20
ROUNDING = 512
MOST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
LEAST_OWN_SEGMENT = 10 * MIB
"""Requests from this size on get a segment of their own size."""
SEGMENT_ROUNDING = 2 * MIB

ADDRESSES = 2**60
"""Number of addresses in the range of a pool."""


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings in ``PYTORCH_CUDA_ALLOC_CONF`` that the replay knows."""

    expandable_segments: bool = False
    largest_split_bytes: float = math.inf
    """The setting ``max_split_size_mb``, in bytes."""


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    address: int
    bytes: int
    pool: _Pool
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None

    def __lt__(self, other: Block) -> bool:
        return (self.bytes, self.address) < (other.bytes, other.address)


@dataclass(eq=False)
class _Pool:
    """The free blocks of one size class on one stream, by size and address."""

    is_small: bool
    end: int
    """Address behind the pool's segments. Each pool has a range of addresses of its own, in which its segments follow."""
    free: list[Block] = field(default_factory=list)
    last: Block | None = None
    """The last block of the expandable segment."""


class CachingAllocator:
    """The allocator's state. ``reserved_bytes`` never falls, so it is also the peak."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.allocated_bytes = self.peak_allocated_bytes = self.reserved_bytes = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Returns a block of at least ``size`` bytes."""
        wanted = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        small = wanted <= MOST_SMALL
        pool = self._pools.setdefault((small, stream), _Pool(small, len(self._pools) * ADDRESSES))
        block = self._take(pool, wanted) or self._new(pool, wanted)
        if self._splits(block, wanted):
            self._split(block, wanted)
        block.is_free = False
        self.allocated_bytes += block.bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Returns ``block`` to its pool."""
        self.allocated_bytes -= block.bytes
        block.is_free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                _remove(block.pool.free, neighbour)
                self._merge(block, neighbour)
        insort(block.pool.free, block)

    def _take(self, pool: _Pool, wanted: int) -> Block | None:
        """Removes the best free block for ``wanted`` bytes from ``pool`` and returns it; None if there is none."""
        at = bisect_left(pool.free, Block(-1, wanted, pool))
        if at == len(pool.free):
            return None
        # The last block of an expandable segment can grow, so any other block fits better.
        if pool.free[at] is pool.last and at + 1 < len(pool.free):
            at += 1
        block, limit = pool.free[at], self.settings.largest_split_bytes
        if wanted < limit <= block.bytes or (wanted >= limit and block.bytes >= wanted + LARGE_SEGMENT):
            return None
        return pool.free.pop(at)

    def _new(self, pool: _Pool, wanted: int) -> Block:
        """Returns a block of new memory."""
        if self.settings.expandable_segments:
            return self._grown(pool, wanted)
        if wanted <= MOST_SMALL:
            size = SMALL_SEGMENT
        else:
            size = LARGE_SEGMENT if wanted < LEAST_OWN_SEGMENT else -(-wanted // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        return self._reserve(pool, size)

    def _grown(self, pool: _Pool, wanted: int) -> Block:
        """Returns the end of the pool's expandable segment, after it has grown to ``wanted`` free bytes."""
        page, last = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT, pool.last
        present = last.bytes if last is not None and last.is_free else 0
        if last is not None and present >= wanted:  # a block that the largest split size keeps from this request
            _remove(pool.free, last)
            return last
        new = self._reserve(pool, -(-(wanted - present) // page) * page)
        new.before, pool.last = last, new
        if last is not None:
            last.after = new
            if last.is_free:
                _remove(pool.free, last)
                self._merge(new, last)
        return new

    def _reserve(self, pool: _Pool, size: int) -> Block:
        block = Block(pool.end, size, pool)
        pool.end += size
        self.reserved_bytes += size
        return block

    def _splits(self, block: Block, wanted: int) -> bool:
        """Returns True if the rest of ``block`` beyond ``wanted`` bytes is split off."""
        rest = block.bytes - wanted
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= ROUNDING
        return wanted < self.settings.largest_split_bytes and rest > MOST_SMALL

    def _split(self, block: Block, wanted: int) -> None:
        rest = Block(block.address + wanted, block.bytes - wanted, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.bytes, block.after = wanted, rest
        if block.pool.last is block:
            block.pool.last = rest
        insort(block.pool.free, rest)

    def _merge(self, block: Block, neighbour: Block) -> None:
        """Makes ``neighbour`` a part of ``block``."""
        block.bytes += neighbour.bytes
        if neighbour is block.before:
            block.address, block.before = neighbour.address, neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        if block.pool.last is neighbour:
            block.pool.last = block


def _remove(blocks: list[Block], block: Block) -> None:
    blocks.pop(bisect_left(blocks, block))


Event = tuple[int, int]
"""A number that identifies an allocation, with its bytes; or with -1 where it is freed."""


def reserved_bytes(events: Iterable[Event], settings: AllocatorSettings | None = None) -> int:
    """Returns the bytes that the allocator has reserved after ``events``, from an empty device."""
    allocator, live = CachingAllocator(settings), dict[int, Block]()
    for number, size in events:
        if size < 0:
            allocator.free(live.pop(number))
        else:
            live[number] = allocator.allocate(size)
    return allocator.reserved_bytes
