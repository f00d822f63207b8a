"""Lists the live ranges of a schedule and their readers, as arrays. This is the planner's innermost loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.arrays import Flags, Numbers, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule

NOT_COMPUTED = -1
"""Stands for the execution that computes a live range, if the range holds the bytes of a form or of a transfer."""


@dataclass(frozen=True, slots=True)
class LiveRange:
    """One live range of a materialised value: ``bytes`` bytes from execution ``start`` to execution ``end``, both included."""

    value: int
    computed_at: int
    start: int
    end: int
    bytes: int


@dataclass(frozen=True)
class LiveRanges:
    """The materialised live ranges in the sequence of their allocation, as arrays.

    For each one: its value, the execution that computes it, the first and last execution during which it is live, its bytes.

    Behind those that executions compute come those of stays: first the loaded values, computed at their loads, and then the
    bytes of forms and of transfers, computed at ``NOT_COMPUTED``.
    """

    values: Numbers
    computed_at: Numbers
    starts: Numbers
    ends: Numbers
    bytes: Numbers

    def __iter__(self) -> Iterator[LiveRange]:
        columns = (self.values, self.computed_at, self.starts, self.ends, self.bytes)
        return map(LiveRange, *(column.tolist() for column in columns))

    def of_values(self) -> list[LiveRange]:
        """Returns the live ranges of values, without those that hold the bytes of forms and of transfers."""
        return [one for one in self if one.computed_at != NOT_COMPUTED]


class Buffers:
    """All live ranges in the sequence of their allocation, and all reads in the sequence of executions.

    Includes live ranges that fusion does not materialise. Raises ``PlanInvalid`` if an execution reads a value that was not
    computed before.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph, self.num_forward = graph, len(schedule.forward)
        self.sequence = np.array(schedule.sequence, dtype=np.int64)
        self.start, self.value = arrays_of(graph).outputs.of(self.sequence)
        self.computed_at, self.num_computed = self.start, len(self.value)
        self.bytes = arrays_of(graph).value_bytes[self.value]
        self.reader, read = arrays_of(graph).inputs.of(self.sequence)
        keys = self._key(self.value, self.start)
        self.order = np.argsort(keys)
        self.keys = keys[self.order]
        self.source = self.newest(read, self.reader)
        """For each read, the live range that is read; ``reader`` is the execution that reads it."""
        if len(missing := np.flatnonzero(self.source < 0)):
            position = int(self.reader[missing[0]])
            reader, value = graph.ops[self.sequence[position]].name, graph.values[read[missing[0]]].name
            raise PlanInvalid(f"execution {position} ({reader}) reads {value}, which was never computed")
        self.last = self.start.copy()
        """For each live range, the last execution that computes or reads it."""
        np.maximum.at(self.last, self.source, self.reader)
        self.kept = self._kept()
        """For each live range, True if the caller holds it."""
        self.unshared = self.kept
        """For each live range, True if it is materialised and no result takes its buffer over: it is kept, or has a stay."""

    def _key(self, values: Numbers, positions: Numbers) -> Numbers:
        """Returns sort keys that ascend with the value, then with the position."""
        return values * (len(self.sequence) + 1) + positions

    def newest(self, values: Numbers, positions: Numbers) -> Numbers:
        """Returns the newest live range of each value before a position, or -1 if there is none."""
        at = np.searchsorted(self.keys, self._key(values, positions)) - 1
        found = np.append(self.order, -1)[at]
        return np.where((found >= 0) & (np.append(self.value, -1)[found] == values), found, -1)

    def _kept(self) -> Flags:
        """Returns, for each live range, True if it is a forward output or a gradient that the caller holds."""
        kept = np.zeros(len(self.value), dtype=np.bool_)
        for outputs, position in (
            (self.graph.forward_outputs, self.num_forward),
            (self.graph.backward_outputs, len(self.sequence)),
        ):
            values = np.array(outputs, dtype=np.int64)
            newest = self.newest(values, np.full(len(values), position))
            kept[newest[newest >= 0]] = True
        return kept

    def ends(self, last: Numbers) -> Numbers:
        """Returns, for each live range, the execution after which it is freed. ``last`` are those that need it last."""
        return np.where(self.kept, len(self.sequence) - 1, last)
