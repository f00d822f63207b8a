"""Builds the error for a budget that no plan fits, with the tensors that are live at the minimum peak."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from autoremat.basics.errors import BudgetInfeasible, Occupant
from autoremat.basics.progress import now
from autoremat.compiler.joint_graph import note_on_sizes
from autoremat.compiler.planned_graph import WORTH, PlannedGraph, counted
from autoremat.planner.cost.datasheets import device_memory
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.report.peak_snapshot import RETURN_LESS, TensorCategory, parts_of_peak, peak_of, remedies_for_model, remedy_for

NAMES = {TensorCategory.WORKSPACE: "workspace of ", TensorCategory.GRADIENT: "gradient "}
"""Words before the name of a live tensor, by category."""


def _infeasible(
    planned: PlannedGraph, minimum: int, remedies: Iterable[str], smallest: Plan | None = None, **figures: Any
) -> BudgetInfeasible:
    """Returns the error that names the budget, the ``minimum`` peak and the tensors that are live at that peak.

    That is the peak of ``smallest``, which is the smallest plan of the search if not given, with its code. The limits add what
    their origin advises. ``figures`` are further ones of the error.
    """
    request, asked = planned.problem.request, planned.budget
    limits, remedies = request.limits, [*request.limits.remedies(minimum - (asked.bytes or 0)), *remedies]
    budget, smallest = asked.bytes or 0, smallest or planned.planning.smallest
    moment, parts = peak_of(smallest), parts_of_peak(smallest)
    live = () if moment is None else moment.live
    occupants = [Occupant(NAMES.get(t.sort, "") + t.name, t.bytes, t.module, t.source) for t in live]
    if minimum > smallest.peak_bytes:
        occupants.append(Occupant("code headroom", minimum - smallest.peak_bytes))
    if parts and not (request.returned and remedy_for(parts[0][0]) == RETURN_LESS):
        remedies.append(remedy_for(parts[0][0]))
    if request.returned_bytes > WORTH * minimum:
        remedies.append(request.returned)
    device = planned.priced.captured.device.name
    figures |= {
        "budget_bytes": budget,
        "minimum_bytes": minimum,
        "lower_bound_bytes": planned.planning.lower_bound_bytes,
        "occupants": occupants,
        "device": device,
        "remedies": remedies,
        "parts": parts,
        "gradient_bytes": 0 if moment is None else dict(moment.by_sort).get(TensorCategory.GRADIENT, 0),
        "device_bytes": device_memory(device),
    }
    reference = None if asked.reference is None else asked.reference.bytes
    return BudgetInfeasible(**figures).asked_as(limits.reference_share, reference)


def no_code_fits(planned: PlannedGraph, minimum: int) -> BudgetInfeasible:
    """Returns the error for a graph whose code needs ``minimum`` bytes at least, with every plan that was tried."""
    remedies = (note_on_sizes(planned.priced.joint.module.graph),)
    return _infeasible(planned, minimum, remedies, plan_file=planned.plan_file)


def no_plan_fits(planned: PlannedGraph) -> BudgetInfeasible:
    """Returns the error that names the minimum peak found, and that without constraints if there are any."""
    problem, priced, asked, smallest = planned.problem, planned.priced, planned.budget, planned.planning.smallest
    budget, headroom = asked.bytes or 0, asked.code_headroom_bytes
    figures: dict[str, Any] = {"is_simulated": problem.request.fuses}
    if planned.constrained.graph is not priced.graph:
        now("planning without constraints")
        host = problem.request.limits.host_bytes
        alone = Planner(priced.graph, problem.request.options.time_limit, limits=Limits(host_bytes=host))
        figures["unconstrained_bytes"] = alone.lowest.peak_bytes
    # The code of earlier attempts needed so much more than simulated. At the last attempt nothing is left of the budget, so the
    # excess is unknown.
    observed = max(0, asked.extra_headroom_bytes)
    extra = observed if observed < budget else 0
    if planned.free_seconds is not None and planned.plan_file is None:
        return _no_plan_keeps_both(planned, headroom + extra, figures)
    least = smallest.peak_bytes + headroom  # the assumed peak of generated code
    share = priced.share
    if share is not None:  # the plan of the minimum peak may miss another limit
        plans = (*planned.planner.front(), smallest)
        excess = min(share.less(extra).excess_bytes(counted(plan, priced)) for plan in plans)
        least = max(least, budget + max(1, excess))
    remedies = (
        planned.remedy,
        note_on_sizes(priced.joint.module.graph),
        *remedies_for_model(smallest, priced.graph),
    )
    return _infeasible(planned, least, remedies, plan_file=planned.plan_file, loss_chunks=priced.joint.chunks, **figures)


def _no_plan_keeps_both(planned: PlannedGraph, headroom: int, figures: dict[str, Any]) -> BudgetInfeasible:
    """Returns the error that names the minimum peak within the time, and the least slow-down within the bytes."""
    graphs, plan = [one for one in (planned, planned.whole) if one is not None], planned.planning.plan
    seconds = math.inf if plan is None else plan.predicted_seconds
    found = [(one.planning.least, one) for one in graphs if one.planning.least is not None]
    least, of = min(found, key=lambda pair: pair[0].peak_bytes)
    return _infeasible(
        of,
        max(least.peak_bytes + headroom, (planned.budget.bytes or 0) + 1),  # plans within the time have failed
        (planned.remedy,),
        least,
        max_slowdown=planned.problem.request.limits.max_slowdown,
        least_slowdown=None if plan is None else seconds / planned.free_seconds - 1.0 if planned.free_seconds else math.inf,
        untimed_bytes=min(one.planning.smallest.peak_bytes for one in graphs) + planned.budget.code_headroom_bytes,
        **figures,
    )
