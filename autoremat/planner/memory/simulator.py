"""The one memory simulator: (graph, schedule) -> bytes alive at each execution.

Each execution makes fresh *copies* of the op's outputs and reads the newest copy of each input. A copy is freed after its
last reader. Solvers, the report and the tests all use this file.

What is counted follows the definition of the budget: inputs of the step cost nothing; tangents are held through the whole
backward by autograd; forward outputs and gradients stay with the caller from their making to the end of the step.

Where the code generator fuses (``graph.fuses``), not all copies exist: see :mod:`autoremat.planner.memory.fusion`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoremat.planner.graph.arrays import Numbers, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.fusion import lifetimes_with_fusion
from autoremat.planner.memory.live_ranges import Buffers, LiveRanges


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
    lifetimes: LiveRanges

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """The materialised copies in the order of their making."""
        lifetimes = self.lifetimes
        return tuple(map(Copy, lifetimes.values.tolist(), lifetimes.starts.tolist(), lifetimes.ends.tolist()))

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
    copies = Buffers(graph, schedule)
    if graph.fuses:
        lifetimes = lifetimes_with_fusion(copies)
    else:
        lifetimes = LiveRanges(copies.value, copies.start, copies.start, copies.ends())
    sizes, length = arrays_of(graph).value_bytes[lifetimes.values], len(schedule.sequence)
    change = np.zeros(length + 2, dtype=np.int64)
    np.add.at(change, lifetimes.starts, sizes)
    np.subtract.at(change, lifetimes.ends + 1, sizes)
    change[len(schedule.forward)] += graph.tangent_bytes
    bytes_at = np.cumsum(change)[:length] + arrays_of(graph).workspace_bytes[copies.sequence]
    return Timeline(graph, schedule, bytes_at, lifetimes)
