"""One budget for the parts into which a graph is split.

Torch splits one into buckets under ``DistributedDataParallel``, and ``early_gradients.py`` for hooks on gradients. Each part
comes to the backend by itself, in the sequence of the forward. When the first one comes, all parts are traced and planned,
without compiling or running any. Their plans share the budget by the ledger of the whole step (``step_of_parts.py``). Each part
is then compiled under its share, as under a step profile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from autoremat.basics.errors import (
    BudgetWarning,
    OptionsError,
    is_user_error,
    planning_error,
)
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.compiler.agreed_profile import Gathers, agreed_profile
from autoremat.compiler.lowering import GraphSource
from autoremat.compiler.split_words import advice_of, words_of
from autoremat.compiler.step_of_parts import PartGraph, TracedParts, step_of
from autoremat.planner.graph.forms import SHARDS
from autoremat.planner.multigraph.ledger import Share
from autoremat.planner.multigraph.open_calls import OpenCalls
from autoremat.planner.multigraph.step import Step
from autoremat.planner.multigraph.step_profile import ENDED_BY_CLOCK, StepProfile
from autoremat.request.budgets import warn_of_open_calls
from autoremat.request.grants import note_grant
from autoremat.request.limits import CommonBudget, Limits
from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private import split_graphs
from autoremat.torch_private.dynamo import asks_to_restart
from autoremat.torch_private.processes import job

log = logging.getLogger("autoremat")


@dataclass(frozen=True)
class SharedBudget:
    """The budget of a split graph, shared out. ``shares`` has each part's; None for a part without a choice of plans."""

    profile: StepProfile
    shares: tuple[Share | None, ...]


_shared: WeakKeyDictionary[Any, SharedBudget | None] = WeakKeyDictionary()
"""The budgets of the graphs that are compiled in parts now. None if a graph could not be planned and falls back."""


def request_in_split(source: GraphSource, request: Request, around: Surroundings) -> Request:
    """Returns the request for a graph: with its share of the common budget if it is a part, else ``request``.

    Raises ``BudgetInfeasible`` if the parts do not fit together, and ``OptionsError`` for a budget of time.
    """
    split = _split_of(request)
    if split is None:
        return request
    request = Request.of(
        request.options, request.limits, request.calls
    )  # also within a broken function, they fit by themselves
    if split.number == 0:  # later parts are not known as graphs any more
        if request.calls != OpenCalls():
            warn_of_open_calls()
        if split.owner not in _shared:
            _shared[split.owner] = planned_together(split, request, source.patches)
        first = _shared[split.owner]
        note_grant(request, around, None if first is None else first.profile.budget_bytes)
    shared = _shared.get(split.owner)
    share = None if shared is None else shared.shares[split.number]
    if shared is None or share is None:
        return request
    common = CommonBudget(shared.profile, f"{words_of(split).part} {split.number + 1}", advice_of(split))
    ledger, advice = shared.profile.device_ledger, request.limits.advice
    host = shared.profile.step.host_bytes
    limits = Limits(share.peak_bytes, step_share=share, host_bytes=host, ledger=ledger, common=common, advice=advice)
    return replace(request, limits=limits, calls=OpenCalls())


def _split_of(request: Request) -> split_graphs.Split | None:
    """Returns the split whose part is compiled now; None if its parts need no common budget."""
    limits = request.limits
    if not limits.bounds_memory or limits.step_share is not None or limits.takes_whole_reference:
        return None
    if request.options.plan or not split_graphs.is_split():
        return None
    split = split_graphs.current_split()
    if split is None:
        warn_user(
            "DistributedDataParallel splits this graph into buckets, but this version of torch does not show them: each keeps "
            "memory_budget by itself, and together they may exceed it. Set torch._dynamo.config.optimize_ddp = False, or pass "
            "the result of autoremat.profile_step as memory_budget",
            BudgetWarning,
        )
    elif limits.max_slowdown is not None:
        words = words_of(split)
        raise OptionsError(
            f"max_slowdown bounds the time of one graph, and this one is split into {words.parts} that share memory_budget: "
            f"leave one of them out, or set {words.whole}"
        )
    return split


def planned_together(split: split_graphs.Split, request: Request, patches: Mapping[str, Any]) -> SharedBudget | None:
    """Returns the budget shared out among all parts; None if one of them cannot be planned and falls back.

    Raises ``BudgetInfeasible`` if no choice of plans fits and the request does not ask for the best effort.
    """
    words = words_of(split)
    now(f"planning {split.count} {words.part}s together")
    try:
        with split_graphs.tracing_undone():
            traced = TracedParts(split, request, patches, may_repeat=SHARDS not in request.forms)
            step, graphs = step_of(traced)
    except Exception as error:  # models and ops are open-ended, so any error may occur
        if is_user_error(error) or asks_to_restart(error):
            raise
        if not request.falls_back:
            raise planning_error(error, f"the {split.count} {words.part}s of a graph") from error
        log.info("planning the parts together failed", exc_info=error)
        return None
    if not step.graphs:
        return None

    def run_gathers_once() -> Step:
        with split_graphs.tracing_undone():
            return step_of(TracedParts(split, request, patches, may_repeat=False))[0]

    gathers = Gathers(traced.gathering_ranks, run_gathers_once) if traced.gathering_ranks and job() is not None else None
    place = f"{split.count} {words.parts}"
    advised = replace(request, limits=replace(request.limits, advice=(*request.limits.advice, advice_of(split))))
    profile = agreed_profile(step, advised, place, f"the step of {place}", gathers)
    log.info("%s share one budget: %s", place, profile.line())
    return SharedBudget(
        profile, tuple(None if one is None else _share(profile, one, split, number) for number, one in enumerate(graphs))
    )


def _share(profile: StepProfile, graph: PartGraph, split: split_graphs.Split, number: int) -> Share | None:
    share, words = profile.shares[graph.number], words_of(split)
    note = (
        f"{words.part} {number + 1} of {split.count} {words.cause}: they share one budget of "
        f"{format_bytes(profile.budget_bytes or 0)}, of which {format_bytes(profile.peak_bytes)} are planned (baseline "
        f"{format_bytes(profile.baseline_peak_bytes)}, minimum {format_bytes(profile.minimum_peak_bytes)})"
    )
    note += f"; {split.hooks.note}" if split.hooks is not None and split.hooks.note else ""
    note += f"; plans {ENDED_BY_CLOCK}" if profile.step.ended_by_clock else ""
    return None if share is None else replace(share, known=graph.known, note=note)
