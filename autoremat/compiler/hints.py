"""Hints on what a user may have overlooked: no budget, checkpoints left on in the model, outputs beside the loss."""

from __future__ import annotations

import logging

from autoremat.basics.units import format_bytes, format_seconds
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import PlanningResult

log = logging.getLogger("autoremat")

WORTH = 0.05
"""Share of the step's seconds or of its peak above which a hint is worth its line."""

_given = set[str]()


def hints_of(plan: Plan, planning: PlanningResult, priced: PricedGraph) -> tuple[str, ...]:
    """Returns the hints for a plan, each with the figures of this step."""
    request = priced.problem.request
    options, limits = request.options, request.limits
    hints = []
    if not any((limits.bounds_memory, options.max_slowdown is not None, options.plan, options.policy, options.recompute)):
        least = "" if planning.least_is_searched else "at most "
        least += format_bytes(planning.smallest.peak_bytes)
        hints.append(f"no memory_budget is set: this plan needs {format_bytes(plan.peak_bytes)}, the least possible is {least}")
    forced = [op for op in plan.recomputed if priced.graph.ops[op].constraint is Constraint.RECOMPUTE]
    seconds = sum(priced.graph.ops[op].seconds for op in forced)
    if plan.graph.step_seconds and seconds > WORTH * plan.graph.step_seconds:
        free = max(0, (plan.budget_bytes or 0) - plan.peak_bytes)
        unused = f", while {format_bytes(free)} of the budget stay unused" if free else ""
        hints.append(
            f"the model checkpoints parts of itself: they run again whatever the budget, {len(forced)} ops for "
            f"{format_seconds(seconds)}{unused}. Leave that off (HF: gradient_checkpointing=False), and the planner chooses"
        )
    if request.returned_bytes > WORTH * plan.peak_bytes:
        hints.append(request.returned)
    return tuple(hints)


def give_once(hints: tuple[str, ...]) -> None:
    """Logs hints, each kind once in a process."""
    for hint in hints:
        kind = hint.partition(":")[0]
        if kind not in _given:
            _given.add(kind)
            log.warning("%s", hint)
