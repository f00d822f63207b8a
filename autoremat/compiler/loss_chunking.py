"""Plans the graph with and without a chunked loss, and chooses between them (``passes/chunked_loss``).

Chunking changes the rounding of results. By default, chunked candidates are planned only if nothing else fits the budget.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

from autoremat.basics.errors import BudgetWarning, ChunkingUnsupported
from autoremat.capture.capture import Capture
from autoremat.options.options import Options
from autoremat.passes.chunked_loss.chunk_loss import chunk_loss
from autoremat.planner.constraints.constraints import ConstrainedGraph
from autoremat.planner.cost import Pricing
from autoremat.planner.search.planner import Planner, PlanningResult
from autoremat.torch_private import fake_tensors

NUMBERS_OF_CHUNKS = (8, 16)
"""Numbers of chunks that are tried, in this order, if the user gives none. A chunk costs another read of the projection's
weight and about twenty ops."""


@dataclass(frozen=True)
class ChunkingCandidate:
    """The graph as it is, or with a chunked loss, and its plans. ``parts`` is the number of chunks; 1 means no chunking."""

    captured: Capture
    pricing: Pricing
    planner: Planner
    ordered: ConstrainedGraph
    planning: PlanningResult
    parts: int = 1

    @property
    def step_seconds(self) -> float:
        """Seconds of the step under the plan, with its recomputation and its saves; infinite if no plan fits."""
        plan = self.planning.plan
        return float("inf") if plan is None else plan.graph.step_seconds + plan.cost_seconds


@dataclass(frozen=True)
class Choice:
    """The candidate that is taken and the candidate without chunks.

    ``whole`` is None if the graph without chunks was not planned. ``remedy`` tells the user how to make the loss chunkable, if
    it is not.
    """

    taken: ChunkingCandidate
    whole: ChunkingCandidate | None
    remedy: str = ""


@dataclass(frozen=True)
class Parts:
    """Plans candidates: ``recapture`` captures and prices a joint graph, ``contend`` plans it."""

    options: Options
    recapture: Callable[[fx.GraphModule], tuple[Capture, Pricing]]
    contend: Callable[[Capture, Pricing, int], ChunkingCandidate]

    def best(self, captured: Capture, pricing: Pricing, applicable: bool) -> Choice:
        """Returns the best candidate. Warns if the user asks for chunks and the loss cannot be chunked.

        ``applicable`` is False if the graph must stay unchunked. The fastest candidate that fits is best; if none fits, the one
        with the minimum peak.
        """
        wanted = self.options.chunk_loss
        asked = wanted is True or type(wanted) is int
        if not applicable and asked:
            _warn("the budget of a profiled step is shared out among its graphs as they are")
        always = type(wanted) is int and applicable
        whole = None if always else self.contend(captured, pricing, 1)
        if wanted is False or not applicable or (self.options.plan and not always):
            assert whole is not None
            return Choice(whole, whole)
        remedy = ""
        found = [whole] if whole is not None else []
        try:
            for contender in self.in_parts(captured, found):
                found.append(contender)
        except ChunkingUnsupported as reason:
            remedy = reason.remedy
            if asked:
                _warn(str(reason))
            found = found or [self.contend(captured, pricing, 1)]
        fitting = [contender for contender in found if contender.planning.plan is not None]
        if fitting:
            return Choice(min(fitting, key=lambda contender: contender.step_seconds), whole)
        return Choice(min(found, key=lambda contender: contender.planning.smallest.peak_bytes), whole, remedy)

    def in_parts(self, captured: Capture, found: list[ChunkingCandidate]) -> Iterator[ChunkingCandidate]:
        """Yields chunked candidates; under ``"auto"`` only until one of ``found`` fits.

        Raises ``ChunkingUnsupported`` if the loss cannot be chunked.
        """
        wanted = self.options.chunk_loss
        numbers = (wanted,) if type(wanted) is int else NUMBERS_OF_CHUNKS
        for number in numbers:
            if wanted == "auto" and any(contender.planning.plan is not None for contender in found):
                return
            joint = fx.GraphModule(captured.joint, fake_tensors.shallow_copy(captured.joint.graph))
            joint.meta = dict(captured.joint.meta)
            chunked = chunk_loss(joint, int(number))
            if any(contender.parts == chunked.parts for contender in found):
                return  # there are too few rows for more chunks
            yield self.contend(*self.recapture(joint), chunked.parts)


def _warn(reason: str) -> None:
    warnings.warn(f"chunk_loss has no effect on a graph: {reason}", BudgetWarning, stacklevel=2)
