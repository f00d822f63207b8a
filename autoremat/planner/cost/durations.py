"""Computes the seconds of each execution of a schedule.

Where the code generator fuses, an execution that materialises a result stands for a kernel. It computes the results inlined
into it as well, and these executions take no seconds of their own.

    seconds of a kernel  =  launch  +  min(seconds of its ops alone, max(its arithmetic, its traffic · seconds per byte))

The traffic is what the kernel materialises, and each materialised tensor or input of the step that it reads. A pass reads a
tensor once, and reads nothing that it makes itself. So a saved value costs its write in the forward and its reads in the
backward, and a recomputed value that is inlined costs its arithmetic. Extern kernels have the seconds of their op.

A fusion group has one pass, and one more behind each result that is known only when a pass has ended (``Op.ends_pass``). The
statistics of a batch norm are such results: the kernel that normalises reads again what they were computed from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.cost.fused_traffic import traffic_of
from autoremat.planner.graph.arrays import EXTERN, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind
from autoremat.planner.graph.recent import Recent
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.fusion import fusion_in

ROUNDING = 1e-9
"""Relative error of seconds that are computed in two ways."""


def durations(graph: Graph, schedule: Schedule, *, fused: bool = True) -> NDArray[np.float64]:
    """Returns the seconds of each execution of ``schedule``. They do not depend on its stays.

    With ``fused=False``, graphs that fuse get the seconds by which plans are compared: of every op alone, of recomputation, and
    of the traffic of saved values.
    """
    if fused and graph.fuses:
        return graph.derived(_recent).of(schedule)
    seconds = np.array([graph.ops[index].seconds for index in schedule.sequence], dtype=np.float64)
    return _compared(graph, schedule, seconds) if graph.fuses else seconds


def _recent(graph: Graph) -> Recent[NDArray[np.float64]]:
    return Recent(graph, _of_kernels)


def _of_kernels(graph: Graph, schedule: Schedule) -> NDArray[np.float64]:
    """Returns the seconds of each execution as fused, which callers share and do not change."""
    alone = np.array([graph.ops[index].seconds for index in schedule.sequence], dtype=np.float64)
    found = _Kernels(graph, schedule).seconds(alone)
    found.setflags(write=False)
    return found


def _compared(graph: Graph, schedule: Schedule, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns ``seconds`` with those of recomputation, and of the traffic of saved values where these are computed first."""
    traffic, first = traffic_of(graph), dict[int, int]()
    for position, index in enumerate(schedule.sequence):
        if first.setdefault(index, position) != position and index < graph.num_forward:
            seconds[position] = traffic.recompute_seconds[index]
    for value in schedule.saved(graph):
        producer = graph.values[value].producer
        assert producer is not None, "inputs are not saved"
        seconds[first[producer]] += traffic.saving_seconds[value]
    return seconds


class _Kernels:
    """The kernels of a schedule: executions that materialise a result, with those that are inlined into them."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph, self.sequence = graph, schedule.sequence
        found = fusion_in(graph, schedule)
        buffers, absent, group = found.buffers, found.absent, found.group
        self.group: list[int] = group.tolist()
        self.made_by: list[int] = group[buffers.start].tolist()
        """For each live range, the fusion group that computes it."""
        self.start: list[int] = buffers.start.tolist()
        self.bytes: list[int] = buffers.bytes.tolist()
        self.absent: list[bool] = absent.tolist()
        self.source: list[int] = buffers.source.tolist()
        length = len(self.sequence)
        self.begins: list[int] = np.searchsorted(buffers.reader, np.arange(length + 1)).tolist()
        """Where the reads of each execution begin in ``source``."""
        self.written: list[float] = np.bincount(buffers.start[~absent], buffers.bytes[~absent], length).tolist()
        """For each execution, the bytes that it materialises."""
        made = arrays_of(graph).outputs.counts[buffers.sequence]
        self.passes = self._count_passes()
        """For each execution, the number of passes of its fusion group that end before it runs."""
        self.inlined: list[bool] = ((made > 0) & (np.bincount(buffers.start[absent], minlength=length) == made)).tolist()

    def seconds(self, alone: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the seconds of each execution. ``alone`` are those that its op takes as a kernel of its own."""
        given, arithmetic = self.graph.derived(_given), arithmetic_seconds(self.graph)
        kinds, per_byte = arrays_of(self.graph).kinds[list(self.sequence)].tolist(), self.graph.saving_seconds_per_byte / 2
        unfused, found = alone.tolist(), [0.0] * len(alone)
        group, seen = -1, dict[int, tuple[set[int], set[int]]]()
        for position, kind in enumerate(kinds):
            if kind == EXTERN:
                found[position] = unfused[position]
            elif not self.inlined[position]:
                if self.group[position] != group:
                    group, seen = self.group[position], {}
                if self.passes[position] not in seen:
                    seen[self.passes[position]] = set(), set()
                    found[position] = self.graph.launch_seconds
                kernel, moved = self._kernel(position, *seen[self.passes[position]], given)
                busy = sum(arithmetic[self.sequence[execution]] for execution in kernel)
                found[position] += min(sum(unfused[execution] for execution in kernel), max(busy, moved * per_byte))
        return np.array(found, dtype=np.float64)

    def _count_passes(self) -> list[int]:
        """Returns, for each execution, the number of passes of its fusion group that end before it.

        What ends a pass has loops of its own, so it does not run in the pass that stores what it reads.
        """
        ops, ends = self.graph.ops, arrays_of(self.graph).ends_pass
        found, stored = [0] * len(self.sequence), [-1] * len(self.sequence)
        for position, group in enumerate(self.group):
            for source in self.source[self.begins[position] : self.begins[position + 1]]:
                if self.made_by[source] == group:
                    maker = self.start[source]
                    found[position] = max(found[position], found[maker] + ends[self.sequence[maker]])
                    if self.absent[source]:
                        stored[position] = max(stored[position], stored[maker])
                    elif ops[self.sequence[maker]].kind is Kind.POINTWISE:
                        stored[position] = max(stored[position], found[maker])
            found[position] += ends[self.sequence[position]] and stored[position] == found[position]
        return found

    def _kernel(
        self, position: int, ran: set[int], read: set[int], given: list[list[tuple[int, int]]]
    ) -> tuple[list[int], float]:
        """Returns the execution at ``position`` with those inlined into it, and the bytes that they read and write.

        Leaves out what ``ran`` and what was ``read`` in the pass before, and adds to both.
        """
        kernel, stack, moved = [], [position], self.written[position]
        this = self.group[position], self.passes[position]
        while stack:
            execution = stack.pop()
            if execution in ran:
                continue
            ran.add(execution)
            kernel.append(execution)
            for source in self.source[self.begins[execution] : self.begins[execution + 1]]:
                if self.absent[source]:
                    stack.append(self.start[source])
                elif source not in read and (self.made_by[source], self.passes[self.start[source]]) != this:
                    read.add(source)
                    moved += self.bytes[source]
            for value, size in given[self.sequence[execution]]:
                if value not in read:
                    read.add(value)
                    moved += size
        return kernel, moved


def arithmetic_seconds(graph: Graph) -> list[float]:
    """Returns, for each op, the seconds beside memory traffic, computed once per graph.

    An op that is no stream has none if it takes no longer than its traffic.
    """
    return graph.derived(_arithmetic)


def _arithmetic(graph: Graph) -> list[float]:
    per_byte = graph.saving_seconds_per_byte / 2 * (1 + ROUNDING)
    return [
        op.seconds - op.memory_bound_seconds if op.memory_bound_seconds or op.seconds > op.bytes_moved * per_byte else 0.0
        for op in graph.ops
    ]


def _given(graph: Graph) -> list[list[tuple[int, int]]]:
    """Returns, for each op, the inputs that no op computes, as negative numbers, with their bytes."""
    return [[(value, graph.values[-1 - value].bytes) for value in row] for row in arrays_of(graph).given]
