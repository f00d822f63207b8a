"""The allocations and frees of a step in sequence: from the live ranges of a plan, or from the halves of generated code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    kept, live = {number for _, number in forward.results}, _live(forward.events)
    dropped = [(number, FREED) for number in live if number not in kept]
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
    sizes, wanted = _sizes(forward), _sizes(backward)
    by_name = {name: number for name, number in forward.results if name}
    found: dict[int, int] = {}
    for name, number in backward.arguments:
        own = by_name.get(name)
        if own is not None and own not in found.values() and _like(forward, own, sizes) == _like(backward, number, wanted):
            found[number] = own
    left = dict.fromkeys(number for _, number in forward.results if number not in found.values())
    for name, number in backward.arguments:
        like = _like(backward, number, wanted)
        own = next((one for one in left if _like(forward, one, sizes) == like), None)
        if number not in found and own is not None and not name.startswith("tangents"):
            found[number] = own
            del left[own]
    return found


def _like(half: HalfAllocations, number: int, sizes: dict[int, int]) -> tuple[int, bool]:
    return sizes[number], number in half.pooled


def _sizes(half: HalfAllocations) -> dict[int, int]:
    return {number: size for number, size in half.events if size != FREED}


def _live(events: Sequence[Event]) -> list[int]:
    live: dict[int, None] = {}
    for number, size in events:
        if size == FREED:
            del live[number]
        else:
            live[number] = None
    return list(live)


def beside_sizes(timeline: Timeline) -> list[int]:
    """Returns the bytes of the allocations that are live beside a call: those of other open calls, and the resident ones."""
    others = timeline.graph.calls.in_flight - 1
    return [*(others * held_sizes(timeline.graph, timeline.schedule)), timeline.graph.calls.resident_bytes]
