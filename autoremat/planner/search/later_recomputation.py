"""Moves recomputation later: the schedules in which a value that is idle at an execution is not live there.

A value is *idle* at an execution that does not read it, but a later one does. Its memory is free if the backward computes the
value again, just before that later one. What the recomputation reads is live there in any case, or is computed again as well,
or stays live longer. The last pays for values that are small beside the idle one.

A result that fusion does not materialise reads its inputs where it is read itself. It is computed again with the idle value.
Recomputation also divides a group of fused ops, so that a result can take the buffer of an input over. So with fusion, values
that the execution reads are dropped behind it, and the recomputation that comes next may come at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.fusion import fusion_of
from autoremat.planner.memory.live_ranges import Buffers

KEPT_SHARES = (0.0, 0.3, 1.0)
"""Bytes up to which an input of the recomputation stays live longer instead, as shares of the idle value's."""


def with_backward(graph: Graph, executions: Iterable[int]) -> Schedule:
    """Returns the schedule of a backward, without recomputations whose results nothing reads."""
    needed = set(graph.backward_outputs).intersection(graph.forward_values)
    kept = []
    for index in reversed(list(executions)):
        if index < graph.num_forward and needed.isdisjoint(graph.made[index]):
            continue
        needed.difference_update(graph.made[index])
        needed.update(graph.forward_reads[index])
        kept.append(index)
    forward = graph.ancestors([*graph.required_forward, *graph.producers(needed)])
    return Schedule(tuple(sorted(forward)), tuple(reversed(kept)))


class IdleValues:
    """The idle values of a schedule without stays, and the schedules that drop one of them."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph, self.schedule, self.border = graph, schedule, len(schedule.forward)
        self.buffers = Buffers(graph, schedule)
        absent = fusion_of(self.buffers)[0] if graph.fuses else np.zeros(len(self.buffers.value), dtype=np.bool_)
        self.absent: list[bool] = absent.tolist()
        self.idle_ranges = ~absent & ~self.buffers.kept

    @cached_property
    def _readers(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.absent]
        for source, reader in zip(self.buffers.source.tolist(), self.buffers.reader.tolist(), strict=True):
            found[source].append(reader)
        return found

    @cached_property
    def _made_at(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.schedule.sequence]
        for live_range, position in enumerate(self.buffers.start.tolist()):
            found[position].append(live_range)
        return found

    def schedules(self, position: int) -> Iterator[Schedule]:
        """Yields the schedules that drop a value that is idle at ``position``; the largest value comes first."""
        buffers = self.buffers
        yield from self._earlier(position + 1)
        live = np.flatnonzero(self.idle_ranges & (buffers.start <= position) & (buffers.last > position)).tolist()
        for live_range in sorted(live, key=lambda r: (-int(buffers.bytes[r]), r)):
            next_read, through = self._next_read(live_range, position)
            if next_read < self.border:
                continue
            values = [int(buffers.value[r]) for r in (live_range, *through)]
            if not all(map(self._may_run_again, values)):
                continue
            bytes_, seen = int(buffers.bytes[live_range]), set()
            for share in KEPT_SHARES:
                ops = self._recomputation(values, live_range, next_read, share * bytes_)
                if ops not in seen:
                    seen.add(ops)
                    place = next_read - self.border
                    backward = self.schedule.backward
                    yield with_backward(self.graph, (*backward[:place], *ops, *backward[place:]))

    def _earlier(self, position: int) -> Iterator[Schedule]:
        """Yields the schedule whose next recomputation begins at ``position``, which divides a fusion group there."""
        backward, place = self.schedule.backward, position - self.border
        begin = next((i for i in range(max(place, 0), len(backward)) if backward[i] < self.graph.num_forward), len(backward))
        end = next((i for i in range(begin, len(backward)) if backward[i] >= self.graph.num_forward), len(backward))
        if self.graph.fuses and 0 <= place < begin < end:
            moved = (*backward[:place], *backward[begin:end], *backward[place:begin], *backward[end:])
            yield with_backward(self.graph, moved)

    def _next_read(self, live_range: int, position: int) -> tuple[int, list[int]]:
        """Returns the first execution after ``position`` that reads a live range, and what it is read through there.

        These are results that are computed before and not materialised. Returns -1 if the range is not idle.
        """
        found, through, stack = len(self.schedule.sequence), [], [live_range]
        while stack:
            for reader in self._readers[stack.pop()]:
                inlined = [r for r in self._made_at[reader] if self.absent[r] and self.buffers.last[r] > position]
                if reader > position:
                    found = min(found, reader)
                elif inlined:
                    stack += [r for r in inlined if r not in through]
                    through += [r for r in inlined if r not in through]
                elif reader == position and not self.graph.fuses:
                    return -1, []
        return found, through

    def _may_run_again(self, value: int) -> bool:
        producer = self.graph.values[value].producer
        if producer is None or producer >= self.graph.num_forward:
            return False
        op = self.graph.ops[producer]
        return op.rematerializable and op.constraint is not Constraint.SAVE

    def _recomputation(self, values: list[int], dropped: int, place: int, kept_bytes: float) -> tuple[int, ...]:
        """Returns the ops that compute ``values`` again before execution ``place``, in forward sequence.

        Values of at most ``kept_bytes`` stay live until then. The live range ``dropped`` does not.
        """
        graph = self.graph
        stack = graph.producers(values)
        ops = set(stack)
        while stack:
            lacking = [v for v in graph.forward_reads[stack.pop()] if not self._is_there(v, dropped, place, kept_bytes)]
            further = set(graph.producers(lacking)) - ops
            ops |= further
            stack += sorted(further)
        return tuple(sorted(ops))

    def _is_there(self, value: int, dropped: int, place: int, kept_bytes: float) -> bool:
        """Returns True if ``value`` is live before execution ``place``, or has to be, or may be for its bytes."""
        if not self._may_run_again(value):
            return True
        buffers = self.buffers
        newest = int(buffers.newest(np.array([value]), np.array([place]))[0])
        if newest < 0 or newest == dropped or self.absent[newest]:
            return False
        if buffers.last[newest] >= place or buffers.kept[newest]:
            return True
        return int(buffers.bytes[newest]) <= kept_bytes
