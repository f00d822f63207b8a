"""Computes the seconds of each execution of a schedule.

Where the code generator fuses, an execution that materialises a result stands for a kernel. It computes the results inlined
into it as well, and these executions take no seconds of their own.

    seconds of a kernel  =  min(seconds of its ops alone, max(its arithmetic, its traffic · seconds per byte))

The traffic is what the kernel materialises, and each materialised tensor or input of the step that it reads. A fusion group
reads a tensor once, and reads nothing that it makes itself. So a saved value costs its write in the forward and its reads in
the backward, and a recomputed value that is inlined costs its arithmetic. Extern kernels have the seconds of their op.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.cost.fused_traffic import traffic_of
from autoremat.planner.graph.arrays import EXTERN, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.fusion import fusion_of
from autoremat.planner.memory.live_ranges import Buffers

ROUNDING = 1e-9
"""Relative error of seconds that are computed in two ways."""


def durations(graph: Graph, schedule: Schedule, *, fused: bool = True) -> NDArray[np.float64]:
    """Returns the seconds of each execution of ``schedule``. They do not depend on its stays.

    With ``fused=False``, graphs that fuse get the seconds by which plans are compared: of every op alone, of recomputation, and
    of the traffic of saved values.
    """
    seconds = np.array([graph.ops[index].seconds for index in schedule.sequence], dtype=np.float64)
    if not graph.fuses:
        return seconds
    return _Kernels(graph, schedule).seconds(seconds) if fused else _compared(graph, schedule, seconds)


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
        buffers = Buffers(graph, Schedule(schedule.forward, schedule.backward))
        absent, group = fusion_of(buffers)
        self.group: list[int] = group.tolist()
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
        self.inlined: list[bool] = ((made > 0) & (np.bincount(buffers.start[absent], minlength=length) == made)).tolist()

    def seconds(self, alone: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the seconds of each execution. ``alone`` are those that its op takes as a kernel of its own."""
        kinds, per_byte = arrays_of(self.graph).kinds.tolist(), self.graph.saving_seconds_per_byte / 2
        arithmetic, unfused, found = _arithmetic_of(self.graph), alone.tolist(), [0.0] * len(alone)
        group, ran, read = -1, set[int](), set[int]()
        for position, index in enumerate(self.sequence):
            if kinds[index] == EXTERN:
                found[position] = unfused[position]
            elif not self.inlined[position]:
                if self.group[position] != group:
                    group, ran, read = self.group[position], set(), set()
                kernel = self._kernel(position, ran)
                moved = self.written[position] + self._read_bytes(kernel, group, read)
                busy = sum(arithmetic[self.sequence[execution]] for execution in kernel)
                found[position] = min(sum(unfused[execution] for execution in kernel), max(busy, moved * per_byte))
        return np.array(found, dtype=np.float64)

    def _kernel(self, position: int, ran: set[int]) -> list[int]:
        """Returns the execution at ``position`` and those inlined into it, except those that ``ran`` in the group before."""
        kernel, stack = [], [position]
        while stack:
            execution = stack.pop()
            if execution not in ran:
                ran.add(execution)
                kernel.append(execution)
                reads = self.source[self.begins[execution] : self.begins[execution + 1]]
                stack.extend(self.start[source] for source in reads if self.absent[source])
        return kernel

    def _read_bytes(self, kernel: list[int], group: int, read: set[int]) -> int:
        """Returns the bytes that ``kernel`` reads and its group neither makes nor has ``read`` before."""
        total, given = 0, arrays_of(self.graph).given
        for execution in kernel:
            for source in self.source[self.begins[execution] : self.begins[execution + 1]]:
                if not self.absent[source] and source not in read and self.group[self.start[source]] != group:
                    read.add(source)
                    total += self.bytes[source]
            for source in given[self.sequence[execution]]:
                if source not in read:
                    read.add(source)
                    total += self.graph.values[-1 - source].bytes
        return total


def _arithmetic_of(graph: Graph) -> list[float]:
    """Returns, for each op, its seconds beside memory traffic.

    Ops without known share of traffic have none if they take no longer than their traffic.
    """
    per_byte = graph.saving_seconds_per_byte / 2 * (1 + ROUNDING)
    return [
        op.seconds - op.memory_bound_seconds if op.memory_bound_seconds or op.seconds > op.bytes_moved * per_byte else 0.0
        for op in graph.ops
    ]
