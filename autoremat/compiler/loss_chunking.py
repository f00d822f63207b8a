"""Plans the graph with and without a chunked loss, and chooses between them (``passes/chunked_loss``).

Chunking changes the rounding of results. By default, chunked candidates are planned only if nothing else fits the budget.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from autoremat.basics.errors import ChunkingUnsupported, OptionWarning
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph, capture_and_price
from autoremat.passes.chunked_loss.chunk_loss import chunk_loss
from autoremat.passes.pipeline import run_passes
from autoremat.planner.constraints.constraints import ConstrainedGraph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.bound_forms import PlanSource
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.time_budget import TimeBudget
from autoremat.request.limits import Limits
from autoremat.torch_private import fake_tensors
from autoremat.torch_private.higher_order import chunked_by

NUMBERS_OF_CHUNKS = (8, 16)
"""Numbers of chunks that are tried, in this order, if the user gives none. A chunk costs another read of the projection's
weight and about twenty ops."""


@dataclass(frozen=True)
class ChunkingCandidate:
    """The graph as it is, or with a chunked loss, and its plans. ``chunks`` is 1 for the graph as it is."""

    priced: PricedGraph
    planner: PlanSource
    constrained: ConstrainedGraph
    planning: PlanningResult
    chunks: int = 1
    plan_file: str | None = None
    """Name of the plan file that is applied instead of a search."""
    time: TimeBudget | None = None
    """The budget of time; None if there is none."""
    least: Plan | None = None
    """The plan of the minimum peak found within the budget of time, if no plan keeps to both budgets."""

    def keeps_time_with(self, plan: Plan) -> bool:
        """Returns True if ``plan`` keeps to the budget of time, if there is one."""
        return self.time is None or self.time.keeps(plan)

    @property
    def keeps_time(self) -> bool:
        """True if the plan, if there is one, keeps to the budget of time."""
        return self.planning.plan is None or self.keeps_time_with(self.planning.plan)

    @property
    def fits(self) -> bool:
        """True if there is a plan within all budgets."""
        return self.planning.plan is not None and self.keeps_time

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the step under the plan; infinite if no plan fits."""
        return math.inf if self.planning.plan is None else self.planning.plan.predicted_seconds


Contend = Callable[[PricedGraph, int, ChunkingCandidate | None], ChunkingCandidate]
"""Plans a graph whose loss has so many chunks, after the candidate that was planned first, if there is one."""


@dataclass(frozen=True)
class ChunkingChoice:
    """The candidate that is taken and the candidate without chunks.

    ``whole`` is None if the graph without chunks was not planned. ``remedy`` tells the user how to make the loss chunkable, if
    it is not.
    """

    taken: ChunkingCandidate
    whole: ChunkingCandidate | None
    remedy: str = ""


def choose_chunking(priced: PricedGraph, context: PlanningContext, contend: Contend) -> ChunkingChoice:
    """Returns the best candidate. Warns if the user asks for chunks and the loss cannot be chunked.

    The fastest candidate that fits is best; if none fits, the one with the minimum peak.
    """
    wanted = False if priced.joint.is_region else _wanted(context)
    asked = wanted is True or type(wanted) is int
    is_shared = priced.step_share(context.request.limits) is not None
    if is_shared and asked:
        _warn("the budget of a profiled step is shared out among its graphs as they are")
    always = type(wanted) is int and not is_shared
    if wanted is False or is_shared or (context.request.options.plan and not always):
        only = contend(priced, 1, None)
        return ChunkingChoice(only, only)
    found = [] if always else [contend(priced, 1, None)]
    whole, remedy = next(iter(found), None), ""
    try:
        for candidate in _chunked(priced, context, contend, found):
            found.append(candidate)
    except ChunkingUnsupported as reason:
        remedy = reason.remedy
        if asked:
            by = chunked_by(priced.joint.module)
            _warn(f"{by} computes the loss in chunks already" if by else str(reason))
        found = found or [contend(priced, 1, None)]
    return ChunkingChoice(best_of(found, context.request.limits), whole, remedy)


def best_of(found: Sequence[ChunkingCandidate], limits: Limits) -> ChunkingCandidate:
    """Returns the fastest candidate that fits; if none fits, the one with the minimum peak."""
    fitting = [candidate for candidate in found if candidate.fits]
    fitting = fitting or [candidate for candidate in found if candidate.planning.plan is not None]
    if fitting:
        return min(fitting, key=_rank_under(limits))
    return min(found, key=lambda candidate: candidate.planning.smallest.peak_bytes)


def _wanted(context: PlanningContext) -> bool | int | str:
    """Returns the option ``chunk_loss``, or the number of chunks under which a plan was made that is applied again."""
    if context.told is None:
        return context.request.options.chunk_loss
    return context.told.chunks if context.told.chunks > 1 else False


def _rank_under(limits: Limits) -> Callable[[ChunkingCandidate], float]:
    """Returns the figure of a candidate that shall be least: its seconds, or its peak under a budget of time alone."""
    if not limits.bounds_memory and limits.max_slowdown is not None:
        return lambda candidate: candidate.planning.plan.peak_bytes if candidate.planning.plan is not None else math.inf
    return lambda candidate: candidate.step_seconds


def _chunked(
    priced: PricedGraph, context: PlanningContext, contend: Contend, found: Sequence[ChunkingCandidate]
) -> Iterator[ChunkingCandidate]:
    """Yields chunked candidates; under ``"auto"`` only until one of ``found`` fits.

    Raises ``ChunkingUnsupported`` if the loss cannot be chunked.
    """
    wanted = _wanted(context)
    numbers = (wanted,) if type(wanted) is int else NUMBERS_OF_CHUNKS
    for number in numbers:
        if wanted == "auto" and any(candidate.fits for candidate in found):
            return
        now("chunking the loss")
        module = fake_tensors.copied_module(priced.captured.joint)
        (chunks,) = run_passes(module, partial(chunk_loss, chunks=int(number)))
        if any(candidate.chunks == chunks for candidate in found):
            return  # there are too few rows for more chunks
        again = capture_and_price(dataclasses.replace(priced.joint, module=module), context)
        assert again is not None
        yield contend(again, chunks, next(iter(found), None))


def _warn(reason: str) -> None:
    warn_user(f"chunk_loss has no effect on a graph: {reason}", OptionWarning)
