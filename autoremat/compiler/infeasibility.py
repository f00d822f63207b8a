"""Builds the error for a budget that no plan fits, with the tensors that are live at the minimum peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autoremat.basics.errors import BudgetInfeasible, Occupant
from autoremat.basics.progress import now
from autoremat.compiler.dynamic_shapes import note_on_sizes
from autoremat.compiler.forms import host_remedy
from autoremat.compiler.hints import WORTH
from autoremat.compiler.joint_graph import PlanningContext
from autoremat.compiler.loss_chunking import ChunkingCandidate, ChunkingChoice
from autoremat.compiler.shares import counted
from autoremat.planner.cost.datasheets import device_memory
from autoremat.planner.multigraph.ledger import Share
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.report.binding import RETURN_LESS, parts_of_peak, remedies_for_model, remedy_for
from autoremat.report.peak_snapshot import TensorCategory, peak_of
from autoremat.request.request import Request

NAMES = {TensorCategory.WORKSPACE: "workspace of ", TensorCategory.GRADIENT: "gradient "}
"""Words before the name of a live tensor, by category."""


def infeasible(
    planning: PlanningResult,
    request: Request,
    budget: int,
    device: str,
    minimum: int,
    remedies: Iterable[str],
    **figures: Any,
) -> BudgetInfeasible:
    """Returns the error that names the budget, the minimum peak and the tensors that are live at that peak.

    The limits of ``request`` add what their origin advises, or the figures of all graphs that share the budget. ``figures`` are
    further ones of the error.
    """
    smallest, limits = planning.smallest, request.limits
    moment, parts = peak_of(smallest), parts_of_peak(smallest)
    live = () if moment is None else moment.live
    occupants = [Occupant(NAMES.get(t.sort, "") + t.name, t.bytes, t.module, t.source) for t in live]
    if minimum > smallest.peak_bytes:
        occupants.append(Occupant("code headroom", minimum - smallest.peak_bytes))
    figures |= {
        "budget_bytes": budget,
        "minimum_bytes": minimum,
        "lower_bound_bytes": planning.lower_bound_bytes,
        "occupants": occupants,
        "device": device,
        "remedies": (*limits.remedies(minimum - budget), *remedies, *_remedies(request, parts, minimum)),
        "parts": parts,
        "gradient_bytes": 0 if moment is None else dict(moment.by_sort).get(TensorCategory.GRADIENT, 0),
        "device_bytes": device_memory(device),
    }
    if limits.common is not None:
        figures |= limits.common.figures(max(0, minimum - budget), limits.advice)
    return BudgetInfeasible(**figures)


def _remedies(request: Request, parts: Sequence[tuple[str, int]], minimum: int) -> Iterator[str]:
    """Yields what lowers the largest part of the minimum peak, and what the function returns beside its loss."""
    if parts and not (request.returned and remedy_for(parts[0][0]) == RETURN_LESS):
        yield remedy_for(parts[0][0])
    if request.returned_bytes > WORTH * minimum:
        yield request.returned


def no_plan_fits(choice: ChunkingChoice, context: PlanningContext, budget: int, headroom: int) -> BudgetInfeasible:
    """Returns the error that names the minimum peak found, and that without constraints if there are any."""
    chosen, limits = choice.taken, context.request.limits
    unconstrained = None
    if chosen.constrained.graph is not chosen.priced.graph:
        now("planning without constraints")
        planner = Planner(chosen.priced.graph, context.request.options.time_limit, host_bytes=limits.host_bytes)
        unconstrained = planner.lowest.peak_bytes
    device = chosen.priced.captured.device.name
    if chosen.time is not None and chosen.plan_file is None:
        return _no_plan_keeps_both(choice, context, budget, headroom, unconstrained)
    smallest, room = chosen.planning.smallest, budget - headroom
    host = host_remedy(chosen.priced.captured, smallest, context.request, context.cuda_name, room)
    least = smallest.peak_bytes + headroom  # the assumed peak of generated code
    share = chosen.priced.step_share(limits)
    if share is not None:  # the plan of the minimum peak may miss another limit
        least = max(least, budget + _least_excess_bytes(chosen, context, share, budget))
    own = remedies_for_model(smallest, chosen.priced.graph)
    remedies: tuple[str, ...] = (choice.remedy, note_on_sizes(chosen.priced.joint.module.graph), host, *own)
    return infeasible(
        chosen.planning, context.request, budget, device, least, remedies, plan_file=chosen.plan_file,
        unconstrained_bytes=unconstrained, is_simulated=context.request.fuses, loss_chunks=chosen.chunks,
    )  # fmt: skip


def _least_excess_bytes(chosen: ChunkingCandidate, context: PlanningContext, share: Share, budget: int) -> int:
    """Returns the least bytes by which a plan found exceeds its ``share``.

    At the last attempt nothing is left of the budget, so the bytes that the code needs beyond its plan are unknown.
    """
    observed = max(0, context.extra_headroom_bytes)
    extra = observed if observed < budget else 0
    plans = (*chosen.planner.front(), chosen.planning.smallest)
    return max(1, min(share.excess_bytes(counted(plan, chosen.priced, context), extra) for plan in plans))


def _no_plan_keeps_both(
    choice: ChunkingChoice, context: PlanningContext, budget: int, headroom: int, unconstrained: int | None
) -> BudgetInfeasible:
    """Returns the error that names the minimum peak within the time, and the least slow-down within the bytes."""
    taken, observed = choice.taken, max(0, context.extra_headroom_bytes)
    candidates = [one for one in (taken, choice.whole) if one is not None]
    found = [(one.least, one.planning) for one in candidates if one.least is not None]
    assert taken.time is not None
    least, planning = min(found, key=lambda pair: pair[0].peak_bytes)
    # The code of earlier attempts needed more than simulated. At the last attempt nothing is left of the budget, so the excess
    # is unknown, but plans within the time have failed.
    minimum = least.peak_bytes + headroom + (observed if observed < budget else 0)
    return infeasible(
        dataclasses.replace(planning, smallest=least),
        context.request,
        budget,
        taken.priced.captured.device.name,
        max(minimum, budget + 1),
        (choice.remedy,),
        unconstrained_bytes=unconstrained,
        max_slowdown=taken.time.max_slowdown,
        least_slowdown=None if taken.planning.plan is None else taken.time.slowdown(taken.planning.plan),
        untimed_bytes=min(one.planning.smallest.peak_bytes for one in candidates) + headroom,
        is_simulated=context.request.fuses,
    )
