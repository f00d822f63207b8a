"""Seconds of the kernels of generated code, in cases made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from strategies import GraphBuilder

from autoremat.planner.cost.code_seconds import code_seconds
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind
from autoremat.planner.memory.allocations import KernelWork

SIZE, PER_BYTE = 100, 2e-6
MOVED = SIZE * PER_BYTE / 2
ARITHMETIC, PRODUCT = 5 * MOVED, 3.0


def step(launch_seconds: float = 0.0) -> Graph:
    """A scaled input, its product and the exponential of that, which are ops 0 to 2."""
    build = GraphBuilder()
    scaled = build.op([build.source(SIZE)], SIZE, kind=Kind.POINTWISE, seconds=1.0, memory_bound_seconds=1.0)
    product = build.op([scaled], SIZE, kind=Kind.EXTERN, seconds=PRODUCT)
    raised = build.op([product], SIZE, kind=Kind.POINTWISE, seconds=1.0, memory_bound_seconds=1.0 - ARITHMETIC)
    graph = build.graph(forward_outputs=(raised,), fuses=True, saving_seconds_per_byte=PER_BYTE)
    return replace(graph, launch_seconds=launch_seconds)


def seconds(graph: Graph, *kernels: KernelWork) -> list[float]:
    return code_seconds(graph, range(len(graph.ops)), kernels)


def test_a_generated_kernel_takes_its_traffic_or_its_arithmetic_whichever_is_longer():
    graph = step()
    scale, product, raised = (op.name for op in graph.ops)
    kernels = [
        KernelWork(((scale, 1.0),), SIZE, SIZE),
        KernelWork(((product, 1.0),), 0, 0, is_library=True),
        KernelWork(((raised, 1.0), (scale, 1.0)), SIZE, SIZE),
        KernelWork(((raised, 1.0),), 2 * SIZE, 7 * SIZE),
        KernelWork((), 2 * SIZE, SIZE),
    ]
    assert seconds(graph, *kernels) == pytest.approx([2 * MOVED, PRODUCT, ARITHMETIC, 9 * MOVED, 3 * MOVED])


def test_on_a_cpu_a_write_moves_a_byte_twice_and_arithmetic_hides_in_part():
    graph = replace(step(), write_share=2 / 3, overlaps_wholly=False)
    raised = ((graph.ops[2].name, 1.0),)
    kernels = KernelWork((), 3 * SIZE, 0), KernelWork((), 0, 3 * SIZE), KernelWork(raised, 3 * SIZE, 3 * SIZE)
    assert seconds(graph, *kernels) == pytest.approx([2 * MOVED, 4 * MOVED, math.hypot(ARITHMETIC, 6 * MOVED)])


def test_a_loop_over_a_part_of_an_op_takes_that_part_of_its_arithmetic():
    graph = step()
    assert seconds(graph, KernelWork(((graph.ops[2].name, 0.5),), 0, 0)) == pytest.approx([ARITHMETIC / 2])


def test_each_generated_kernel_takes_a_launch_and_library_kernels_have_theirs():
    graph = step(launch_seconds=0.25)
    kernels = KernelWork((), SIZE, 0), KernelWork(((graph.ops[1].name, 1.0),), SIZE, 0, is_library=True)
    assert seconds(graph, *kernels) == pytest.approx([0.25 + MOVED, PRODUCT])


def test_library_kernels_of_no_op_share_the_seconds_of_the_ops_that_have_no_kernel():
    unknown = KernelWork((), SIZE, 0, is_library=True)
    graph = step()
    assert seconds(graph, unknown, unknown) == pytest.approx([PRODUCT / 2] * 2)
    known = KernelWork(((graph.ops[1].name, 1.0),), SIZE, 0, is_library=True)
    assert seconds(graph, known, unknown) == pytest.approx([PRODUCT, 0.0])


def test_a_library_op_that_the_code_generator_computes_is_arithmetic_unless_a_library_kernel_computes_it_too():
    graph = step(launch_seconds=0.25)
    loop = KernelWork(((graph.ops[1].name, 1.0),), SIZE, 0)
    assert seconds(graph, loop) == pytest.approx([0.25 + PRODUCT - 0.25])
    assert seconds(graph, loop, replace(loop, is_library=True)) == pytest.approx([0.25 + MOVED, PRODUCT])
