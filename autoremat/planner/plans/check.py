"""Checks a plan without the simulator: its executions, their sequence, and its peak.

The planner's own arithmetic is not trusted here. The check knows only these rules:

- An execution allocates a new live range for each output of its op.
- A read finds the newest live range.
- A live range ends at the last read before the value is computed again.
"""

from __future__ import annotations

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.graph import Constraint, Graph, Role
from autoremat.planner.graph.schedule import Schedule


def check_executions(graph: Graph, schedule: Schedule) -> None:
    """Raises ``PlanInvalid`` if the schedule breaks a rule.

    - The backward's own ops run once each, in sequence. The forward runs only forward ops, and all that it must run.
    - In the forward, first executions follow the graph's sequence.
    - No op runs twice that is not rematerializable or that a constraint saves.
    - Every read finds its value, and the backward's outputs exist at the end.
    """
    if [op for op in schedule.backward if op >= graph.num_forward] != list(range(graph.num_forward, len(graph.ops))):
        raise PlanInvalid("the backward's own ops do not all run once, in order")
    if any(not 0 <= op < graph.num_forward for op in schedule.forward):
        raise PlanInvalid("the forward runs an op that is not its own")
    if missing := graph.required_forward - set(schedule.forward):
        raise PlanInvalid(f"the forward lacks {[graph.ops[op].name for op in sorted(missing)]}")
    made = {v for v, value in enumerate(graph.values) if value.role is not Role.COMPUTED}
    ran: set[int] = set()
    furthest = -1
    for position, index in enumerate(schedule.sequence):
        op = graph.ops[index]
        if index in ran:
            _may_run_again(graph, index)
        if not made.issuperset(op.inputs):
            raise PlanInvalid(
                f"{op.name} reads {[graph.values[v].name for v in op.inputs if v not in made]} before it is computed"
            )
        if index not in ran and index < furthest and position < len(schedule.forward):
            raise PlanInvalid(f"{op.name} runs for the first time after {graph.ops[furthest].name}, out of order")
        furthest = max(furthest, index)
        ran.add(index)
        made.update(op.outputs)
    if unmade := [graph.values[v].name for v in graph.backward_outputs if v not in made]:
        raise PlanInvalid(f"the outputs {unmade} are never computed")


def _may_run_again(graph: Graph, index: int) -> None:
    """Raises ``PlanInvalid`` if the op may not run a second time."""
    op = graph.ops[index]
    if not op.rematerializable:
        raise PlanInvalid(f"{op.name} may not run twice ({op.traits.name})")
    if op.constraint is Constraint.SAVE:
        raise PlanInvalid(f"{op.name} is ordered to be saved but runs twice")


def replayed_peak(graph: Graph, schedule: Schedule) -> int:
    """Returns the most bytes live during an execution.

    The graph must not fuse, and the schedule must have passed :func:`check_executions`. Inputs cost nothing. Tangents count
    through the backward, and a workspace counts while its op runs. Live ranges of outputs that the caller holds count to the
    end. Every other open call holds what this one holds between its halves.
    """
    ops, sequence, num_forward = graph.ops, schedule.sequence, len(schedule.forward)
    sizes = [value.bytes for value in graph.values]
    tangents = sum(value.bytes for value in graph.values if value.role is Role.TANGENT)
    with_caller = set(graph.forward_outputs)
    held = {v: p for p, index in enumerate(schedule.forward) for v in with_caller.intersection(ops[index].outputs)}
    frees = _frees(graph, schedule)
    live: dict[int, int] = {}  # the execution that computed the newest live range of each value
    current = peak = between = 0
    for position, index in enumerate(sequence):
        if position == num_forward:
            between = current
        for value in ops[index].outputs:
            live[value] = position
            current += sizes[value]
        now = current + ops[index].workspace_bytes + (tangents if position >= num_forward else 0)
        peak = max(peak, now)
        for value in frees[position]:
            if held.get(value) != live.pop(value):
                current -= sizes[value]
    if num_forward == len(sequence):
        between = current
    return peak + (graph.in_flight - 1) * between + graph.resident_bytes if sequence else 0


def _frees(graph: Graph, schedule: Schedule) -> list[list[int]]:
    """Returns, for each execution, the values that are not read afterwards before they are computed again."""
    wanted = set(graph.backward_outputs)
    frees: list[list[int]] = []
    for index in reversed(schedule.sequence):
        read, made = graph.computed_inputs[index], graph.ops[index].outputs
        frees.append([v for v in (*made, *read) if v not in wanted])
        wanted.difference_update(made)
        wanted.update(read)
    return frees[::-1]
