"""The profile of several graphs that all ranks of a distributed job use, made of the steps of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, best_effort_message
from autoremat.basics.warn import warn_user
from autoremat.compiler.exchange import session_at
from autoremat.planner.multigraph.step import Step
from autoremat.planner.multigraph.step_profile import StepProfile, share_out
from autoremat.request.request import Request


@dataclass(frozen=True)
class Gathers:
    """The gathers that the plans of a step may run again."""

    ranks: frozenset[int]
    """The ranks that gather together. All of them have to share the plans."""
    run_once: Callable[[], Step]
    """Returns the step with plans that run each gather once."""


def agreed_profile(
    step: Step, request: Request, place: str, settles_as: str = "the step", gathers: Gathers | None = None
) -> StepProfile:
    """Returns the profile under the limits of the request, for all ranks whose steps have the same graphs in the same order.

    The ranks meet at ``place``; each has a profile of its own if its graphs do not communicate. If ranks of ``gathers`` do not
    come, the plans run each gather once.

    Raises ``BudgetInfeasible`` if no choice of plans fits. If the request asks for the best effort, the step, which
    ``settles_as`` names for a warning, gets the minimum peak found instead.
    """
    limits = request.limits
    step, budget = _agreed_step(step, limits.bytes_for(step.reference_peak_bytes), request, place, gathers)
    try:
        profile = share_out(step, budget, limits.advice)
    except BudgetInfeasible as error:
        share, reference = limits.reference_share, step.reference_peak_bytes
        if request.must_fit:
            raise error.asked_as(share, reference) from None
        message = best_effort_message(settles_as, error.minimum_bytes, error.budget_bytes, share, reference)
        warn_user(message, BudgetWarning)
        profile = share_out(step, error.minimum_bytes)
    profile = replace(profile, must_fit=request.must_fit)
    return profile if limits.ledger is None else replace(profile, device_ledger=limits.ledger.of_step(profile.peak_bytes))


def _agreed_step(
    step: Step, budget: int | None, request: Request, place: str, gathers: Gathers | None
) -> tuple[Step, int | None]:
    """Returns the step and the budget in bytes of all ranks.

    Each moment has the base bytes of the rank with the most. The budgets of device and host are the least of all ranks.
    """
    structure = [*(f"{graph.key} {graph.block}" for graph in step.graphs), *step.order, str(len(step.moments))]
    kind = hashlib.sha256("\n".join(structure).encode()).hexdigest()
    terms = [kind, budget, step.host_bytes, [moment.base_bytes for moment in step.moments]]
    communicates = step.communicates or gathers is not None
    with session_at(place, request.options.agreement if communicates else "off") as session:
        found = {} if session is None else session.exchange("profile", terms)
    alike = {rank: own for rank, (other, *own) in found.items() if other == kind}
    if gathers is not None and not gathers.ranks <= alike.keys():
        return gathers.run_once(), budget
    if not alike:
        return step, budget
    budgets, hosts, bases = zip(*alike.values(), strict=True)
    moments = zip(step.moments, map(max, zip(*bases, strict=True)), strict=True)
    most = tuple(replace(moment, base_bytes=base) for moment, base in moments)
    host = min(one or 0 for one in hosts) if any(one is not None for one in hosts) else None
    return replace(step, moments=most, host_bytes=host), min((one for one in budgets if one is not None), default=None)
