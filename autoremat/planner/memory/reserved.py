"""Predicts the bytes that CUDA's caching allocator reserves for a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autoremat.planner.graph.graph import Role
from autoremat.planner.memory.caching_allocator import AllocatorSettings, Event, reserved_bytes
from autoremat.planner.memory.simulator import Timeline

STEPS = 2
"""Steps that are replayed. The second one finds the segments of the first, cut into other pieces."""


@dataclass(frozen=True)
class Reserved:
    """Bytes that the allocator reserves for a step, beyond those of parameters and of other memory that exists anyway."""

    default_bytes: int
    expandable_bytes: int
    """The same with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""


def reserved_for(timeline: Timeline) -> Reserved:
    """Returns the bytes reserved for ``timeline``, by a replay from an empty device."""
    settings = (AllocatorSettings(), AllocatorSettings(expandable_segments=True))
    return Reserved(*(reserved_bytes(_steps(timeline), one) for one in settings))


def _steps(timeline: Timeline) -> Iterator[Event]:
    """Yields the allocations of consecutive steps. Each step frees all its memory at the end."""
    step = list(_events(timeline))
    for _ in range(STEPS):
        yield from step


def _events(timeline: Timeline) -> Iterator[Event]:
    """Yields the allocations and frees of one step, in sequence."""
    graph, ranges, length = timeline.graph, list(timeline.live_ranges), len(timeline.schedule.sequence)
    begins, ends = defaultdict[int, list[Event]](list), defaultdict[int, list[Event]](list)
    for number, one in enumerate(ranges):
        if size := graph.values[one.value].bytes:
            begins[one.start].append((number, size))
            ends[one.end].append((number, -1))
    tangents = [value.bytes for value in graph.values if value.role is Role.TANGENT and value.bytes]
    for number, size in enumerate(tangents, len(ranges)):
        begins[len(timeline.schedule.forward)].append((number, size))
        ends[length - 1].append((number, -1))
    for position, op in enumerate(timeline.schedule.sequence):
        yield from begins[position]
        if workspace := graph.ops[op].workspace_bytes:
            yield -1, workspace
            yield -1, -1
        yield from ends[position]
