"""Builds the error for a budget that no plan fits, with the tensors that are live at the minimum peak."""

from __future__ import annotations

import dataclasses

from autoremat.basics.errors import BudgetInfeasible, Occupant
from autoremat.basics.units import format_bytes
from autoremat.compiler.counting import Count, expandable_remedy
from autoremat.compiler.joint_graph import PlanningContext
from autoremat.compiler.loss_chunking import ChunkingCandidate, ChunkingChoice
from autoremat.compiler.shares import counted
from autoremat.planner.cost import device_memory
from autoremat.planner.multigraph.ledger import Share
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner, PlanningResult
from autoremat.report.peak_snapshot import TensorCategory, peak_of

NAMES = {TensorCategory.WORKSPACE: "workspace of ", TensorCategory.GRADIENT: "gradient "}
"""Words before the name of a live tensor, by category."""


def occupants_of(plan: Plan, minimum: int | None) -> list[Occupant]:
    """Returns the tensors and workspaces that are live at the peak of ``plan``.

    If ``minimum`` bytes exceed that peak, a last entry holds the difference, which is headroom for generated code.
    """
    moment = peak_of(plan, None)
    live = () if moment is None else moment.live
    found = [Occupant(NAMES.get(t.sort, "") + t.name, t.bytes, t.module, t.source) for t in live]
    rest = (minimum or 0) - plan.peak_bytes
    return [*found, Occupant("code headroom", rest)] if rest > 0 else found


def memory_notes(budget: int | None, device: str) -> tuple[str, ...]:
    """Returns a note on a budget that exceeds the memory of the device, by its data sheet; empty if there is none."""
    memory = device_memory(device)
    if budget is None or memory is None or budget <= memory:
        return ()
    return (f"the budget is {format_bytes(budget)}, and {device} has {format_bytes(memory)} of memory",)


def infeasible(
    planning: PlanningResult,
    budget: int,
    device: str,
    minimum: int | None = None,
    plan_file: str | None = None,
    unconstrained: int | None = None,
    remedy: str = "",
    allocated: int | None = None,
    is_simulated: bool = False,
    **time_figures: float | int | None,
) -> BudgetInfeasible:
    """Returns the error that names the budget, the minimum peak and the tensors that are live at that peak.

    ``time_figures`` are those of a budget of time, if there is one. ``is_simulated`` says that Inductor will compile the graph,
    and no code shows the minimum peak.
    """
    smallest = planning.smallest
    needed = minimum if allocated is None else allocated
    moment = peak_of(smallest, 0)
    return BudgetInfeasible(
        budget_bytes=budget,
        minimum_bytes=smallest.peak_bytes if minimum is None else minimum,
        lower_bound_bytes=planning.lower_bound_bytes,
        occupants=occupants_of(smallest, needed),
        device=device,
        plan_file=plan_file,
        unconstrained_bytes=unconstrained,
        remedy=remedy,
        allocated_bytes=allocated,
        gradient_bytes=0 if moment is None else dict(moment.by_sort).get(TensorCategory.GRADIENT, 0),
        device_bytes=device_memory(device),
        is_simulated=is_simulated,
        **time_figures,  # type: ignore[arg-type]
    )


def no_plan_fits(
    choice: ChunkingChoice, context: PlanningContext, budget: int, headroom: int, bounded: Count | None
) -> BudgetInfeasible:
    """Returns the error that names the minimum peak found, and that without constraints if there are any.

    If the budget counts reserved bytes, the minimum is the reserved bytes of the plan of the minimum peak.
    """
    chosen = choice.taken
    unconstrained = None
    if chosen.constrained.graph is not chosen.priced.graph:
        unconstrained = Planner(chosen.priced.graph, context.options.time_limit).search.smallest.peak_bytes
    device = chosen.priced.captured.device.name
    if chosen.time is not None and chosen.plan_file is None:
        return _no_plan_keeps_both(choice, context, budget, headroom, unconstrained)
    least = chosen.planning.smallest.peak_bytes + headroom  # the assumed peak of generated code
    share = chosen.priced.share_in(context.options)
    if share is not None:  # the plan of the minimum peak may miss another limit
        least = max(least, budget + _least_excess_bytes(chosen, context, share, budget))
    if bounded is None:
        error = infeasible(
            chosen.planning, budget, device, least, chosen.plan_file, unconstrained, choice.remedy, is_simulated=context.fuses
        )
    else:
        reserved = bounded.plan_report(chosen.planning.smallest)
        remedy = "; ".join(filter(None, (expandable_remedy(reserved, budget), choice.remedy)))
        error = infeasible(
            chosen.planning, budget, device, reserved.bytes, chosen.plan_file, unconstrained, remedy, least, context.fuses
        )
    if context.options.device_ledger is not None:
        context.options.device_ledger.advise(error)
    return error


def _least_excess_bytes(chosen: ChunkingCandidate, context: PlanningContext, share: Share, budget: int) -> int:
    """Returns the least bytes by which a plan found exceeds its ``share``.

    At the last attempt nothing is left of the budget, so the bytes that the code needs beyond its plan are unknown.
    """
    observed = max(0, context.extra_headroom_bytes)
    extra = observed if observed < budget else 0
    plans = (*chosen.planner.search.spread_out(), chosen.planning.smallest)
    return max(1, min(share.excess_bytes(counted(plan, chosen.priced, context, share), extra) for plan in plans))


def _no_plan_keeps_both(
    choice: ChunkingChoice, context: PlanningContext, budget: int, headroom: int, unconstrained: int | None
) -> BudgetInfeasible:
    """Returns the error that names the minimum peak within the time, and the least slow-down within the bytes."""
    taken, observed = choice.taken, max(0, context.extra_headroom_bytes)
    forms = [form for form in (taken, choice.whole) if form is not None]
    found = [(form.least, form.planning) for form in forms if form.least is not None]
    assert taken.time is not None
    least, planning = min(found, key=lambda pair: pair[0].peak_bytes)
    # The code of earlier attempts needed more than simulated. At the last attempt nothing is left of the budget, so the excess
    # is unknown, but plans within the time have failed.
    minimum = least.peak_bytes + headroom + (observed if observed < budget else 0)
    return infeasible(
        dataclasses.replace(planning, smallest=least),
        budget,
        taken.priced.captured.device.name,
        max(minimum, budget + 1),
        unconstrained=unconstrained,
        remedy=choice.remedy,
        max_slowdown=taken.time.max_slowdown,
        least_slowdown=None if taken.planning.plan is None else taken.time.slowdown(taken.planning.plan),
        untimed_bytes=min(form.planning.smallest.peak_bytes for form in forms) + headroom,
        is_simulated=context.fuses,
    )
