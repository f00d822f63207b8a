"""From a graph and a budget to a plan."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass

from autoremat.graph import Graph
from autoremat.plans import Plan
from autoremat.solvers.bounds import Moments
from autoremat.solvers.search import Search


@dataclass(frozen=True)
class Planning:
    """The outcome of a search. ``plan`` is None if nothing found fits the budget."""

    plan: Plan | None
    baseline: Plan
    """No recomputation: everything that the backward reads is saved."""
    smallest: Plan
    """The plan of least memory found."""
    lower_bound_bytes: int
    """No plan has a lower peak."""
    lower_bound_seconds: float
    """No plan within the budget adds less recomputation; infinite if none fits."""
    candidates: int
    interrupted: bool
    """Whether the time limit, and not the search itself, ended it."""


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """The search makes no cycles but many lists; each collection would walk all of torch's graphs."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Planner:
    """Plans one training step. ``baseline`` is known at once, so that a budget can be a share of its peak."""

    graph: Graph
    time_limit: float = 10.0

    def __post_init__(self) -> None:
        self.search = Search(self.graph, time.monotonic() + self.time_limit)
        self.moments = Moments(self.graph, self.search.mincut)
        self.baseline = self.search.save_everything()
        self.baseline.check()

    def find(self, budget_bytes: int | None) -> Planning:
        """The cheapest plan found with a peak of at most ``budget_bytes`` (None: no bound)."""
        search = self.search
        with _without_garbage_collection():
            best, smallest = search.cheapest(budget_bytes)
        for plan in filter(None, (best, smallest)):
            plan.check()
        seconds = 0.0 if budget_bytes is None else self.moments.seconds(budget_bytes)
        interrupted = search.interrupted
        return Planning(best, self.baseline, smallest, self.moments.peak_bytes(), seconds, search.simulated, interrupted)
