"""The bytes of a backward that runs otherwise than planned: with several gradients at once, or without freeing what was saved.

Neither changes what a plan is made for, so only warnings use these figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoremat.planner.graph.arrays import Numbers
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role
from autoremat.planner.memory.simulator import Timeline


@dataclass(frozen=True)
class BackwardBytes:
    """The bytes at each execution of a backward."""

    planned: Numbers
    """Live bytes under the plan."""
    of_gradient: Numbers
    """The part that depends on the incoming gradients. A backward of several gradients at once has it several times."""
    at_hand: Numbers
    """Bytes that an op needs once more for each of several gradients: its results before they are stacked, and its other
    operands. Torch's ``vmap`` copies both where an op has no rule."""
    freed: Numbers
    """Bytes that were saved for the backward and are free by then. They are live if autograd keeps the graph."""

    @classmethod
    def of(cls, timeline: Timeline) -> BackwardBytes:
        """Returns the bytes of the backward of a simulated plan."""
        graph, schedule = timeline.graph, timeline.schedule
        length, border = len(schedule.sequence), len(schedule.forward)
        freed, of_gradient = (np.zeros(length + 1, dtype=np.int64) for _ in range(2))
        dependent, saved = _dependent(graph), set(schedule.saved(graph)).difference(stay.value for stay in schedule.stays)
        latest = {one.value: one for one in timeline.live_ranges if one.start < border and one.value in saved}
        for one in timeline.live_ranges:
            if one.value in dependent:
                of_gradient[one.start] += one.bytes
                of_gradient[one.end + 1] -= one.bytes
            # The backward's first op may reuse the buffer of a saved tensor, whose range then ends before.
            if one.start < border and (one.end >= border or latest.get(one.value) is one):
                freed[one.end + 1] += one.bytes
        backward = slice(border, length)
        gradients = np.cumsum(of_gradient)[backward] + graph.tangent_bytes
        sizes = [value.bytes for value in graph.values]
        copied = [sum(sizes[v] for v in {*op.inputs, *op.outputs}.difference(dependent - {*op.outputs})) for op in graph.ops]
        at_hand = np.array([copied[op] if not dependent.isdisjoint(graph.ops[op].outputs) else 0 for op in schedule.backward])
        return cls(timeline.bytes_at[backward], gradients, at_hand, np.cumsum(freed)[backward])

    def peak(self, gradients: int = 0, keeps_graph: bool = False) -> int:
        """Returns the most bytes for so many gradients under ``vmap`` (0: without it), if autograd keeps the graph or not.

        It is an upper bound under ``vmap``.
        """
        live = self.planned + (self.freed if keeps_graph else 0)
        if gradients:
            live = live + (gradients - 1) * self.of_gradient + gradients * self.at_hand
        return int(live.max()) if len(live) else 0

    def gradients_within(self, budget: int) -> int:
        """Returns the most gradients under ``vmap`` whose backward stays within ``budget``."""
        fitting = (budget - self.planned + self.of_gradient) // np.maximum(self.of_gradient + self.at_hand, 1)
        return max(0, int(fitting.min())) if len(fitting) else 0


def _dependent(graph: Graph) -> set[int]:
    """Returns the values that depend on a gradient that flows into the backward."""
    found = {number for number, value in enumerate(graph.values) if value.role is Role.TANGENT}
    for op in graph.ops[graph.num_forward :]:
        if not found.isdisjoint(op.inputs):
            found.update(op.outputs)
    return found
