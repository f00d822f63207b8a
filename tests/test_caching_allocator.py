"""The replay of CUDA's caching allocator, against cases that follow from its rules, and against rules that always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.caching_allocator import (
    LARGE_SEGMENT,
    MIB,
    ROUNDING,
    SMALL_SEGMENT,
    AllocatorSettings,
    CachingAllocator,
    reserved_bytes,
)
from autoremat.planner.memory.reserved import Reserved, reserved_for
from autoremat.planner.memory.simulator import simulate

EXPANDABLE = AllocatorSettings(expandable_segments=True)


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is not more than 1 MiB, so it is not split off
        (31 * MIB, 32 * MIB, 32 * MIB),
    ],
)
def test_a_first_request_reserves_a_segment(size, allocated, reserved):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_small_blocks_share_a_segment_of_2_mib():
    assert reserved_bytes((number, 256 * 1024) for number in range(8)) == SMALL_SEGMENT
    assert reserved_bytes((number, 256 * 1024) for number in range(9)) == 2 * SMALL_SEGMENT


def test_the_rest_of_a_large_segment_serves_the_next_request_of_the_large_pool_alone():
    allocator = CachingAllocator()
    for size in (9 * MIB, 9 * MIB):
        allocator.allocate(size)
    assert allocator.reserved_bytes == LARGE_SEGMENT
    allocator.allocate(MIB)  # of the small pool, although 2 MiB are free in the large one
    assert allocator.reserved_bytes == LARGE_SEGMENT + SMALL_SEGMENT


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (40 * MIB, 20 * MIB, 30 * MIB)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(25 * MIB).address == blocks[2].address


def test_freed_neighbours_merge_and_blocks_of_two_segments_do_not():
    allocator = CachingAllocator()
    halves = [allocator.allocate(9 * MIB), allocator.allocate(9 * MIB)]
    for block in halves:
        allocator.free(block)
    allocator.allocate(20 * MIB - 512)
    assert allocator.reserved_bytes == LARGE_SEGMENT
    apart = CachingAllocator()
    for block in [apart.allocate(10 * MIB), apart.allocate(10 * MIB)]:
        apart.free(block)
    apart.allocate(20 * MIB)
    assert apart.reserved_bytes == 40 * MIB


def test_freed_segments_stay_reserved():
    assert reserved_bytes([(0, 64 * MIB), (0, -1), (1, 66 * MIB)]) == 130 * MIB


def test_an_expandable_segment_grows_instead():
    assert reserved_bytes([(0, 64 * MIB), (0, -1), (1, 66 * MIB)], EXPANDABLE) == 80 * MIB
    assert reserved_bytes([(0, 10 * MIB)], EXPANDABLE) == 20 * MIB
    assert reserved_bytes([(0, 1000)], EXPANDABLE) == 2 * MIB


def test_the_end_of_an_expandable_segment_is_kept_for_growth_if_another_block_fits():
    allocator = CachingAllocator(EXPANDABLE)
    first, _, end = (allocator.allocate(size) for size in (30 * MIB, 5 * MIB, 5 * MIB))
    allocator.free(first)
    allocator.free(end)
    assert allocator.allocate(4 * MIB).address == first.address


def test_streams_share_no_blocks():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB, stream=0))
    allocator.allocate(12 * MIB, stream=1)
    assert allocator.reserved_bytes == 24 * MIB


def test_blocks_above_the_largest_split_size_are_not_split():
    settings = AllocatorSettings(largest_split_bytes=32 * MIB)
    allocator = CachingAllocator(settings)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(12 * MIB)
    assert allocator.reserved_bytes == 76 * MIB, "a small request does not take an oversize block"
    allocator.allocate(44 * MIB)
    assert allocator.reserved_bytes == 76 * MIB + 44 * MIB, "20 MiB would be lost"
    assert allocator.allocate(46 * MIB).bytes == 64 * MIB


events = st.lists(st.tuples(st.integers(1, 40 * MIB) | st.integers(1, 4096), st.integers(0, 30)), max_size=40)


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE, AllocatorSettings(largest_split_bytes=16 * MIB)])
@given(drawn=events)
def test_live_blocks_never_overlap_and_the_segments_are_covered(settings, drawn):
    """Each pair is a request and the number of a live block that is freed before it, if there is such a block."""
    allocator, live = CachingAllocator(settings), []
    for size, freed in drawn:
        if freed < len(live):
            allocator.free(live.pop(freed))
        live.append(allocator.allocate(size))
        assert live[-1].bytes >= size
        spans = sorted((block.address, block.address + block.bytes) for block in live)
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
        free = [block for pool in allocator._pools.values() for block in pool.free]
        assert sum(block.bytes for block in (*live, *free)) == allocator.reserved_bytes
        assert allocator.allocated_bytes == sum(block.bytes for block in live)
        assert all(block.bytes % ROUNDING == 0 and block.is_free for block in free)
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    if settings is EXPANDABLE:
        assert sum(len(pool.free) for pool in allocator._pools.values()) == len(allocator._pools)


def test_a_step_reserves_what_its_allocations_need():
    """Three values of 30 MiB, of which two are live at once: the last takes the place of the first, and a workspace joins."""
    graph = Graph.from_dag(seconds=[1, 1, 1], sizes=[30 * MIB] * 3, edges=[(0, 1), (1, 2)])
    graph = replace(graph, ops=(*graph.ops[:2], replace(graph.ops[2], workspace_bytes=4 * MIB)))
    timeline = simulate(graph, Schedule((0, 1, 2), ()))
    assert timeline.peak_bytes == 64 * MIB
    assert reserved_for(timeline) == Reserved(default_bytes=80 * MIB, expandable_bytes=80 * MIB)
