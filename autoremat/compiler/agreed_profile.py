"""The profile of several graphs that all ranks of a distributed job use, made of the steps of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autoremat.agreement.joining import session_at
from autoremat.agreement.session import Parts, grouped
from autoremat.basics.codec import Codec, plain
from autoremat.basics.errors import BudgetInfeasible, BudgetWarning, best_effort_message
from autoremat.basics.warn import warn_user
from autoremat.planner.multigraph.step_profile import Step, StepProfile
from autoremat.request.request import Request

CODEC = Codec(signed=True)


@dataclass(frozen=True)
class Gathers:
    """The gathers that the plans of a step may run again."""

    ranks: frozenset[int]
    """The ranks that gather together. All of them have to share the plans."""
    run_once: Callable[[], Step]
    """Returns the step with plans that run each gather once."""


@dataclass(frozen=True)
class AgreedStep:
    """The step and the budget in bytes that all ranks have in common."""

    step: Step
    budget_bytes: int | None

    @cached_property
    def profile(self) -> StepProfile | None:
        """The step under its budget; None if no choice of plans fits."""
        try:
            return self.step.shared_out(self.budget_bytes)
        except BudgetInfeasible:
            return None


def agreed_profile(step: Step, request: Request, place: str, settles_as: str = "the step") -> StepProfile:
    """Returns the profile under the limits of the request for all ranks that have a step of the same graphs in the same order.

    The ranks meet at ``place``. Raises ``BudgetInfeasible`` as :func:`profile_within` does.
    """
    return profile_within(agreed_step(step, request, place), request, settles_as)


def profile_within(agreed: AgreedStep, request: Request, settles_as: str) -> StepProfile:
    """Returns the profile of a step under its budget.

    Raises ``BudgetInfeasible`` if no choice of plans fits. If the request asks for the best effort, the step, which
    ``settles_as`` names for a warning, gets the minimum peak found instead.
    """
    step, budget, limits = agreed.step, agreed.budget_bytes, request.limits
    profile = agreed.profile
    if profile is None:
        try:
            profile = step.shared_out(budget, limits.advice)
        except BudgetInfeasible as error:
            share, reference = limits.reference_share, step.reference_peak_bytes
            if request.must_fit:
                raise error.asked_as(share, reference) from None
            message = best_effort_message(settles_as, error.minimum_bytes, error.budget_bytes, share, reference)
            warn_user(message, BudgetWarning)
            profile = step.shared_out(error.minimum_bytes)
    profile = replace(profile, must_fit=request.must_fit)
    return profile if limits.ledger is None else replace(profile, device_ledger=limits.ledger.of_step(profile.peak_bytes))


def agreed_step(
    step: Step, request: Request, place: str, communicates: bool = True, gathers: Gathers | None = None
) -> AgreedStep:
    """Returns the step and the budget of all ranks that have a step of the same graphs in the same order.

    Each moment has the base bytes of the rank with the most. The budgets of device and host are the least of all ranks. Plans
    and seconds are those of the lowest rank.

    The ranks meet at ``place``. ``communicates`` is False if each rank may have a step of its own. If ranks
    of ``gathers`` do not come, the plans run each gather once.
    """
    budget = request.limits.bytes_for(step.reference_peak_bytes)
    structure = [*(f"{graph.key} {graph.block}" for graph in step.graphs), *step.order, str(len(step.moments))]
    kind = hashlib.sha256("\n".join(structure).encode()).hexdigest()

    def join(parts: Parts) -> dict[str, Any]:
        """Returns the joint step of each kind."""
        return {kind: _joint([*alike.values()]) for kind, alike in grouped(parts, "kind").items()}

    with session_at(place, request.options.agreement) if communicates else nullcontext() as session:
        members = () if session is None else session.members
        if gathers is not None and not gathers.ranks.issubset(members):
            step = gathers.run_once()
        if session is None:
            return AgreedStep(step, budget)
        agreed = session.round("profile", {"kind": kind, "step": plain(step), "budget": budget}, join)[kind]
    return AgreedStep(CODEC.read(Step, agreed["step"]), agreed["budget"])


def _joint(alike: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the step and the budget of ranks with a step of one kind, of which ``alike`` are the parts."""
    steps = [CODEC.read(Step, part["step"]) for part in alike]
    budgets = [part["budget"] for part in alike if part["budget"] is not None]
    moments = zip(*(step.moments for step in steps), strict=True)
    most = tuple(replace(same[0], base_bytes=max(moment.base_bytes for moment in same)) for same in moments)
    hosts = [step.host_bytes for step in steps if step.host_bytes is not None]
    host = min(hosts) if len(hosts) == len(steps) else None if not hosts else 0
    return {"step": plain(replace(steps[0], moments=most, host_bytes=host)), "budget": min(budgets, default=None)}
