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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from autoremat.basics.errors import BudgetWarning, OptionsError, is_user_error, planning_error
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.compiler.peers import Gathers, agreed_profile
from autoremat.compiler.problem import Problem
from autoremat.compiler.step_of_parts import StepOfParts, step_of
from autoremat.planner.graph.op import SHARDS
from autoremat.planner.multigraph.open_calls import OpenCalls
from autoremat.planner.multigraph.step_profile import ENDED_BY_CLOCK, StepProfile
from autoremat.planner.plans.limits import Share
from autoremat.request.budgets import note_grant, request_of_share, warn_of_open_calls
from autoremat.request.request import CommonBudget, Request
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private import split_graphs
from autoremat.torch_private.dynamo import asks_to_restart
from autoremat.torch_private.process_groups import job

log = logging.getLogger("autoremat")


class Words(NamedTuple):
    """How texts name the parts of a graph, and how to compile it as a whole."""

    part: str
    cause: str
    whole: str
    loss: str
    """What the graph as a whole lacks."""

    @property
    def parts(self) -> str:
        """The name of all parts."""
        return f"{self.part}s {self.cause}"


BUCKETS = Words(
    "bucket", "of DistributedDataParallel", "torch._dynamo.config.optimize_ddp = False", "overlaps no communication"
)
PARTS = Words("part", "for early gradients", "early_gradients=False", "hands over all gradients at its end")


@dataclass(frozen=True)
class SharedBudget:
    """The budget of a split graph, shared out. ``shares`` has each part's; None for a part without a choice of plans."""

    profile: StepProfile
    shares: tuple[Share | None, ...]


_shared: WeakKeyDictionary[Any, SharedBudget | None] = WeakKeyDictionary()
"""The budgets of the graphs that are compiled in parts now. None if a graph could not be planned and falls back."""


def request_in_split(problem: Problem, around: Surroundings) -> Request:
    """Returns the request for a graph: with its share of the common budget if it is a part, else ``request``.

    Raises ``BudgetInfeasible`` if the parts do not fit together, and ``OptionsError`` for a budget of time.
    """
    request = problem.request
    split = _split_of(request)
    if split is None:
        return request
    # Also within a broken function, they fit by themselves.
    request = Request.of(request.options, request.limits, request.calls)
    if split.number == 0:  # later parts are not known as graphs any more
        if request.calls != OpenCalls():
            warn_of_open_calls()
        if split.owner not in _shared:
            _shared[split.owner] = planned_together(split, request, problem.patches)
        first = _shared[split.owner]
        note_grant(request, around, None if first is None else first.profile.budget_bytes)
    shared = _shared.get(split.owner)
    share = None if shared is None else shared.shares[split.number]
    if shared is None or share is None:
        return request
    profile, words = shared.profile, _words_of(split)
    common = CommonBudget(profile, f"{words.part} {split.number + 1}", _advice_of(split))
    return request_of_share(share, profile, request.options, request.limits.advice, common)


def _words_of(split: split_graphs.Split) -> Words:
    return BUCKETS if split.hooks is None else PARTS


def _advice_of(split: split_graphs.Split) -> str:
    """Returns the advice for an error whose figures are those of all parts."""
    words = _words_of(split)
    if split.hooks is None:
        more = "gradient_as_bucket_view=True keeps no second copy of the gradients"
    elif split.hooks.are_unknown:
        more = "gradients count as kept to the end of the step. If the hooks free them, hooks_free_gradients=True says so"
    else:
        more = f"early_gradients={2 * split.count} frees gradients earlier, in more parts"
    return (
        f"the figures are those of the {split.count} {words.parts} together. {words.whole} compiles them as one graph, which "
        f"shares memory better and {words.loss}; {more}"
    )


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
        words = _words_of(split)
        raise OptionsError(
            f"max_slowdown bounds the time of one graph, and this one is split into {words.parts} that share memory_budget: "
            f"leave one of them out, or set {words.whole}"
        )
    return split


def planned_together(split: split_graphs.Split, request: Request, patches: Mapping[str, Any]) -> SharedBudget | None:
    """Returns the budget shared out among all parts; None if one of them cannot be planned and falls back.

    Raises ``BudgetInfeasible`` if no choice of plans fits and the request does not ask for the best effort.
    """
    words = _words_of(split)

    def traced(may_repeat: bool) -> StepOfParts:
        with split_graphs.tracing_undone():
            return step_of(split, request, patches, may_repeat)

    now(f"planning {split.count} {words.part}s together")
    try:
        found = traced(SHARDS not in request.forms)
    except Exception as error:  # models and ops are open-ended, so any error may occur
        if is_user_error(error) or asks_to_restart(error):
            raise
        if not request.falls_back:
            raise planning_error(error, f"the {split.count} {words.part}s of a graph") from error
        log.info("planning the parts together failed", exc_info=error)
        return None
    if not found.step.graphs:
        return None
    repeats = found.gathering_ranks and job() is not None
    gathers = Gathers(found.gathering_ranks, lambda: traced(may_repeat=False).step) if repeats else None
    place = f"{split.count} {words.parts}"
    advised = replace(request, limits=replace(request.limits, advice=(*request.limits.advice, _advice_of(split))))
    profile = agreed_profile(found.step, advised, place, f"the step of {place}", gathers)
    log.info("%s share one budget: %s", place, profile.line())
    shares = (None if entry is None else profile.shares[entry] for entry in found.entries)
    notes = (_note(profile, split, number) for number in range(split.count))
    noted = (None if share is None else replace(share, note=note) for share, note in zip(shares, notes, strict=True))
    return SharedBudget(profile, tuple(noted))


def _note(profile: StepProfile, split: split_graphs.Split, number: int) -> str:
    """Returns the note in the report of part ``number``."""
    words = _words_of(split)
    note = (
        f"{words.part} {number + 1} of {split.count} {words.cause}: they share one budget of "
        f"{format_bytes(profile.budget_bytes or 0)}, of which {format_bytes(profile.peak_bytes)} are planned (baseline "
        f"{format_bytes(profile.baseline_peak_bytes)}, minimum {format_bytes(profile.minimum_peak_bytes)})"
    )
    note += f"; {split.hooks.note}" if split.hooks is not None and split.hooks.note else ""
    return note + (f"; plans {ENDED_BY_CLOCK}" if profile.step.ended_by_clock else "")
