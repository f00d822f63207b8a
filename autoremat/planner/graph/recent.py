"""Remembers what was computed for the last few schedules of a graph, because a search asks for it again soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule

T = TypeVar("T")

REMEMBERED = 4
"""Number of schedules: those that a joint search builds together, before it chooses stays for them."""


class Recent(Generic[T]):
    """The results of ``compute`` for the last few schedules of ``graph``. It must not depend on their stays."""

    def __init__(self, graph: Graph, compute: Callable[[Graph, Schedule], T]) -> None:
        self.graph, self.compute = graph, compute
        self.known: dict[tuple[tuple[int, ...], tuple[int, ...]], T] = {}

    def of(self, schedule: Schedule) -> T:
        """Returns the result for ``schedule``, without its stays."""
        key = schedule.forward, schedule.backward
        if key not in self.known:
            if len(self.known) == REMEMBERED:
                del self.known[next(iter(self.known))]
            self.known[key] = self.compute(self.graph, Schedule(*key) if schedule.stays else schedule)
        return self.known[key]
