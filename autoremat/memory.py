"""The one memory simulator: (graph, schedule) -> bytes alive at each execution.

Each execution makes fresh *copies* of the op's outputs and reads the newest copy of each input. A copy is freed after its
last reader. Solvers, the report and the tests all use this file.

What is counted follows the definition of the budget: inputs of the step cost nothing; tangents are held through the whole
backward by autograd; forward outputs and gradients stay with the caller from their making to the end of the step.

When the code generator fuses (``graph.fuses``), a pointwise result that only fusible ops read within one run of fusible
ops never exists: its readers compute it from *its* inputs, which therefore live until then. Everything else is
materialised: results of extern kernels and reductions, whatever an extern kernel reads, outputs, saved values. A result
takes the place of an input of the same size and layout that is read for the last time and that nobody holds
(``Op.in_place``), unless it is reduced in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoremat.errors import PlanInvalid
from autoremat.graph import Graph, Kind
from autoremat.schedule import Schedule

INLINE_READERS = 4
"""At most so many readers inline a pointwise result; Inductor realises what is read more often than
``config.realize_reads_threshold`` (4)."""

Lifetimes = tuple[list[int], list[int], list[int]]
"""Of the copies that exist: their values, the executions that make them, the executions after which they are freed."""


@dataclass(frozen=True)
class Copy:
    """One materialised copy of a value: alive from execution ``start`` to execution ``end``, both included."""

    value: int
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation. ``bytes_at[i]`` is what is alive while execution ``i`` of ``schedule.sequence`` runs."""

    graph: Graph
    schedule: Schedule
    bytes_at: NDArray[np.int64]
    lifetimes: Lifetimes

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """The materialised copies in the order of their making."""
        return tuple(map(Copy, *self.lifetimes))

    @cached_property
    def peak_bytes(self) -> int:
        """The largest number of bytes alive at any moment."""
        return int(self.bytes_at.max()) if len(self.bytes_at) else 0

    @cached_property
    def peak_position(self) -> int:
        """The first execution at which the peak is reached."""
        return int(self.bytes_at.argmax()) if len(self.bytes_at) else 0

    def alive_at(self, position: int) -> list[int]:
        """Values with a copy alive at execution ``position``, largest first."""
        values = [c.value for c in self.copies if c.start <= position <= c.end and self.graph.values[c.value].bytes]
        return sorted(values, key=lambda v: (-self.graph.values[v].bytes, v))


class _Copies:
    """Who reads which copy, which fusion depends on."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph, self.sequence, self.num_forward = graph, schedule.sequence, len(schedule.forward)
        self.value: list[int] = []
        self.start: list[int] = []
        self.readers: list[list[int]] = []
        self.newest: dict[int, int] = {}
        self.sources: list[list[int]] = []
        """For each execution, the copies that it reads."""
        self.made: list[range] = []
        self.forward_copy: dict[int, int] = {}

    def run(self) -> None:
        """Number the copies in the order of their making and note who reads them. The planner's innermost loop but one."""
        graph, newest, readers = self.graph, self.newest, self.readers
        inputs, outputs = graph.computed_inputs, graph.made
        for position, index in enumerate(self.sequence):
            if position == self.num_forward:
                self.forward_copy = dict(newest)
            try:
                read = [newest[value] for value in inputs[index]]
            except KeyError as error:
                raise _never_made(graph, position, index, error.args[0]) from None
            for copy in read:
                readers[copy].append(position)
            self.sources.append(read)
            first = len(self.value)
            for value in outputs[index]:
                newest[value] = len(self.value)
                self.value.append(value)
                self.start.append(position)
                readers.append([])
            self.made.append(range(first, len(self.value)))
        if self.num_forward == len(self.sequence):
            self.forward_copy = dict(newest)


def _inlined(copies: _Copies, kept: set[int], barrier: list[int]) -> list[bool]:
    """For each copy, whether fusion keeps it from ever existing (see the head of this file)."""
    graph, sequence = copies.graph, copies.sequence
    inlined = [False] * len(copies.value)
    fusible = [graph.ops[index].kind is not Kind.EXTERN for index in sequence]
    for copy, readers in enumerate(copies.readers):
        start = copies.start[copy]
        if copy in kept or not readers or graph.ops[sequence[start]].kind is not Kind.POINTWISE:
            continue
        if start < copies.num_forward <= readers[-1] or not all(fusible[r] for r in readers):
            continue
        inlined[copy] = len(readers) == 1 or (len(readers) <= INLINE_READERS and barrier[readers[0]] == barrier[readers[-1]])
    return inlined


def _taken_over(copies: _Copies, inlined: list[bool], last: list[int], kept: set[int], barrier: list[int]) -> list[int]:
    """The copies whose storage the execution that reads them last writes its result to, at most one for each execution.

    A reduction of the result in the same kernel runs over other loops, and Inductor then does not reuse the storage.
    """
    graph, sequence = copies.graph, copies.sequence
    found: list[int] = []
    for position, made in enumerate(copies.made):
        if len(made) != 1 or inlined[made[0]] or not graph.ops[sequence[position]].in_place:
            continue
        same_run = (r for r in copies.readers[made[0]] if barrier[r] == barrier[position])
        if any(graph.ops[sequence[r]].kind is Kind.REDUCTION for r in same_run):
            continue
        size = graph.values[copies.value[made[0]]].bytes
        for copy in _read_in_place(copies, inlined, position):
            if last[copy] == position and copy not in kept and graph.values[copies.value[copy]].bytes == size:
                found.append(copy)
                break
    return found


def _read_in_place(copies: _Copies, inlined: list[bool], position: int) -> Iterator[int]:
    """The materialised copies that an execution reads where it writes, through inlined results too."""
    may = copies.graph.ops[copies.sequence[position]].in_place
    for copy in copies.sources[position]:
        if copies.value[copy] not in may:
            continue
        if inlined[copy]:
            yield from _read_in_place(copies, inlined, copies.start[copy])
        else:
            yield copy


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """Replay ``schedule`` and count the bytes alive at each execution.

    Raises ``PlanInvalid`` if an execution reads what was never made.
    """
    lifetimes = _with_fusion(graph, schedule) if graph.fuses else _without_fusion(graph, schedule)
    sequence, num_forward = schedule.sequence, len(schedule.forward)
    values, starts, ends = (np.array(column, dtype=np.int64) for column in lifetimes)
    sizes = graph.value_bytes[values]
    change = np.zeros(len(sequence) + 2, dtype=np.int64)
    np.add.at(change, starts, sizes)
    np.subtract.at(change, ends + 1, sizes)
    change[num_forward] += graph.tangent_bytes
    bytes_at = np.cumsum(change)[: len(sequence)] + graph.op_workspace_bytes[np.array(sequence, dtype=np.int64)]
    return Timeline(graph, schedule, bytes_at, lifetimes)


def _without_fusion(graph: Graph, schedule: Schedule) -> Lifetimes:
    """The lifetimes where every copy exists. The planner's innermost loop."""
    inputs, outputs, num_forward = graph.computed_inputs, graph.made, len(schedule.forward)
    newest: dict[int, int] = {}
    values: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    handed_out = newest if num_forward == len(schedule.sequence) else {}
    for position, index in enumerate(schedule.sequence):
        if position == num_forward:
            handed_out = newest.copy()
        try:
            for value in inputs[index]:
                ends[newest[value]] = position
        except KeyError as error:
            raise _never_made(graph, position, index, error.args[0]) from None
        for value in outputs[index]:
            newest[value] = len(values)
            values.append(value)
            starts.append(position)
            ends.append(position)
    for copies, kept in ((handed_out, graph.forward_outputs), (newest, graph.backward_outputs)):
        for value in kept:
            if value in copies:
                ends[copies[value]] = len(schedule.sequence) - 1
    return values, starts, ends


def _never_made(graph: Graph, position: int, index: int, value: int) -> PlanInvalid:
    reader, missing = graph.ops[index].name, graph.values[value].name
    return PlanInvalid(f"execution {position} ({reader}) reads {missing}, which was never made")


def _with_fusion(graph: Graph, schedule: Schedule) -> Lifetimes:
    """The lifetimes of the copies that exist."""
    copies = _Copies(graph, schedule)
    copies.run()
    sequence = copies.sequence
    kept = {copies.forward_copy[v] for v in graph.forward_outputs if v in copies.forward_copy}
    kept |= {copies.newest[v] for v in graph.backward_outputs if v in copies.newest}
    # Extern kernels so far: equal between two executions, they are in one fusible run.
    barrier = np.cumsum([graph.ops[index].kind is Kind.EXTERN for index in sequence]).tolist()
    inlined = _inlined(copies, kept, barrier)

    last = list(copies.start)
    # Backwards, so that the readers of an inlined copy are known before they become readers of its inputs.
    for position in range(len(sequence) - 1, -1, -1):
        made = copies.made[position]
        until = position
        for copy in made:
            if inlined[copy]:
                until = max(until, last[copy])
        for copy in copies.sources[position]:
            if last[copy] < until:
                last[copy] = until
    for copy in _taken_over(copies, inlined, last, kept, barrier):
        last[copy] -= 1
    for copy in kept:
        last[copy] = len(sequence) - 1
    existing = [copy for copy in range(len(copies.value)) if not inlined[copy]]
    value, start, end = ([column[copy] for copy in existing] for column in (copies.value, copies.start, last))
    return value, start, end
