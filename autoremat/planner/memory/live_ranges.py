"""Every copy of a value that a schedule makes, and who reads it. The planner's innermost loop: columns, not objects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.arrays import Flags, Numbers, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule


@dataclass(frozen=True)
class LiveRanges:
    """Of the copies that exist, in the order of their making: their values, the executions that make them, and the first
    and last execution during which they are alive."""

    values: Numbers
    made_at: Numbers
    starts: Numbers
    ends: Numbers


class Buffers:
    """The copies in the order of their making, and the reads in the order of executions.

    Raises ``PlanInvalid`` if an execution reads what was never made.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph, self.num_forward = graph, len(schedule.forward)
        self.sequence = np.array(schedule.sequence, dtype=np.int64)
        self.start, self.value = arrays_of(graph).outputs.of(self.sequence)
        self.reader, read = arrays_of(graph).inputs.of(self.sequence)
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
