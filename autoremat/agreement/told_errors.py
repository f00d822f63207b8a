"""Errors as JSON data, in which they travel between ranks. Errors are never pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoremat.agreement.channel import Channel
from autoremat.agreement.presence import in_words
from autoremat.basics.errors import AgreementError, BudgetInfeasible, Occupant, find_cause


def described(error: BaseException) -> dict[str, Any]:
    """Returns an error as JSON data."""
    infeasible = find_cause(error, BudgetInfeasible)
    if infeasible is not None:
        return {"infeasible": infeasible.figures()}
    lost = find_cause(error, AgreementError)
    if lost is not None:
        return {"lost": lost.rank, "text": str(lost)}
    return {"text": in_words(error)}


def restored(told: Mapping[str, Any], rank: int, channel: Channel) -> AgreementError | BudgetInfeasible:
    """Returns the error that rank ``rank`` has described, as it is put on the rank of ``channel``."""
    if "infeasible" in told:
        figures = dict(told["infeasible"])
        figures["occupants"] = [Occupant(**one) for one in figures["occupants"]]
        return BudgetInfeasible(**{"rank": rank} | {name: value for name, value in figures.items() if value is not None})
    if "lost" not in told:
        text = f"compiling a graph failed on rank {rank}, so all ranks that share it stop: {told['text']}"
        return AgreementError(text, rank)
    if told["lost"] == channel.rank:
        return AgreementError(
            f"this process, rank {channel.rank}, stood still for {channel.paused:.0f} s while a graph was compiled, and rank "
            f"{rank} waits {channel.silence:g} s at most, so all ranks that share the graph stop. It was stopped, as by a "
            "debugger, a signal or a machine that slept, or had no time on its processor",
            channel.rank,
        )
    return AgreementError(told["text"], told["lost"])
