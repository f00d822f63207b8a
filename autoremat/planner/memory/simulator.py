"""Simulates the memory of a schedule: the bytes that are live at each execution.

Each execution allocates new live ranges for the outputs of its op, and reads the newest live range of each input. A live range
ends at its last read. Search, report and tests share this simulator.

The count follows the definition of the budget. Inputs of the step cost nothing. Autograd holds tangents through the whole
backward. The caller holds forward outputs and gradients from their allocation to the end of the step.

A stay (``Schedule.stays``) divides the live range of its value in two (:class:`autoremat.planner.memory.live_ranges.Buffers`).
The bytes follow from its positions alone, and never from the rate of a link.

If ``k`` calls of the graph are open at once, each of the other ``k - 1`` holds its saved tensors and outputs. These bytes are
live beside every execution, in addition to ``Calls.resident_bytes``.

If the code generator fuses (``Machine.fuses``), some values are never materialised: see :mod:`autoremat.planner.memory.fusion`.

:class:`BackwardBytes` counts a backward that runs otherwise than planned. Only warnings use its figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoremat.planner.graph.arrays import Numbers, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.fusion import Fused, fusion_in, live_ranges_with_fusion
from autoremat.planner.memory.live_ranges import Buffers, LiveRanges


@dataclass(frozen=True, eq=False)
class Timeline:
    """The result of a simulation.

    ``bytes_at[i]`` is the bytes live while execution ``i`` of ``schedule.sequence`` runs, with those of the other open calls.
    """

    graph: Graph
    schedule: Schedule
    bytes_at: Numbers
    live_ranges: LiveRanges

    @cached_property
    def held_bytes(self) -> int:
        """Bytes that one open call holds between its forward and its backward: saved tensors and outputs."""
        return sum(held_sizes(self.graph, self.schedule))

    @cached_property
    def host_bytes(self) -> int:
        """The most bytes of forms on the host at any time: all open calls store their values there between their halves."""
        return self.graph.calls.in_flight * sum(form.host_bytes for form in self.schedule.forms(self.graph).values())

    @property
    def other_calls_bytes(self) -> int:
        """The bytes of the other open calls."""
        others = self.graph.calls.others
        return others * self.held_bytes if others else 0

    @property
    def beside_bytes(self) -> int:
        """The part of ``bytes_at`` that does not belong to the running call."""
        return self.other_calls_bytes + self.graph.calls.resident_bytes

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes live at any execution."""
        return int(self.bytes_at.max()) if len(self.bytes_at) else 0

    @cached_property
    def peak_position(self) -> int:
        """The first execution at which the peak is reached."""
        return int(self.bytes_at.argmax()) if len(self.bytes_at) else 0


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """Returns the simulation of ``schedule``: its live ranges and the bytes live at each execution.

    Raises ``PlanInvalid`` if an execution reads a value that was not computed before, and for a stay that breaks a rule.
    """
    fused = Fused.of(Buffers(graph, schedule)) if schedule.stays else fusion_in(graph, schedule)
    buffers, live_ranges = fused.buffers, live_ranges_with_fusion(fused)
    length = len(schedule.sequence)
    change = np.zeros(length + 2, dtype=np.int64)
    np.add.at(change, live_ranges.starts, live_ranges.bytes)
    np.subtract.at(change, live_ranges.ends + 1, live_ranges.bytes)
    change[len(schedule.forward)] += graph.tangent_bytes
    bytes_at = np.cumsum(change)[:length] + arrays_of(graph).workspace_bytes[buffers.sequence]
    timeline = Timeline(graph, schedule, bytes_at, live_ranges)
    bytes_at += timeline.beside_bytes
    return timeline


def held_sizes(graph: Graph, schedule: Schedule) -> list[int]:
    """Returns the bytes on the device of each saved tensor and output of a call between its forward and its backward.

    Live ranges do not tell them: the backward's first op may reuse the buffer of a saved tensor, whose range then ends before.
    """
    outputs = set(graph.forward_outputs).intersection(graph.forward_values)
    return sizes_on_device(graph, schedule, sorted(outputs.union(schedule.saved(graph))))


def sizes_on_device(graph: Graph, schedule: Schedule, values: Iterable[int]) -> list[int]:
    """Returns the bytes on the device of each of ``values`` between the halves.

    A value with a stay has those of its form, and its own beside them if the backward frees it.
    """
    sizes = {value: graph.values[value].bytes for value in values}
    for stay in schedule.stays:
        if stay.value in sizes:
            form = graph.values[stay.value].form(stay.form)
            is_late = stay.free >= len(schedule.forward)
            sizes[stay.value] = form.device_bytes + is_late * (sizes[stay.value] + form.store.temporary_bytes)
    return list(sizes.values())


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
        saved = set(schedule.saved(graph)).difference(stay.value for stay in schedule.stays)
        dependent = {number for number, value in enumerate(graph.values) if value.role is Role.TANGENT}
        for op in graph.ops[graph.num_forward :]:
            dependent.update(op.outputs if not dependent.isdisjoint(op.inputs) else ())
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
