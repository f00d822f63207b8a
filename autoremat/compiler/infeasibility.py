"""Builds the error for a budget that no plan fits, with the tensors that are live at the minimum peak."""

from __future__ import annotations

from autoremat.basics.errors import BudgetInfeasible, Occupant
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import PlanningResult
from autoremat.report.peak_snapshot import TensorCategory, peak_of


def occupants_of(plan: Plan, minimum: int | None) -> list[Occupant]:
    """Returns the tensors and workspaces that are live at the peak of ``plan``.

    If ``minimum`` bytes exceed that peak, a last entry holds the difference, which is headroom for generated code.
    """
    moment = peak_of(plan, None)
    found = [] if moment is None else [
        Occupant(t.name if t.sort is not TensorCategory.WORKSPACE else f"workspace of {t.name}", t.bytes, t.module, t.source)
        for t in moment.live
    ]  # fmt: skip
    rest = (minimum or 0) - plan.peak_bytes
    return [*found, Occupant("code headroom", rest)] if rest > 0 else found


def infeasible(
    planning: PlanningResult,
    budget: int,
    device: str,
    minimum: int | None = None,
    plan_file: str | None = None,
    unconstrained: int | None = None,
    remedy: str = "",
    allocated: int | None = None,
    **time_figures: float | int | None,
) -> BudgetInfeasible:
    """Returns the error that names the budget, the minimum peak and the tensors that are live at that peak.

    ``time_figures`` are those of a budget of time, if there is one.
    """
    smallest = planning.smallest
    needed = minimum if allocated is None else allocated
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
        **time_figures,  # type: ignore[arg-type]
    )
