"""The replay of CUDA's caching allocator, against cases that follow from its rules, and against rules that always hold."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.basics.errors import OptionsError
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.allocations import FREED, Allocations, HalfAllocations, joined, simulated
from autoremat.planner.memory.allocator_settings import CLASSES, LARGE_SEGMENT, MIB, AllocatorSettings, allocator_settings
from autoremat.planner.memory.caching_allocator import ROUNDING, SMALL_SEGMENT, CachingAllocator, OutOfMemory, rounded
from autoremat.planner.memory.reserved import reserved_for
from autoremat.planner.memory.simulator import simulate

EXPANDABLE = AllocatorSettings(expandable_segments=True)
SPLIT_BELOW_32 = AllocatorSettings(largest_split_bytes=32 * MIB)


def reserved_bytes(events, settings=None):
    """Returns the bytes reserved after ``events``, each a number and a size or ``FREED``."""
    allocator, live = CachingAllocator(settings), {}
    for number, size in events:
        if size == FREED:
            allocator.free(live.pop(number))
        else:
            live[number] = allocator.allocate(size)
    return allocator.reserved_bytes


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
    allocator = CachingAllocator(SPLIT_BELOW_32)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(12 * MIB)
    assert allocator.reserved_bytes == 76 * MIB, "a small request does not take an oversize block"
    allocator.allocate(44 * MIB)
    assert allocator.reserved_bytes == 76 * MIB + 44 * MIB, "20 MiB would be lost"
    assert allocator.allocate(46 * MIB).bytes == 64 * MIB


def test_the_largest_rest_of_an_oversize_block_can_be_set():
    allocator = CachingAllocator(replace(SPLIT_BELOW_32, largest_rest_bytes=30 * MIB))
    allocator.free(allocator.allocate(64 * MIB))
    assert allocator.allocate(44 * MIB).bytes == 64 * MIB


@pytest.mark.parametrize(
    ("size", "divisions", "expected"),
    [
        (1200, 4, 1536),  # below 4 times 512 bytes, the rounding to 512 alone
        (5000, 4, 5120),
        (1200 * 1024, 4, 1280 * 1024),
        (1280 * 1024 + 1, 4, 1536 * 1024),
        (2 * MIB, 4, 2 * MIB),
        (33 * MIB, 1, 33 * MIB),
        (33 * MIB, 2, 48 * MIB),
        (33 * MIB, 16, 34 * MIB),
    ],
)
def test_sizes_are_rounded_up_to_divisions_of_a_power_of_2(size, divisions, expected):
    assert rounded(size, AllocatorSettings(roundup_divisions=(divisions,) * CLASSES)) == expected


def test_divisions_depend_on_the_size():
    settings = allocator_settings("roundup_power2_divisions:[2:4,8:2,>:1]")
    assert settings.roundup_divisions == (4, 4, 0, 1, *(1,) * 12)
    assert [settings.divisions(size) for size in (1000, 3 * MIB, 5 * MIB, 9 * MIB, 10**13)] == [4, 4, 0, 1, 1]


def test_the_size_of_large_segments_can_be_set():
    settings = AllocatorSettings(large_segment_bytes=32 * MIB)
    assert reserved_bytes([(0, 9 * MIB)], settings) == 32 * MIB
    assert reserved_bytes([(0, 9 * MIB)], replace(settings, expandable_segments=True)) == 32 * MIB


def test_free_segments_go_back_before_the_driver_has_no_more_memory():
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(66 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (66 * MIB, 66 * MIB)


def test_a_segment_of_which_a_part_is_used_does_not_go_back():
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(12 * MIB)  # a part of the segment
    with pytest.raises(OutOfMemory):
        allocator.allocate(66 * MIB)


def test_only_pages_without_blocks_go_back_from_an_expandable_segment():
    allocator = CachingAllocator(EXPANDABLE, limit_bytes=140 * MIB)
    first, middle, _ = (allocator.allocate(size) for size in (30 * MIB, 50 * MIB, 10 * MIB))
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(middle)  # from 30 MiB to 80 MiB: the two pages from 40 MiB on go back
    behind = allocator.allocate(54 * MIB)  # in the 10 MiB that are free at the end, and three more pages
    assert behind.address == first.address + 90 * MIB
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (120 * MIB, 120 * MIB)
    between = allocator.allocate(18 * MIB)  # in the 10 MiB before the pages, and one of them again
    assert between.address == first.address + 30 * MIB
    assert allocator.reserved_bytes == 140 * MIB


def test_oversize_blocks_go_back_first_and_no_more_than_needed():
    allocator = CachingAllocator(SPLIT_BELOW_32, limit_bytes=200 * MIB)
    for block in [allocator.allocate(size * MIB) for size in (40, 60, 80)]:
        allocator.free(block)
    allocator.allocate(30 * MIB)  # from the driver, after the block of 40 MiB went back
    assert allocator.reserved_bytes == (60 + 80 + 30) * MIB
    allocator.allocate(130 * MIB)  # both others
    assert allocator.reserved_bytes == (30 + 130) * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", EXPANDABLE),
        (" max_split_size_mb : 32 , expandable_segments:False,", SPLIT_BELOW_32),
        ("pinned_use_background_threads:True,large_segment_size_mb:40", AllocatorSettings(large_segment_bytes=40 * MIB)),
        ("max_non_split_rounding_mb:30", AllocatorSettings(largest_rest_bytes=30 * MIB)),
        ("roundup_power2_divisions:8", AllocatorSettings(roundup_divisions=(8,) * CLASSES)),
        ("backend:native,garbage_collection_threshold:0.8", AllocatorSettings(ignored=("garbage_collection_threshold:0.8",))),
        ("backend:cudaMallocAsync", AllocatorSettings(ignored=("backend:cudaMallocAsync",))),
    ],
)
def test_settings_are_read_from_the_text_of_the_variable(text, expected):
    assert allocator_settings(text) == expected


@pytest.mark.parametrize(
    "text",
    ["expandable_segments", "expandable_segments:1", "max_split_size_mb:much", "roundup_power2_divisions:3",
     "roundup_power2_divisions:[4]", "roundup_power2_divisions:[4:2", "max_split_size_mb:19", "max_non_split_rounding_mb:4"],
)  # fmt: skip
def test_text_of_another_form_is_refused(text):
    with pytest.raises(OptionsError, match="Accepted"):
        allocator_settings(text)


sizes = st.integers(1, 40 * MIB) | st.integers(1, 4096)
requests = st.lists(st.tuples(sizes, st.integers(0, 30)), max_size=40)
every_setting = pytest.mark.parametrize(
    "settings",
    [
        AllocatorSettings(),
        EXPANDABLE,
        AllocatorSettings(largest_split_bytes=24 * MIB),
        AllocatorSettings(largest_split_bytes=24 * MIB, large_segment_bytes=64 * MIB),
        AllocatorSettings(roundup_divisions=(4,) * CLASSES),
    ],
    ids=["default", "expandable", "split", "split below segments", "roundup"],
)


def run(drawn, settings, limit_bytes=math.inf):
    """Yields the allocator and its live blocks after each request.

    Each pair is a request and the number of a live block that is freed before it, if there is such a block.
    """
    allocator, live = CachingAllocator(settings, limit_bytes), []
    for size, freed in drawn:
        if freed < len(live):
            allocator.free(live.pop(freed))
        live.append(allocator.allocate(size))
        assert live[-1].bytes >= size
        yield allocator, live
    for block in live:
        allocator.free(block)
    yield allocator, []


def check(allocator, live):
    """Live and free blocks cover the segments without overlap."""
    spans = sorted((block.address, block.address + block.bytes) for block in live)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    free = [block for pool in allocator._pools.values() for block in pool.free]
    assert sum(block.bytes for block in (*live, *free)) == allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert allocator.allocated_bytes == sum(block.bytes for block in live)
    assert all(block.bytes % ROUNDING == 0 and block.is_available for block in free)
    assert all(sorted(pool.free) == pool.free for pool in allocator._pools.values())


@every_setting
@given(drawn=requests)
def test_live_blocks_never_overlap_and_the_segments_are_covered(settings, drawn):
    for allocator, live in run(drawn, settings):
        check(allocator, live)
    assert allocator.allocated_bytes == 0
    free = [block for pool in allocator._pools.values() for block in pool.free]
    assert all(block.before is None for block in free), "whole segments"
    assert all(block.after is None or not block.after.is_mapped for block in free)
    if settings is EXPANDABLE:
        assert len(free) == len(allocator._pools)


@every_setting
@given(drawn=requests, share=st.floats(0.3, 1.0))
def test_a_limit_is_kept_to_by_giving_free_memory_back(settings, drawn, share):
    *_, (unlimited, _) = run(drawn, settings) if drawn else [(CachingAllocator(settings), [])]
    limit = int(share * unlimited.peak_reserved_bytes)
    try:
        for allocator, live in run(drawn, settings, limit):
            check(allocator, live)
            assert allocator.peak_reserved_bytes <= limit
    except OutOfMemory:
        assert limit < unlimited.peak_reserved_bytes


def step_of(drawn):
    """Returns requests as the allocations of a step."""
    events, live = [], []
    for number, (size, freed) in enumerate(drawn):
        if freed < len(live):
            events.append((live.pop(freed), FREED))
        live.append(number)
        events.append((number, size))
    return Allocations(tuple(events))


@every_setting
@given(drawn=requests)
def test_reserved_bytes_lie_between_the_allocated_ones_and_all_that_is_requested(settings, drawn):
    step = step_of(drawn)
    found = reserved_for(step, settings)
    assert found == reserved_for(step, settings), "deterministic"
    assert found.allocated_bytes <= found.least_bytes <= found.bytes
    segment = settings.large_segment_bytes
    assert found.bytes <= sum(SMALL_SEGMENT if size <= MIB else 2 * size + segment for size, _ in drawn) * 2
    known = {AllocatorSettings(): found.default_bytes, EXPANDABLE: found.expandable_bytes}
    assert found.bytes == known.get(settings, found.bytes)


@given(drawn=requests)
def test_one_block_after_the_other_needs_no_more_pages_than_segments(drawn):
    """Without holes, expandable segments waste at most a page for each pool."""
    step = Allocations(tuple((number, size) for number, (size, _) in enumerate(drawn)))
    found = reserved_for(step, AllocatorSettings())
    assert found.expandable_bytes <= found.default_bytes + SMALL_SEGMENT + LARGE_SEGMENT


def test_a_step_reserves_what_its_allocations_need():
    """Three values of 30 MiB, of which two are live at once: the last takes the place of the first, and a workspace joins."""
    graph = Graph.from_dag(seconds=[1, 1, 1], sizes=[30 * MIB] * 3, edges=[(0, 1), (1, 2)])
    graph = replace(graph, ops=(*graph.ops[:2], replace(graph.ops[2], workspace_bytes=4 * MIB)))
    timeline = simulate(graph, Schedule((0, 1, 2), ()))
    assert timeline.peak_bytes == 64 * MIB
    found = reserved_for(simulated(timeline), EXPANDABLE)
    assert (found.default_bytes, found.expandable_bytes, found.bytes, found.allocated_bytes) == (
        80 * MIB, 80 * MIB, 80 * MIB, 64 * MIB,
    )  # fmt: skip


def test_free_segments_that_go_back_let_a_step_run_in_less():
    """The second request needs another segment, while the first one's is free."""
    found = reserved_for(Allocations(((0, 64 * MIB), (0, FREED), (1, 66 * MIB), (1, FREED))), AllocatorSettings())
    assert (found.bytes, found.least_bytes, found.expandable_bytes) == (130 * MIB, 66 * MIB, 80 * MIB)
    assert found.fragmentation == pytest.approx(1 - 66 / 130)


def test_the_pool_of_cuda_graphs_has_segments_of_its_own():
    """Two blocks of 9 MiB share a segment in one place, and need two in two places."""
    events = ((0, 9 * MIB), (1, 9 * MIB))
    assert reserved_for(Allocations(events), AllocatorSettings()).bytes == 20 * MIB
    apart = reserved_for(Allocations(events, frozenset({1})), AllocatorSettings())
    assert (apart.bytes, apart.pool_bytes, apart.allocated_bytes) == (40 * MIB, 20 * MIB, 18 * MIB)


def test_the_halves_of_code_are_joined_by_the_names_of_saved_tensors():
    forward = HalfAllocations(((0, 100), (1, 200), (2, 100), (0, FREED), (3, 50)), results=(("loss", 3), ("mul", 2)))
    backward = HalfAllocations(((0, 100), (1, 50), (2, 70), (0, FREED), (2, FREED)), arguments=(("mul", 0), ("tangents_1", 1)))
    shift = 4
    assert joined(forward, backward).events == (
        *forward.events, (1, FREED),  # a local variable of the forward
        (1 + shift, 50), (2 + shift, 70), (2, FREED), (2 + shift, FREED),
    )  # fmt: skip


def test_a_saved_tensor_of_another_name_is_found_by_its_bytes():
    forward = HalfAllocations(((0, 100), (1, 200)), frozenset({1}), results=(("a", 0), ("b", 1)))
    backward = HalfAllocations(((0, 200), (1, 100)), frozenset({0}), (("renamed", 0), ("other", 1)))
    assert joined(forward, backward) == Allocations(forward.events, frozenset({1}), border=2)
