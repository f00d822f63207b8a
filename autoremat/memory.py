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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoremat.columns import EXTERN, POINTWISE, REDUCTION, Flags, Numbers
from autoremat.errors import PlanInvalid
from autoremat.graph import Graph
from autoremat.schedule import Schedule

INLINE_READERS = 4
"""At most so many readers inline a pointwise result; Inductor realises what is read more often than
``config.realize_reads_threshold`` (4)."""

Lifetimes = tuple[Numbers, Numbers, Numbers]
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
    bytes_at: Numbers
    lifetimes: Lifetimes

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """The materialised copies in the order of their making."""
        return tuple(map(Copy, *(column.tolist() for column in self.lifetimes)))

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


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """Replay ``schedule`` and count the bytes alive at each execution.

    Raises ``PlanInvalid`` if an execution reads what was never made.
    """
    copies = _Copies(graph, schedule)
    lifetimes = _with_fusion(copies) if graph.fuses else (copies.value, copies.start, copies.ends())
    values, starts, ends = lifetimes
    sizes, length = graph.columns.value_bytes[values], len(schedule.sequence)
    change = np.zeros(length + 2, dtype=np.int64)
    np.add.at(change, starts, sizes)
    np.subtract.at(change, ends + 1, sizes)
    change[len(schedule.forward)] += graph.tangent_bytes
    bytes_at = np.cumsum(change)[:length] + graph.columns.workspace_bytes[copies.sequence]
    return Timeline(graph, schedule, bytes_at, lifetimes)


class _Copies:
    """Every copy, in the order of their making, and who reads it. The planner's innermost loop: columns, not objects.

    Reads are in the order of executions.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph, self.num_forward = graph, len(schedule.forward)
        self.sequence = np.array(schedule.sequence, dtype=np.int64)
        self.start, self.value = graph.columns.outputs.of(self.sequence)
        self.reader, read = graph.columns.inputs.of(self.sequence)
        keys = self._key(self.value, self.start)
        self.order = np.argsort(keys)
        self.keys = keys[self.order]
        self.source = self._newest(read, self.reader)
        """For each read, the copy; ``reader`` is the execution."""
        if len(missing := np.flatnonzero(self.source < 0)):
            raise self._never_made(int(self.reader[missing[0]]), int(read[missing[0]]))
        self.last = self.start.copy()
        """For each copy, the last execution that makes or reads it."""
        np.maximum.at(self.last, self.source, self.reader)
        self.kept = self._kept()
        """Whether a copy stays with the caller."""

    def _key(self, values: Numbers, positions: Numbers) -> Numbers:
        """Ascends with the value, then with the position."""
        return values * (len(self.sequence) + 1) + positions

    def _newest(self, values: Numbers, positions: Numbers) -> Numbers:
        """The newest copy of each value before a position; -1 if there is none."""
        at = np.searchsorted(self.keys, self._key(values, positions)) - 1
        found = np.append(self.order, -1)[at]
        return np.where((found >= 0) & (np.append(self.value, -1)[found] == values), found, -1)

    def _kept(self) -> Flags:
        kept = np.zeros(len(self.value), dtype=np.bool_)
        for outputs, position in (
            (self.graph.forward_outputs, self.num_forward),
            (self.graph.backward_outputs, len(self.sequence)),
        ):
            values = np.array(outputs, dtype=np.int64)
            newest = self._newest(values, np.full(len(values), position))
            kept[newest[newest >= 0]] = True
        return kept

    def ends(self) -> Numbers:
        """For each copy, the execution after which it is freed."""
        return np.where(self.kept, len(self.sequence) - 1, self.last)

    def _never_made(self, position: int, value: int) -> PlanInvalid:
        reader, missing = self.graph.ops[self.sequence[position]].name, self.graph.values[value].name
        return PlanInvalid(f"execution {position} ({reader}) reads {missing}, which was never made")


def _with_fusion(copies: _Copies) -> Lifetimes:
    """The lifetimes of the copies that exist."""
    kinds = copies.graph.columns.kinds[copies.sequence]
    # Extern kernels so far: equal between two executions, they are in one fusible run.
    run = np.cumsum(kinds == EXTERN)
    inlined = _inlined(copies, kinds, run)
    _read_through(copies, inlined)
    for copy in _taken_over(copies, inlined, kinds, run):
        copies.last[copy] -= 1
    exist = ~inlined
    return copies.value[exist], copies.start[exist], copies.ends()[exist]


def _inlined(copies: _Copies, kinds: Numbers, run: Numbers) -> Flags:
    """For each copy, whether fusion keeps it from ever existing (see the head of this file)."""
    count, length = len(copies.value), len(copies.sequence)
    readers = np.bincount(copies.source, minlength=count)
    by_extern = np.bincount(copies.source[kinds[copies.reader] == EXTERN], minlength=count) > 0
    first = np.full(count, length)
    np.minimum.at(first, copies.source, copies.reader)
    crosses = (copies.start < copies.num_forward) & (copies.last >= copies.num_forward)
    read = readers > 0
    in_one_run = np.zeros(count, dtype=np.bool_)
    in_one_run[read] = run[first[read]] == run[copies.last[read]]
    few = (readers == 1) | ((readers <= INLINE_READERS) & in_one_run)
    inlined: Flags = read & few & (kinds[copies.start] == POINTWISE) & ~copies.kept & ~by_extern & ~crosses
    return inlined


def _read_through(copies: _Copies, inlined: Flags) -> None:
    """Who reads an inlined copy reads what that is computed from: ``copies.last`` becomes later."""
    through = copies.start[inlined]
    bounds = np.searchsorted(copies.reader, np.stack([through, through + 1])).tolist()
    last, source = copies.last.tolist(), copies.source.tolist()
    reads = zip(np.flatnonzero(inlined).tolist(), *bounds, strict=True)
    # Backwards, so that the readers of an inlined copy are known before they become readers of its inputs.
    for copy, begin, end in reversed(list(reads)):
        until = last[copy]
        for behind in source[begin:end]:
            if last[behind] < until:
                last[behind] = until
    copies.last = np.array(last, dtype=np.int64)


def _taken_over(copies: _Copies, inlined: Flags, kinds: Numbers, run: Numbers) -> Iterable[int]:
    """The copies whose storage the execution that reads them last writes its result to, at most one for each execution.

    A reduction of the result in the same kernel runs over other loops, and Inductor then does not reuse the storage.
    """
    count, sizes = len(copies.value), copies.graph.columns.value_bytes[copies.value]
    alone = np.bincount(copies.start, minlength=len(copies.sequence))[copies.start] == 1
    reducing = kinds[copies.reader] == REDUCTION
    reducing &= run[copies.reader] == run[copies.start[copies.source]]
    reduced = np.bincount(copies.source[reducing], minlength=count) > 0
    ending = np.zeros(len(copies.sequence), dtype=np.bool_)
    ending[copies.last[~inlined & ~copies.kept]] = True
    chosen = alone & ~inlined & ~reduced & ending[copies.start] & copies.graph.columns.in_place[copies.sequence][copies.start]
    in_place = _InPlace(copies, inlined)
    last, free, size = copies.last.tolist(), (~copies.kept).tolist(), sizes.tolist()
    for made, position in zip(np.flatnonzero(chosen).tolist(), copies.start[chosen].tolist(), strict=True):
        for copy in in_place.read_by(position):
            if last[copy] == position and free[copy] and size[copy] == size[made]:
                yield copy
                break


class _InPlace:
    """What executions read where they write."""

    def __init__(self, copies: _Copies, inlined: Flags) -> None:
        self.ops, self.sequence, self.inlined = copies.graph.ops, copies.sequence.tolist(), inlined.tolist()
        self.source, self.value, self.start = copies.source.tolist(), copies.value.tolist(), copies.start.tolist()
        self.begins = np.searchsorted(copies.reader, np.arange(len(self.sequence) + 1)).tolist()

    def read_by(self, position: int) -> Iterator[int]:
        """The materialised copies that an execution reads where it writes, through inlined results too."""
        may = self.ops[self.sequence[position]].in_place
        for copy in self.source[self.begins[position] : self.begins[position + 1]]:
            if self.value[copy] not in may:
                continue
            if self.inlined[copy]:
                yield from self.read_by(self.start[copy])
            else:
                yield copy
