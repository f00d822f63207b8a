"""Checks a plan: its executions, their sequence, its stays, its constraints and its figures."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Op, Role
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.simulator import Timeline


def check_executions(graph: Graph, schedule: Schedule) -> None:
    """Raises ``PlanInvalid`` if the schedule breaks a rule.

    - The backward's own ops run once each, in the graph's sequence. The forward runs only forward ops, and all that it must.
    - In the forward, first executions follow the graph's sequence. It repeats ops only if there is no backward.
    - No op runs twice or in the backward that is not rematerializable or that a constraint saves.
    - Every read finds its value, and the backward's outputs exist at the end.
    """
    if schedule.sequence != schedule.forward + schedule.backward or (graph.single_phase and schedule.backward):
        raise PlanInvalid("the executions are not those of the graph's halves")
    own = [op for op in schedule.backward if not 0 <= op < graph.num_forward]
    if own != list(range(graph.num_forward, len(graph.ops))):
        raise PlanInvalid("the backward's own ops do not all run once, in the graph's sequence")
    if any(not 0 <= op < graph.num_forward for op in schedule.forward):
        raise PlanInvalid("the forward runs an op that is not its own")
    if missing := graph.required_forward - set(schedule.forward):
        raise PlanInvalid(f"the forward lacks {[graph.ops[op].name for op in sorted(missing)]}")
    made = {v for v, value in enumerate(graph.values) if value.role is not Role.COMPUTED}
    ran: set[int] = set()
    furthest = -1
    for position, index in enumerate(schedule.sequence):
        op, in_forward = graph.ops[index], position < len(schedule.forward)
        if index in ran and in_forward and not graph.single_phase:
            raise PlanInvalid(f"{op.name} runs twice in the forward, which repeats no op")
        if index in ran or op.forward != in_forward:
            _may_be_recomputed(op)
        if not made.issuperset(op.inputs):
            raise PlanInvalid(
                f"{op.name} reads {[graph.values[v].name for v in op.inputs if v not in made]} before it is computed"
            )
        if index not in ran and index < furthest and in_forward:
            raise PlanInvalid(f"{op.name} runs for the first time after {graph.ops[furthest].name}, out of order")
        furthest = max(furthest, index)
        ran.add(index)
        made.update(op.outputs)
    if unmade := [graph.values[v].name for v in graph.backward_outputs if v not in made]:
        raise PlanInvalid(f"the outputs {unmade} are never computed")


def _may_be_recomputed(op: Op) -> None:
    """Raises ``PlanInvalid`` if the op may not run a second time, or not in the other half."""
    if not op.rematerializable:
        raise PlanInvalid(f"{op.name} may not run twice ({op.traits.name})")
    if op.constraint is Constraint.SAVE:
        raise PlanInvalid(f"{op.name} is to be saved, but runs twice or in the backward")


def check_stays(graph: Graph, schedule: Schedule) -> None:
    """Raises ``PlanInvalid`` if a stay breaks a rule. The executions are those that :func:`check_executions` accepts.

    - Values ascend, with at most one stay each. A stay names one of the forms of its value, which is no output.
    - The forward computes the value and the backward reads it, before it computes it again if it does.
    - The forward stores the value after it is computed. It is freed after its last read in the forward, in either half.
    - The backward loads it after it is freed, and it is complete before its first read there.
    """
    outputs, latest = {*graph.forward_outputs, *graph.backward_outputs}, -1
    for stay in schedule.stays:
        if not latest < stay.value < len(graph.values):
            raise PlanInvalid(f"the stay of value {stay.value} follows that of {latest}; all ascend below {len(graph.values)}")
        latest = stay.value
        value = graph.values[stay.value]
        if stay.form not in [form.name for form in value.forms]:
            raise PlanInvalid(f"{value.name} has no form {stay.form!r}, which its stay names")
        if stay.value in outputs:
            raise PlanInvalid(f"{value.name} is an output of the step and can have no stay")
    for stay, (made, forward_reads, backward_reads) in zip(schedule.stays, _uses(graph, schedule), strict=True):
        name, border = graph.values[stay.value].name, len(schedule.forward)
        if made < 0 or not backward_reads:
            raise PlanInvalid(f"{name} has a stay, but the forward does not save it")
        first, last = backward_reads[0], max(forward_reads, default=made)
        for holds, fault in (
            (made <= stay.store, f"is stored after execution {stay.store}, but execution {made} computes it"),
            (stay.store <= stay.free, f"is freed after execution {stay.free}, but stored after execution {stay.store}"),
            (last <= stay.free, f"is freed after execution {stay.free}, but execution {last} still reads it"),
            (stay.store < border, f"is stored after execution {stay.store}, but the forward ends with execution {border - 1}"),
            (border <= stay.load, f"is loaded before execution {stay.load}, but the backward begins with execution {border}"),
            (stay.free < stay.load, f"is loaded before execution {stay.load}, but freed after execution {stay.free}"),
            (stay.load <= stay.need, f"is loaded before execution {stay.load}, but to be complete before {stay.need}"),
            (stay.need <= first, f"is complete only before execution {stay.need}, but execution {first} reads it"),
        ):
            if not holds:
                raise PlanInvalid(f"{name} has a wrong stay: it {fault}")


def _uses(graph: Graph, schedule: Schedule) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yields, for each stay: where the forward computes the value (or -1), where the forward reads it, and the backward.

    Reads of what the backward has computed again are left out.
    """
    border, stored = len(schedule.forward), {stay.value for stay in schedule.stays}
    made: dict[int, int] = {}
    reads: dict[int, tuple[list[int], list[int]]] = {value: ([], []) for value in stored}
    for position, index in enumerate(schedule.sequence if stored else ()):
        op = graph.ops[index]
        for value in stored.intersection(op.inputs):
            reads[value][position >= border].append(position)
        made.update((value, position) for value in stored.intersection(op.outputs) if position < border)
        if position >= border:
            stored.difference_update(op.outputs)
    for stay in schedule.stays:
        yield made.get(stay.value, -1), *reads[stay.value]


def check_constraints(graph: Graph, crossing: Collection[int]) -> None:
    """Raises ``PlanInvalid`` if a value in ``crossing``, which the forward leaves for the backward, is to be recomputed.

    Outputs of the forward are exempt, because the caller holds them, and so are ops that may not run twice.
    """
    for value in sorted(set(crossing).difference(graph.forward_outputs)):
        producer = graph.values[value].producer
        op = None if producer is None else graph.ops[producer]
        if op is not None and op.constraint is Constraint.RECOMPUTE and op.rematerializable:
            raise PlanInvalid(f"{op.name} is to be recomputed, but {graph.values[value].name} is saved for the backward")


def check_figures(timeline: Timeline, anew: Timeline) -> None:
    """Raises ``PlanInvalid`` unless ``timeline`` has the bytes of ``anew``, which is simulated anew, on the device and on the
    host."""
    if timeline.peak_bytes != anew.peak_bytes:
        raise PlanInvalid(f"the peak is {anew.peak_bytes} bytes, not {timeline.peak_bytes} as the plan says")
    if timeline.schedule != anew.schedule:
        raise PlanInvalid("the timeline is that of another schedule")
    if timeline.host_bytes != anew.host_bytes:
        raise PlanInvalid(f"the stays take {anew.host_bytes} bytes on the host, not {timeline.host_bytes} as the plan says")
    if not np.array_equal(timeline.bytes_at, anew.bytes_at):
        raise PlanInvalid("the bytes at the executions are not those of the schedule")
