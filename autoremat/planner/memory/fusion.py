"""Models fusion in Inductor: the values that are materialised, and their live ranges (if ``Machine.fuses``).

A pointwise result is *fusible* if the caller does not hold it, it does not cross into the backward, and no extern kernel reads
it. The first row that applies to a fusible result decides. Rows 1 and 2 do not apply to random draws.

| Row | Condition                                                               | Consequence                     |
| 1   | It has one reader.                                                      | It is inlined into that reader. |
| 2   | Its expression reads at most ``Machine.most_reads`` buffers and is cheap. | It is inlined into all readers. |
| 3   | All readers are in its fusion group, and none is a reduction.           | One loop computes and reads it. |
| 4   | None of the above.                                                      | It is materialised.             |

Rows 1 to 3 allocate nothing, and the inputs of the result stay live until its readers have run. ``Machine.most_reads`` is
Inductor's ``realize_reads_threshold``. On CPUs, an expression with an exponential or the like is not cheap (``Op.inlining``). A
reduction blocks row 3, because it takes a pass of its own. Every other result is materialised.

An op's only output *reuses* the buffer of the first input that meets these conditions:

- Both have the same size, and the op reads and writes the same elements (``Op.in_place``).
- This read is the input's last, nobody holds the input, and no transfer reads or writes it.
- No reduction in the same fusion group reads the output.

With ``Machine.fusion_groups_hold_buffers``, a fusion group is one call. Its results are allocated before it begins, and its
inputs are freed after it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoremat.planner.graph.arrays import EXTERN, POINTWISE, REDUCTION, Flags, Numbers, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import RECENT, Schedule
from autoremat.planner.memory.live_ranges import Buffers, LiveRanges


@dataclass(frozen=True)
class Fused:
    """The live ranges of a schedule, and what fusion makes of them."""

    buffers: Buffers
    """All live ranges. Readers of an absent one are readers of its inputs."""
    absent: Flags
    """For each live range, True if fusion does not materialise it."""
    inlined: Flags
    """For each live range, True if it is absent and would be a buffer if it were not inlined."""
    group: Numbers
    """The fusion group of each execution."""

    @classmethod
    def of(cls, buffers: Buffers) -> Fused:
        """Returns the fusion of ``buffers``, whose last readers it updates. Without fusion, each execution is a group."""
        if not buffers.graph.machine.fuses:
            none = np.zeros(len(buffers.value), dtype=np.bool_)
            return cls(buffers, none, none, np.arange(len(buffers.sequence)))
        kinds = arrays_of(buffers.graph).kinds[buffers.sequence]
        group = _fusion_groups(kinds, buffers.num_forward)
        return cls(buffers, *_absent(buffers, kinds, group), group)


def fusion_in(graph: Graph, schedule: Schedule) -> Fused:
    """Returns the fusion of ``schedule`` without its stays. The last few are remembered."""
    return graph.derived(_recent)(schedule.without_stays)


def _recent(graph: Graph) -> Callable[[Schedule], Fused]:
    return lru_cache(RECENT)(lambda schedule: Fused.of(Buffers(graph, schedule)))


def live_ranges_with_fusion(found: Fused) -> LiveRanges:
    """Returns the live ranges of the materialised values."""
    buffers, absent, group = found.buffers, found.absent, found.group
    if not buffers.graph.machine.fuses:
        return LiveRanges(buffers.value, buffers.computed_at, buffers.start, buffers.ends(buffers.last), buffers.bytes)
    kinds = arrays_of(buffers.graph).kinds[buffers.sequence]
    overwritten, overwriting = _taken_over(buffers, absent, kinds, group)
    last = buffers.last.copy()
    last[overwritten] -= 1
    starts, ends = buffers.start.copy(), buffers.ends(last)
    if buffers.graph.machine.fusion_groups_hold_buffers:
        _extend(starts, ends, group, overwritten, overwriting)
    exist = ~absent
    return LiveRanges(buffers.value[exist], buffers.computed_at[exist], starts[exist], ends[exist], buffers.bytes[exist])


def _fusion_groups(kinds: Numbers, num_forward: int) -> Numbers:
    """Returns the fusion group of each execution: an extern kernel alone, or the fusible ops between two extern kernels."""
    extern = kinds == EXTERN
    begins = extern.copy()
    begins[1:] |= extern[:-1]
    begins[num_forward : num_forward + 1] = True
    return np.cumsum(begins, dtype=np.int64)


def _absent(buffers: Buffers, kinds: Numbers, group: Numbers) -> tuple[Flags, Flags]:
    """Returns, for each live range, True if fusion does not materialise it (rows 1 to 3 at the head of this file), and True if
    that is only because it is inlined.

    The inputs of an absent live range are read by its readers, so ``buffers.last`` becomes later for them.
    """
    count = len(buffers.value)
    readers = np.bincount(buffers.source, minlength=count)
    by_extern = np.bincount(buffers.source[kinds[buffers.reader] == EXTERN], minlength=count) > 0
    crosses = (buffers.start < buffers.num_forward) & (buffers.last >= buffers.num_forward)
    fusible = (readers > 0) & (kinds[buffers.start] == POINTWISE) & ~buffers.unshared & ~by_extern & ~crosses
    inlined = _inlined(buffers, fusible & ~buffers.never_inlined, readers)
    reduced = np.bincount(buffers.source[kinds[buffers.reader] == REDUCTION], minlength=count) > 0
    _read_through(buffers, inlined, reduced)
    in_one_loop = fusible & ~inlined & (group[buffers.start] == group[buffers.last]) & ~reduced
    absent: Flags = inlined | in_one_loop
    if in_one_loop.any():
        _read_through(buffers, absent, reduced)
    return absent, inlined & ((group[buffers.start] != group[buffers.last]) | reduced)


def _inlined(buffers: Buffers, candidates: Flags, readers: Numbers) -> Flags:
    """Returns those of ``candidates`` that are inlined: all with a single reader, and those of the others that are cheap."""
    graph, arrays, reads = buffers.graph, arrays_of(buffers.graph), buffers.reads
    sequence, start = buffers.sequence.tolist(), buffers.start.tolist()
    inlined: list[bool] = (candidates & (readers == 1)).tolist()

    def is_cheap(live_range: int) -> bool:
        """Returns True if its expression, with all that is inlined, reads few buffers and has no op of ``Inlining.ONCE``."""
        read, seen, stack = set[int](), set[int](), [start[live_range]]
        while stack and len(read) <= graph.machine.most_reads:
            position = stack.pop()
            if position in seen:
                continue
            seen.add(position)
            if arrays.inlined_once[sequence[position]]:
                return False
            read.update(arrays.given[sequence[position]])
            for behind in reads[position]:
                if inlined[behind]:
                    stack.append(start[behind])
                else:
                    read.add(behind)
        return len(read) <= graph.machine.most_reads

    shared = np.flatnonzero(candidates & (readers > 1)).tolist()
    for live_range in shared:  # in the sequence of allocation, so that everything they are computed from is decided already
        inlined[live_range] = is_cheap(live_range)
    return np.array(inlined, dtype=np.bool_)


def _read_through(buffers: Buffers, absent: Flags, reduced: Flags) -> None:
    """Makes the readers of absent live ranges readers of their inputs.

    ``buffers.last`` becomes later, and more live ranges become ``reduced``.
    """
    last, by_reduction = buffers.last.tolist(), reduced.tolist()
    through = zip(np.flatnonzero(absent).tolist(), buffers.start[absent].tolist(), strict=True)
    # Backwards: the readers of an absent live range must be final before they become readers of its inputs.
    for live_range, position in reversed(list(through)):
        until, by = last[live_range], by_reduction[live_range]
        for behind in buffers.reads[position]:
            if last[behind] < until:
                last[behind] = until
            if by:
                by_reduction[behind] = True
    buffers.last = np.array(last, dtype=np.int64)
    reduced[:] = by_reduction


def _taken_over(buffers: Buffers, absent: Flags, kinds: Numbers, group: Numbers) -> tuple[list[int], list[int]]:
    """Returns the live ranges whose buffer is reused, and the results that reuse them; at most one pair per execution.

    A reduction of the result in the same fusion group runs over other loops, so Inductor does not reuse the buffer then.
    """
    count = len(buffers.value)
    alone = np.bincount(buffers.start[: buffers.num_computed], minlength=len(buffers.sequence))[buffers.start] == 1
    alone[buffers.num_computed :] = False
    reducing = kinds[buffers.reader] == REDUCTION
    reducing &= group[buffers.reader] == group[buffers.start[buffers.source]]
    reduced = np.bincount(buffers.source[reducing], minlength=count) > 0
    ending = np.zeros(len(buffers.sequence), dtype=np.bool_)
    ending[buffers.last[~absent & ~buffers.unshared]] = True
    chosen = (
        alone & ~absent & ~reduced & ending[buffers.start] & arrays_of(buffers.graph).in_place[buffers.sequence][buffers.start]
    )
    executed = [buffers.graph.ops[index] for index in buffers.sequence.tolist()]
    start, value, is_absent = buffers.start.tolist(), buffers.value.tolist(), absent.tolist()
    last, free, size = buffers.last.tolist(), (~buffers.unshared).tolist(), buffers.bytes.tolist()
    # These are buffers for the code generator, at least until their producers and readers are fused.
    is_buffer = (~absent | buffers.never_inlined).tolist()

    def read_in_place(position: int) -> Iterator[int]:
        """Yields the live ranges that an execution reads at the elements that it writes, also through inlined results."""
        for live_range in buffers.reads[position]:
            if value[live_range] in executed[position].in_place:
                yield from (live_range,) if is_buffer[live_range] else read_in_place(start[live_range])

    overwritten, overwriting = [], []
    for made, position in zip(np.flatnonzero(chosen).tolist(), buffers.start[chosen].tolist(), strict=True):
        for live_range in read_in_place(position):
            if last[live_range] == position and free[live_range] and size[live_range] == size[made]:
                if not is_absent[live_range]:
                    overwritten.append(live_range)
                    overwriting.append(made)
                break
    return overwritten, overwriting


def _extend(starts: Numbers, ends: Numbers, group: Numbers, overwritten: list[int], overwriting: list[int]) -> None:
    """Extends live ranges from the beginning of the producer's fusion group to the end of the last reader's group.

    A buffer that is reused within a group still passes from one live range to the other at the same execution.
    """
    begin_of = np.searchsorted(group, group, side="left")
    end_of = np.searchsorted(group, group, side="right") - 1
    early, late = np.ones((2, len(starts)), dtype=np.bool_)
    early[overwriting], late[overwritten] = False, False
    starts[early] = begin_of[starts[early]]
    ends[late] = end_of[ends[late]]
