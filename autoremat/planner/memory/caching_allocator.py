"""Replays allocations by the rules of CUDA's caching allocator, which reserves more memory than is allocated.

The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp``; torch's "CUDA semantics" notes describe its settings.

- Sizes are rounded up to 512 bytes, or to a division of the next power of 2 (``roundup_power2_divisions``).
- Blocks of at most 1 MiB come from the small pool, others from the large pool.
- A *segment* is memory taken from the driver. It has 2 MiB in the small pool and 20 MiB for blocks below 10 MiB. For larger
  blocks it has their size rounded up to 2 MiB. Segments stay reserved after their blocks are freed.
- A request takes the smallest free block of its pool and stream that is large enough, at the lowest address. The rest is split
  off: from 512 bytes on in the small pool, if more than 1 MiB in the large pool.
- A freed block merges with its free neighbours in the segment.
- With *expandable segments*, each pool and stream has one segment that grows by pages of 2 MiB or 20 MiB. Every rest from 512
  bytes on is split off.
- With a *largest split size*, larger blocks are never split. They serve only requests from that size on, and leave at most
  20 MiB of rest.
- If the driver has no more memory, free memory goes back to it: one oversize block, then all free segments and free pages.

The driver's memory is unlimited unless a limit is given. The limit then acts as ``torch.cuda.set_per_process_memory_fraction``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from autoremat.planner.memory.allocator_settings import MIB, AllocatorSettings

ROUNDING = 512
"""Bytes of which every block is a multiple."""
MOST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LEAST_OWN_SEGMENT = 10 * MIB
"""Requests from this size on get a segment of their own size."""
SEGMENT_ROUNDING = 2 * MIB

ADDRESSES = 2**60
"""Number of addresses in the range of a pool, and so in an expandable segment."""


class OutOfMemory(Exception):
    """The driver's memory does not suffice, although all that is free went back to it."""


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    address: int
    bytes: int
    pool: _Pool
    is_free: bool = True
    is_mapped: bool = True
    """False for a range of addresses in an expandable segment that has no memory."""
    before: Block | None = None
    after: Block | None = None

    def __lt__(self, other: Block) -> bool:
        return (self.bytes, self.address) < (other.bytes, other.address)

    @property
    def is_available(self) -> bool:
        """True for free memory."""
        return self.is_free and self.is_mapped

    @property
    def is_segment(self) -> bool:
        """True for a block that is a whole segment, which alone can go back to the driver."""
        return self.before is None and self.after is None

    @property
    def bytes_with_growth(self) -> int:
        """Bytes of the block, with the addresses behind it into which it can grow."""
        return self.bytes + (0 if self.after is None or self.after.is_mapped else self.after.bytes)


@dataclass(eq=False)
class _Pool:
    """The free blocks of one size class on one stream, by size and address."""

    is_small: bool
    end: int
    """Address behind the pool's segments. Each pool has a range of addresses of its own, in which its segments follow."""
    free: list[Block] = field(default_factory=list)
    unmapped: list[Block] = field(default_factory=list)
    """Ranges of the expandable segment without memory, by address. The last one is never used up."""


def rounded(size: int, settings: AllocatorSettings) -> int:
    """Returns the bytes that the allocator looks for if ``size`` bytes are requested."""
    divisions = settings.divisions(size)
    if divisions > 1 and size > ROUNDING * divisions:
        step = (1 << (size.bit_length() - 1)) // divisions
        return -(-size // step) * step
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


class CachingAllocator:
    """The allocator's state. ``limit_bytes`` is the driver's memory."""

    def __init__(self, settings: AllocatorSettings | None = None, limit_bytes: float = math.inf) -> None:
        self.settings, self.limit_bytes = settings or AllocatorSettings(), limit_bytes
        self.allocated_bytes = self.peak_allocated_bytes = self.reserved_bytes = self.peak_reserved_bytes = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Returns a block of at least ``size`` bytes. Raises ``OutOfMemory`` if the driver has none."""
        wanted = rounded(size, self.settings)
        small = wanted <= MOST_SMALL
        pool = self._pools.setdefault((small, stream), _Pool(small, len(self._pools) * ADDRESSES))
        block = self._take(pool, wanted) or self._new(pool, wanted) or self._after_release(pool, wanted)
        if self._splits(block, wanted):
            insort(pool.free, _cut(block, wanted))
        block.is_free = False
        self.allocated_bytes += block.bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Returns ``block`` to its pool."""
        self.allocated_bytes -= block.bytes
        block.is_free = True
        self._add_free(block)

    def _add_free(self, block: Block) -> None:
        """Adds ``block``, with its free neighbours, to the free blocks of its pool."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_available:
                _remove(block.pool.free, neighbour)
                _merge(block, neighbour)
        insort(block.pool.free, block)

    def _take(self, pool: _Pool, wanted: int) -> Block | None:
        """Removes the best free block for ``wanted`` bytes from ``pool`` and returns it; None if there is none."""
        at = bisect_left(pool.free, Block(-1, wanted, pool))
        if at == len(pool.free):
            return None
        # The end of the mapped part of an expandable segment is kept for growth, if another block fits.
        while at + 1 < len(pool.free) and pool.free[at + 1].bytes_with_growth < pool.free[at].bytes_with_growth:
            at += 1
        block, limit = pool.free[at], self.settings.largest_split_bytes
        rest = block.bytes - wanted
        if wanted < limit <= block.bytes or (wanted >= limit and rest >= self.settings.largest_rest_bytes):
            return None
        return pool.free.pop(at)

    def _new(self, pool: _Pool, wanted: int) -> Block | None:
        """Returns a block of new memory; None if the driver has none."""
        if self.settings.expandable_segments:
            return self._grown(pool, wanted)
        if wanted < LEAST_OWN_SEGMENT:
            size = SMALL_SEGMENT if pool.is_small else self.settings.large_segment_bytes
        else:
            size = -(-wanted // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        if not self._reserve(size):
            return None
        pool.end += size
        return Block(pool.end - size, size, pool)

    def _reserve(self, size: int) -> bool:
        """Returns True if the driver has ``size`` bytes, which are reserved then."""
        if self.reserved_bytes + size > self.limit_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _grown(self, pool: _Pool, wanted: int) -> Block | None:
        """Returns a block of the expandable segment after mapping memory at the lowest addresses that are wide enough.

        Free memory before, between and behind these addresses is part of the block.
        """
        if not pool.unmapped:
            pool.unmapped.append(Block(pool.end, ADDRESSES, pool, is_mapped=False))
        begins = (b.before if b.before is not None and b.before.is_available else b for b in pool.unmapped)
        block = next(begin for begin in begins if _room(begin, wanted) >= wanted)
        while not block.is_mapped or block.bytes < wanted:
            hole = block.after if block.is_mapped else block
            assert hole is not None
            mapped = self._mapped(hole, wanted - (block.bytes if block.is_mapped else 0))
            if mapped is None:
                return None
            block = mapped
        _remove(pool.free, block)
        return block

    def _mapped(self, hole: Block, size: int) -> Block | None:
        """Returns the free block that contains the first ``size`` bytes of ``hole`` (at most all), now with memory.

        Returns None if the driver has none. Memory is mapped in whole pages.
        """
        pool = hole.pool
        page = self._page_bytes(pool)
        size = min(-(-size // page) * page, hole.bytes)
        if not self._reserve(size):
            return None
        pool.unmapped.remove(hole)
        rest = _cut(hole, size) if size < hole.bytes else None
        hole.is_mapped = True
        if rest is not None:
            self._add_unmapped(rest)
        self._add_free(hole)
        return hole

    def _add_unmapped(self, block: Block) -> None:
        """Adds ``block``, with its neighbours without memory, to the addresses without memory."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.is_mapped:
                block.pool.unmapped.remove(neighbour)
                _merge(block, neighbour)
        insort(block.pool.unmapped, block, key=lambda one: one.address)

    def _page_bytes(self, pool: _Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self.settings.large_segment_bytes

    def _after_release(self, pool: _Pool, wanted: int) -> Block:
        """Returns a block of new memory after free memory has gone back to the driver.

        First go as many oversize blocks of the pool as the request needs, then all free segments and pages.
        """
        block = self._new(pool, wanted) if self._release_oversize(pool, wanted) else None
        if block is None:
            self.empty_cache()
            block = self._new(pool, wanted)
        if block is None:
            raise OutOfMemory(f"{wanted} bytes, with {self.reserved_bytes} reserved of {self.limit_bytes}")
        return block

    def _release_oversize(self, pool: _Pool, wanted: int) -> bool:
        """Returns oversize blocks of together ``wanted`` bytes to the driver; False if there are none, or too few."""
        least = self.settings.largest_split_bytes
        if math.isinf(least):
            return False
        needed, released = max(wanted, int(least)), 0
        oversize = [block for block in pool.free[bisect_left(pool.free, Block(-1, int(least), pool)) :] if block.is_segment]
        enough = next((block for block in oversize if block.bytes >= needed), None)
        for block in reversed(oversize) if enough is None else (enough,):
            if released < needed:
                released += self._release(block)
        return released >= needed

    def empty_cache(self) -> None:
        """Returns all free segments to the driver, and all whole pages in free blocks of expandable segments."""
        for pool in self._pools.values():
            for block in list(pool.free):
                if self.settings.expandable_segments:
                    self._release_pages(block)
                elif block.is_segment:
                    self._release(block)

    def _release(self, block: Block) -> int:
        """Returns a segment to the driver, and its bytes to the caller."""
        _remove(block.pool.free, block)
        self.reserved_bytes -= block.bytes
        return block.bytes

    def _release_pages(self, block: Block) -> None:
        """Returns the whole pages in a free block to the driver."""
        pool, page = block.pool, self._page_bytes(block.pool)
        before = (pool.end - block.address) % page
        pages = (block.bytes - before) // page * page
        if pages <= 0:
            return
        _remove(pool.free, block)
        middle = _cut(block, before) if before else block
        if before:
            insort(pool.free, block)
        if pages < middle.bytes:
            insort(pool.free, _cut(middle, pages))
        middle.is_mapped = False
        self.reserved_bytes -= pages
        self._add_unmapped(middle)

    def _splits(self, block: Block, wanted: int) -> bool:
        """Returns True if the rest of ``block`` beyond ``wanted`` bytes is split off."""
        rest = block.bytes - wanted
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= ROUNDING
        return wanted < self.settings.largest_split_bytes and rest > MOST_SMALL


def _room(begin: Block, wanted: int) -> int:
    """Returns the bytes from ``begin`` on that are free or without memory, as far as ``wanted`` bytes need them."""
    room, block = begin.bytes, begin.after
    while room < wanted and block is not None and block.is_free:
        room, block = room + block.bytes, block.after
    return room


def _cut(block: Block, size: int) -> Block:
    """Shortens ``block`` to ``size`` bytes and returns the rest, as a block behind it."""
    rest = Block(block.address + size, block.bytes - size, block.pool, block.is_free, block.is_mapped, block, block.after)
    if block.after is not None:
        block.after.before = rest
    block.bytes, block.after = size, rest
    return rest


def _merge(block: Block, neighbour: Block) -> None:
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


def _remove(blocks: list[Block], block: Block) -> None:
    blocks.pop(bisect_left(blocks, block))
