"""Which copies exist where the code generator fuses (``graph.fuses``), and how long: Inductor's choices, modelled.

A pointwise result that only fusible ops read is *inlined*: its readers compute it from *its* inputs, which therefore live
until then. What several read is inlined only while that is cheap: not if the expression reads more than a few buffers
(``graph.most_reads``: Inductor's ``realize_reads_threshold``), nor, on CPUs, if it holds an exponential or the like
(``Op.inlining``). Else it is made; but if all its readers stand in the same run of fusible ops and none of them is a reduction,
which would take a pass of its own, one loop makes and reads it, and it never exists either. Everything else is materialised:
results of extern kernels and reductions, whatever an extern kernel reads, outputs, saved values.

A result takes the place of an input of the same size that is read where it is written (``Op.in_place``), for the last time,
and that nobody holds, unless it is reduced in the same run. Where one call runs all kernels between two extern ones
(``graph.fusion_groups_hold_buffers``), what it writes is there before it begins, and what it reads until it ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autoremat.planner.graph.arrays import EXTERN, POINTWISE, REDUCTION, Flags, Numbers, arrays_of
from autoremat.planner.graph.graph import Inlining
from autoremat.planner.memory.live_ranges import Buffers, LiveRanges


def lifetimes_with_fusion(copies: Buffers) -> LiveRanges:
    """The copies that exist, and when."""
    kinds = arrays_of(copies.graph).kinds[copies.sequence]
    run = _runs(kinds, copies.num_forward)
    absent = _absent(copies, kinds, run)
    overwritten, overwriting = _taken_over(copies, absent, kinds, run)
    copies.last[overwritten] -= 1
    starts, ends = copies.start.copy(), copies.ends()
    if copies.graph.fusion_groups_hold_buffers:
        _extend(starts, ends, run, overwritten, overwriting)
    exist = ~absent
    return LiveRanges(copies.value[exist], copies.start[exist], starts[exist], ends[exist])


def _runs(kinds: Numbers, num_forward: int) -> Numbers:
    """For each execution, the number of its *run*: an extern kernel alone, or the fusible ops between two of them."""
    begins = np.zeros(len(kinds), dtype=np.int64)
    extern = kinds == EXTERN
    begins[extern] = 1
    begins[1:][extern[:-1]] = 1
    if num_forward < len(kinds):
        begins[num_forward] = 1
    return np.cumsum(begins)


def _absent(copies: Buffers, kinds: Numbers, run: Numbers) -> Flags:
    """For each copy, whether fusion keeps it from ever existing (see the head of this file).

    Who reads an absent copy reads what that is computed from: ``copies.last`` becomes later.
    """
    count = len(copies.value)
    readers = np.bincount(copies.source, minlength=count)
    by_extern = np.bincount(copies.source[kinds[copies.reader] == EXTERN], minlength=count) > 0
    crosses = (copies.start < copies.num_forward) & (copies.last >= copies.num_forward)
    fusible = (readers > 0) & (kinds[copies.start] == POINTWISE) & ~copies.kept & ~by_extern & ~crosses
    may_be_inlined = fusible & ~arrays_of(copies.graph).never_inlined[copies.sequence][copies.start]
    inlined = _inlined(copies, may_be_inlined, readers)
    reduced = np.bincount(copies.source[kinds[copies.reader] == REDUCTION], minlength=count) > 0
    _read_through(copies, inlined, reduced)
    in_one_loop = fusible & ~inlined & (run[copies.start] == run[copies.last]) & ~reduced
    absent: Flags = inlined | in_one_loop
    if in_one_loop.any():
        _read_through(copies, absent, reduced)
    return absent


def _inlined(copies: Buffers, candidates: Flags, readers: Numbers) -> Flags:
    """Of ``candidates``, those that their readers compute: all with one reader, and of the others the cheap ones."""
    found: Flags = candidates & (readers == 1)
    shared = np.flatnonzero(candidates & (readers > 1)).tolist()
    inlined, executions = found.tolist(), _Executions(copies)
    for copy in shared:  # in the order of their making: what they are computed from is decided
        inlined[copy] = executions.are_cheap(copy, inlined)
    return np.array(inlined, dtype=np.bool_)


class _Executions:
    """What single executions read."""

    def __init__(self, copies: Buffers) -> None:
        self.ops, self.given = copies.graph.ops, arrays_of(copies.graph).given
        self.most_reads = copies.graph.most_reads
        self.sequence, self.start = copies.sequence.tolist(), copies.start.tolist()
        self._source: list[int] = copies.source.tolist()
        self._begins = np.searchsorted(copies.reader, np.arange(len(self.sequence) + 1)).tolist()

    def read(self, position: int) -> list[int]:
        """The copies that the execution at ``position`` reads, in the order of its op's inputs."""
        return self._source[self._begins[position] : self._begins[position + 1]]

    def are_cheap(self, copy: int, inlined: list[bool]) -> bool:
        """Whether the expression of ``copy``, through ``inlined`` ones, reads few buffers and holds nothing heavy."""
        reads: set[int] = set()
        seen: set[int] = set()
        stack = [self.start[copy]]
        while stack and len(reads) <= self.most_reads:
            position = stack.pop()
            if position in seen:
                continue
            seen.add(position)
            index = self.sequence[position]
            if self.ops[index].inlining is Inlining.ONCE:
                return False
            reads.update(self.given[index])
            for behind in self.read(position):
                if inlined[behind]:
                    stack.append(self.start[behind])
                else:
                    reads.add(behind)
        return len(reads) <= self.most_reads


def _read_through(copies: Buffers, absent: Flags, reduced: Flags) -> None:
    """Who reads an absent copy reads what that is computed from: ``copies.last`` becomes later, and more is ``reduced``."""
    through = copies.start[absent]
    bounds = np.searchsorted(copies.reader, np.stack([through, through + 1])).tolist()
    last, source, by_reduction = copies.last.tolist(), copies.source.tolist(), reduced.tolist()
    reads = zip(np.flatnonzero(absent).tolist(), *bounds, strict=True)
    # Backwards, so that the readers of an absent copy are known before they become readers of its inputs.
    for copy, begin, end in reversed(list(reads)):
        until, by = last[copy], by_reduction[copy]
        for behind in source[begin:end]:
            if last[behind] < until:
                last[behind] = until
            if by:
                by_reduction[behind] = True
    copies.last = np.array(last, dtype=np.int64)
    reduced[:] = by_reduction


def _taken_over(copies: Buffers, absent: Flags, kinds: Numbers, run: Numbers) -> tuple[list[int], list[int]]:
    """Buffers whose storage the execution that reads them last writes its result to, and those results, at most one for each
    execution.

    A reduction of the result in the same kernel runs over other loops, and Inductor then does not reuse the storage.
    """
    count, sizes = len(copies.value), arrays_of(copies.graph).value_bytes[copies.value]
    alone = np.bincount(copies.start, minlength=len(copies.sequence))[copies.start] == 1
    reducing = kinds[copies.reader] == REDUCTION
    reducing &= run[copies.reader] == run[copies.start[copies.source]]
    reduced = np.bincount(copies.source[reducing], minlength=count) > 0
    ending = np.zeros(len(copies.sequence), dtype=np.bool_)
    ending[copies.last[~absent & ~copies.kept]] = True
    chosen = alone & ~absent & ~reduced & ending[copies.start] & arrays_of(copies.graph).in_place[copies.sequence][copies.start]
    in_place = _InPlace(copies, absent)
    last, free, size = copies.last.tolist(), (~copies.kept).tolist(), sizes.tolist()
    overwritten, overwriting = [], []
    for made, position in zip(np.flatnonzero(chosen).tolist(), copies.start[chosen].tolist(), strict=True):
        for copy in in_place.read_by(position):
            if last[copy] == position and free[copy] and size[copy] == size[made]:
                if not in_place.absent[copy]:
                    overwritten.append(copy)
                    overwriting.append(made)
                break
    return overwritten, overwriting


class _InPlace:
    """What executions read where they write."""

    def __init__(self, copies: Buffers, absent: Flags) -> None:
        self.executions, self.value, self.absent = _Executions(copies), copies.value.tolist(), absent.tolist()
        self.made = (~absent | arrays_of(copies.graph).never_inlined[copies.sequence][copies.start]).tolist()
        """Whether the code generator knows the copy as a buffer, if only until it has fused its maker and its readers."""

    def read_by(self, position: int) -> Iterator[int]:
        """The copies that an execution reads where it writes, through inlined results too."""
        executions = self.executions
        may = executions.ops[executions.sequence[position]].in_place
        for copy in executions.read(position):
            if self.value[copy] not in may:
                continue
            if self.made[copy]:
                yield copy
            else:
                yield from self.read_by(executions.start[copy])


def _extend(starts: Numbers, ends: Numbers, run: Numbers, overwritten: list[int], overwriting: list[int]) -> None:
    """Let copies live from the beginning of the run that makes them to the end of the run that reads them last. A storage
    that is taken over within a run passes from one copy to the other where it did."""
    begin_of = np.searchsorted(run, run, side="left")
    end_of = np.searchsorted(run, run, side="right") - 1
    early = np.ones(len(starts), dtype=np.bool_)
    late = np.ones(len(starts), dtype=np.bool_)
    early[overwriting], late[overwritten] = False, False
    starts[early] = begin_of[starts[early]]
    ends[late] = end_of[ends[late]]
