"""What the candidates of a graph know of a search for plans with stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from autoremat.planner.plans.candidate import Candidate
from autoremat.planner.plans.plan import Plan


class PlansWithStays(Protocol):
    """Plans with stays, from those of a search (:class:`~autoremat.planner.search.joint_search.JointSearch`)."""

    found: list[Candidate]
    """Plans made for all budgets so far."""

    @property
    def smallest(self) -> Candidate | None:
        """The plan of the least peak found, if stays lower the peak."""
        ...

    def improve(self, budget: int, thorough: bool = True, suffices: Callable[[Plan], bool] = ...) -> None:
        """Finds plans within ``budget`` bytes, until one suffices."""
        ...
