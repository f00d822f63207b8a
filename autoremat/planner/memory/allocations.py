"""The allocations and frees of a step in sequence: from the live ranges of a plan, or from the halves of generated code.

CUDA's caching allocator places them in blocks, by the rules of torch's ``c10/cuda/CUDACachingAllocator.cpp``:

- Sizes are rounded up to 512 bytes.
- Blocks of at most 1 MiB come from the small pool, others from the large pool.
- A *segment* is memory taken from the driver. It has 2 MiB in the small pool and 20 MiB for blocks below 10 MiB. For larger
  blocks it has their size rounded up to 2 MiB.
- A request takes the smallest free block of its pool that is large enough, at the lowest address. The rest is split off: from
  512 bytes on in the small pool, if more than 1 MiB in the large pool. A rest that stays counts as allocated.
- A freed block merges with its free neighbours in the segment.
- *Expandable segments* have no such rests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from autoremat.planner.memory.simulator import Timeline, held_sizes

FREED = -1

Event = tuple[int, int]
"""A number that identifies an allocation, with its bytes; or with ``FREED`` where it is freed."""


@dataclass(frozen=True)
class Allocations:
    """The allocations of a step. Those that it does not free are live until its end."""

    events: tuple[Event, ...]
    pooled: frozenset[int] = frozenset()
    """The numbers of the allocations in the pool of CUDA graphs."""
    border: int = field(default=0, kw_only=True)
    """Number of events before the backward begins; 0 for a half."""

    def beside(self, sizes: Sequence[int]) -> Allocations:
        """Returns the allocations with others of these bytes, which are live through the whole step."""
        first = 1 + max((number for number, _ in self.events), default=0)
        others = list(enumerate((size for size in sizes if size), first))
        return replace(self, events=(*others, *self.events), border=self.border + len(others) if self.border else 0)


@dataclass(frozen=True)
class HalfAllocations(Allocations):
    """The allocations of the generated code of one half."""

    arguments: tuple[tuple[str, int], ...] = ()
    """Names and numbers of the tensors that the half receives. The events begin with their allocation."""
    results: tuple[tuple[str, int], ...] = ()
    """Names and numbers of the tensors that are live at the end because the half returns them."""

    def with_names(self, names: Mapping[str, str]) -> HalfAllocations:
        """Returns the allocations with other names of results."""
        return replace(self, results=tuple((names.get(name, name), number) for name, number in self.results))


def joined(forward: HalfAllocations, backward: HalfAllocations) -> Allocations:
    """Returns the allocations of both halves as one step.

    An argument of the backward is the forward's result of the same name. Names of one tensor can differ, so a result of the
    same bytes in the same memory comes next. Other arguments, such as tangents, are allocated where the backward begins.
    """
    same = _matched(forward, backward)
    shift = 1 + max((number for number, _ in forward.events), default=0)
    numbers = {number: same.get(number, number + shift) for number, _ in backward.events}
    settled = {number for _, number in forward.results}.union(number for number, size in forward.events if size == FREED)
    dropped = [(number, FREED) for number, _ in forward.events if number not in settled]
    received = {number for _, number in backward.arguments if number in same}
    allocated: set[int] = set()
    events = [*forward.events, *dropped]
    border = len(events)
    for number, size in backward.events:
        if size != FREED and number in received and number not in allocated:
            allocated.add(number)
        else:
            events.append((numbers[number], size))
    pooled = forward.pooled | {numbers[number] for number in backward.pooled if number in numbers}  # others have no bytes
    return Allocations(tuple(events), pooled, border=border)


def _matched(forward: HalfAllocations, backward: HalfAllocations) -> dict[int, int]:
    """Returns the number in the forward of each argument of the backward that the forward has returned."""
    kinds, wanted = _kinds(forward), _kinds(backward)
    by_name = {name: number for name, number in forward.results if name}
    found: dict[int, int] = {}
    for name, number in backward.arguments:
        own = by_name.get(name)
        if own is not None and own not in found.values() and kinds[own] == wanted[number]:
            found[number] = own
    left = dict.fromkeys(number for _, number in forward.results if number not in found.values())
    for name, number in backward.arguments:
        own = next((one for one in left if kinds[one] == wanted[number]), None)
        if number not in found and own is not None and not name.startswith("tangents"):
            found[number] = own
            del left[own]
    return found


def _kinds(half: HalfAllocations) -> dict[int, tuple[int, bool]]:
    """Returns the bytes of each allocation, and True if it lies in the pool."""
    return {number: (size, number in half.pooled) for number, size in half.events if size != FREED}


def beside_sizes(timeline: Timeline) -> list[int]:
    """Returns the bytes of the allocations that are live beside a call: those of other open calls, and the resident ones."""
    calls = timeline.graph.calls
    return [*(calls.others * held_sizes(timeline.graph, timeline.schedule)), calls.resident_bytes]


ROUNDING = 512
"""Bytes of which every block is a multiple."""
MIB = 2**20
MOST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT, SEGMENT_ROUNDING = 2 * MIB, 20 * MIB, 2 * MIB
LEAST_OWN_SEGMENT = 10 * MIB
"""Requests from this size on get a segment of their own size."""

STEPS = 2
"""Steps that are replayed. The second one finds the segments of the first, cut into other pieces."""


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    address: int
    bytes: int
    is_small: bool
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None

    def __lt__(self, other: Block) -> bool:
        return (self.bytes, self.address) < (other.bytes, other.address)


class CachingAllocator:
    """The allocator's state. The driver's memory is unlimited."""

    def __init__(self, is_expandable: bool = False) -> None:
        self.is_expandable = is_expandable
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self._end = 0
        """Address behind all segments."""
        self._free: dict[bool, list[Block]] = {False: [], True: []}
        """The free blocks of the large and the small pool, by size and address."""

    def allocate(self, size: int) -> Block:
        """Returns a block of at least ``size`` bytes."""
        wanted = max(ROUNDING, -(-size // ROUNDING) * ROUNDING)
        is_small = wanted <= MOST_SMALL
        free = self._free[is_small]
        at = bisect_left(free, Block(-1, wanted, is_small))
        block = free.pop(at) if at < len(free) else self._segment(wanted, is_small)
        rest = block.bytes - wanted
        if rest >= ROUNDING if is_small or self.is_expandable else rest > MOST_SMALL:
            other = Block(block.address + wanted, rest, is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.bytes, block.after = wanted, other
            insort(free, other)
        block.is_free = False
        self.allocated_bytes += block.bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Returns ``block`` to its pool."""
        self.allocated_bytes -= block.bytes
        block.is_free = True
        free = self._free[block.is_small]
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                free.pop(bisect_left(free, neighbour))
                block.bytes += neighbour.bytes
        if block.before is not None and block.before.is_free:
            block.address, block.before = block.before.address, block.before.before
            if block.before is not None:
                block.before.after = block
        if block.after is not None and block.after.is_free:
            block.after = block.after.after
            if block.after is not None:
                block.after.before = block
        insort(free, block)

    def _segment(self, wanted: int, is_small: bool) -> Block:
        size = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        if wanted >= LEAST_OWN_SEGMENT:
            size = -(-wanted // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        self._end += size
        return Block(self._end - size, size, is_small)


def unsplit_bytes(allocations: Allocations, is_expandable: bool) -> int:
    """Returns the bytes of blocks at the peak behind the border, beside the allocations in them, by a replay from an empty
    device.

    The pool of CUDA graphs has segments of its own.
    """
    found, early = 0, replace(allocations, events=allocations.events[: allocations.border])
    for before, events in zip(_split(early), _split(allocations), strict=True):
        border, sizes = len(before), {number: size for number, size in events if size != FREED}
        live = list(accumulate((-sizes[number] if size == FREED else size for number, size in events), initial=0))
        found += peak_block_bytes(events, is_expandable, border) - max(live[border:])
    return found


def _split(allocations: Allocations) -> tuple[Sequence[Event], Sequence[Event]]:
    """Returns the events in the pool of CUDA graphs, and those outside of it."""
    pooled, events = allocations.pooled, allocations.events
    return [event for event in events if event[0] in pooled], [event for event in events if event[0] not in pooled]


def peak_block_bytes(events: Sequence[Event], is_expandable: bool, border: int = 0) -> int:
    """Returns the most bytes of blocks from event ``border`` on, in consecutive steps that free all their memory at the end."""
    allocator, peak = CachingAllocator(is_expandable), 0
    for _ in range(STEPS):
        live: dict[int, Block] = {}
        for half in (events[:border], events[border:]):
            allocator.peak_allocated_bytes = allocator.allocated_bytes
            for number, size in half:
                if size == FREED:
                    allocator.free(live.pop(number))
                else:
                    live[number] = allocator.allocate(size)
        peak = max(peak, allocator.peak_allocated_bytes)
        for block in live.values():
            allocator.free(block)
    return peak
