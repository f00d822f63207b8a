"""Redundant-recompute elimination.

Each recomputation is removed unless the excess over the budget grows without it. On small graphs, each possible recomputation
is then tried in exchange for others.
"""

from __future__ import annotations

import time

from autoremat.planner.exact.local_search import Moves
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.elimination


class Polishing(Moves):
    """Removal and exchange of recomputations, starting from one plan."""

    def without_redundant_recomputation(self, deadline: float, latest_first: bool = False) -> Schedule:
        """Returns the schedule after removing redundant recomputations and, on small graphs, after exchanges.

        Sites are visited from the first to the last, or backwards with ``latest_first``. The last op at each site comes first.
        """
        self.steps.clear()
        self._withdraw_needless(deadline, latest_first)
        candidates = [(i, s) for i in self.movable for s in range(max(self.first_site, i + 2), self.sites.end + 1)]
        better = len(candidates) <= settings.exchange_candidates
        while better:
            better = any(self._exchange(*pair, deadline) for pair in candidates)
        return self._schedule(self.chosen)

    def _exchange(self, index: int, site: int, deadline: float) -> bool:
        """Adds op ``index`` at ``site`` and removes recomputations that are then redundant. The exchange is undone unless it
        gains time."""
        if (index, site) in self.place or time.monotonic() > deadline:
            return False
        before, seconds, (_, excess) = self._bytes(), self.sites.added, self._over()
        self.steps.clear()
        self._step(True, index, site)
        self.sites.settle()
        self._withdraw_needless(deadline, but=(index, site))
        if self.sites.added < seconds - settings.minimum_gain * self.op_seconds and self._over()[1] <= excess:
            return True
        self._back_to(0, before)
        return False

    def _withdraw_needless(self, deadline: float, latest_first: bool = False, but: tuple[int, int] | None = None) -> None:
        """Removes all recomputations except ``but`` as long as the excess over the budget does not grow."""
        direction = -1 if latest_first else 1
        gone, (_, excess) = True, self._over()
        while gone:
            gone = False
            for index, site in sorted(self.chosen, key=lambda pair: (direction * pair[1], -pair[0])):
                if (index, site) not in self.place or (index, site) == but or time.monotonic() > deadline:
                    continue
                mark, before = len(self.steps), self._bytes()
                self._withdraw(index, site)
                self.sites.settle()
                _, excess_now = self._over()
                if excess_now <= excess:
                    gone, excess = True, excess_now
                else:
                    self._back_to(mark, before)


def polished(graph: Graph, budget: int, seed: int, schedule: Schedule, label: str, deadline: float) -> list[Plan]:
    """Returns the plans of ``schedule`` without redundant recomputations, which are removed in two different sequences."""
    found = []
    for latest_first in (False, True):
        search = Polishing(graph, budget, seed)
        search.start_from(schedule)
        found.append(Plan.of(graph, search.without_redundant_recomputation(deadline, latest_first), label))
    return found
