"""Checks the rules of schedules that a simulation does not need: which ops run where, and constraints."""

from __future__ import annotations

from collections.abc import Collection

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Op, Role
from autoremat.planner.graph.schedule import Schedule


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


def check_constraints(graph: Graph, crossing: Collection[int]) -> None:
    """Raises ``PlanInvalid`` if a value in ``crossing``, which the forward leaves for the backward, is to be recomputed.

    Outputs of the forward are exempt, because the caller holds them, and so are ops that may not run twice.
    """
    for value in sorted(set(crossing).difference(graph.forward_outputs)):
        producer = graph.values[value].producer
        op = None if producer is None else graph.ops[producer]
        if op is not None and op.constraint is Constraint.RECOMPUTE and op.rematerializable:
            raise PlanInvalid(f"{op.name} is to be recomputed, but {graph.values[value].name} is saved for the backward")
