"""The simulator against an independent replay, and the blocks of CUDA's caching allocator against its rules."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import GraphBuilder, chain

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.op import Kind
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.allocations import (
    FREED,
    MIB,
    ROUNDING,
    Allocations,
    CachingAllocator,
    HalfAllocations,
    joined,
    unsplit_bytes,
)
from autoremat.planner.memory.simulator import simulate


def test_reading_what_was_never_made_is_refused():
    with pytest.raises(PlanInvalid, match=r"execution 1 \(op2\) reads v2, which was never computed"):
        simulate(chain(3), Schedule((0, 2), ()))


def test_a_graph_that_fuses_may_have_no_backward():
    build = GraphBuilder()
    result = build.op([build.source(0)], 10, kind=Kind.POINTWISE)
    build.op([result], 0, kind=Kind.POINTWISE)
    assert simulate(build.graph(fuses=True), Schedule((0, 1), ())).peak_bytes == 0


@pytest.mark.parametrize(
    ("size", "allocated"),
    [
        (1, 512),
        (512, 512),
        (513, 1024),
        (MIB, MIB),
        (MIB + 1, MIB + 512),
        (10 * MIB - 512, 10 * MIB - 512),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),  # the rest of 1 MiB is not more than 1 MiB, so it is not split off
        (31 * MIB, 32 * MIB),
    ],
)
def test_a_block_has_the_request_and_a_rest_that_is_not_split_off(size, allocated):
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.allocated_bytes == allocated


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size) for size in (40 * MIB, 20 * MIB, 30 * MIB)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(25 * MIB).address == blocks[2].address


def test_freed_neighbours_merge_and_blocks_of_two_segments_do_not():
    for size, reused in ((9 * MIB, True), (10 * MIB, False)):
        allocator = CachingAllocator()
        blocks = [allocator.allocate(size), allocator.allocate(size)]
        for block in blocks:
            allocator.free(block)
        assert (allocator.allocate(18 * MIB).address == 0) == reused


sizes = st.integers(1, 40 * MIB) | st.integers(1, 4096)
requests = st.lists(st.tuples(sizes, st.integers(0, 30)), max_size=40)


@pytest.mark.parametrize("is_expandable", [False, True])
@given(drawn=requests)
def test_live_blocks_never_overlap_and_free_ones_merge(is_expandable, drawn):
    """Each pair is a request and the number of a live block that is freed before it, if there is such a block."""
    allocator, live = CachingAllocator(is_expandable), []
    for size, freed in drawn:
        if freed < len(live):
            allocator.free(live.pop(freed))
        live.append(allocator.allocate(size))
        assert live[-1].bytes >= size
        spans = sorted((block.address, block.address + block.bytes) for block in live)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        free = [block for blocks in allocator._free.values() for block in blocks]
        assert sum(block.bytes for block in (*live, *free)) == allocator._end
        assert allocator.allocated_bytes == sum(block.bytes for block in live)
        assert all(block.bytes % ROUNDING == 0 and block.is_free for block in free)
        assert all(sorted(blocks) == blocks for blocks in allocator._free.values())
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    assert all(block.before is block.after is None for blocks in allocator._free.values() for block in blocks)


@pytest.mark.parametrize(
    ("pooled", "is_expandable", "rest"),
    [(frozenset(), False, 1.5), (frozenset({0}), False, 1.5), (frozenset(), True, 0)],  # segments of 14 and 16 MiB
)
def test_the_rest_of_a_block_that_is_not_split_off_counts(pooled, is_expandable, rest):
    events = ((0, int(13.25 * MIB)), (1, int(15.25 * MIB)), (2, 512 * 1024), (1, FREED), (0, FREED), (2, FREED))
    assert unsplit_bytes(Allocations(events, pooled), is_expandable) == int(rest * MIB)


def test_rests_are_those_at_the_peak_of_the_backward():
    """The forward needs more without rests than the backward, whose blocks are larger in all."""
    forward = ((0, 16 * MIB), (1, 40 * MIB), (1, FREED))
    events = (*forward, (2, int(13.25 * MIB)), (3, 26 * MIB), (2, FREED), (3, FREED), (0, FREED))
    assert unsplit_bytes(Allocations(forward), False) == 0
    assert unsplit_bytes(Allocations(events, border=len(forward)), False) == int(0.75 * MIB)


@pytest.mark.parametrize("pooled", [frozenset({0}), frozenset({1})])
def test_a_pool_without_allocations_in_the_backward_has_no_rest_there(pooled):
    events = ((0, 40 * MIB), (1, 16 * MIB), (0, FREED), (1, FREED), (2, 16 * MIB), (2, FREED))
    assert unsplit_bytes(Allocations(events, pooled, border=4), False) == 0


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
