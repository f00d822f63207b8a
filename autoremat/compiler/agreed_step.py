"""The step of several graphs that all ranks of a distributed job use, made of the steps of each."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from autoremat.agreement.joining import session_at
from autoremat.agreement.session import Parts
from autoremat.basics.codec import Codec, plain
from autoremat.options.options import Options
from autoremat.planner.multigraph.step_profile import Step

CODEC = Codec(signed=True)


def agreed_step(
    step: Step, budget: int | None, options: Options, place: str, communicates: bool = True
) -> tuple[Step, int | None]:
    """Returns the step and the budget in bytes for all ranks that have a step of the same graphs in the same order.

    Each moment has the base bytes of the rank with the most. The budget is the least of all ranks. Plans and seconds are those
    of the lowest rank. Without other ranks, ``step`` and ``budget`` return as they are. The ranks meet at ``place``;
    ``communicates`` is False if a rank may have a step of its own when it compiles again.
    """
    with session_at(place, options.agreement, communicates=communicates) as session:
        if session is None:
            return step, budget
        structure = [*(f"{graph.key} {graph.block}" for graph in step.graphs), *step.order, str(len(step.moments))]
        alike = session.split("step", hashlib.sha256("\n".join(structure).encode()).hexdigest())

        def join(parts: Parts) -> dict[str, Any]:
            steps = [CODEC.read(Step, part["step"]) for part in parts.values()]
            budgets = [part["budget"] for part in parts.values() if part["budget"] is not None]
            moments = zip(*(step.moments for step in steps), strict=True)
            most = tuple(replace(same[0], base_bytes=max(moment.base_bytes for moment in same)) for same in moments)
            return {"step": plain(replace(steps[0], moments=most)), "budget": min(budgets, default=None)}

        agreed = alike.round("profile", {"step": plain(step), "budget": budget}, join)
    return CODEC.read(Step, agreed["step"]), agreed["budget"]
