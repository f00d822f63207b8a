"""A plan without what need not run.

Each recomputation is withdrawn if no more bytes are over the budget without it; then, on small graphs, each that does not run
yet is tried in place of others.
"""

from __future__ import annotations

import time

from autoremat.planner.exact.local_search import Moves
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.plan import Plan

MOST_EXCHANGED, LEAST_GAIN = 1_000, 1e-6
"""Up to how many places for recomputations each is tried in place of others; a gain, in mean seconds of an op."""


class Polishing(Moves):
    """A plan that is made better where that takes no other plan."""

    def without_redundant_recomputation(self, deadline: float, latest_first: bool = False) -> Schedule:
        """Each recomputation is withdrawn if no more bytes are over the budget without it, from the first site on or from the
        last, the last op at each site first; then each that does not run yet is tried in place of others."""
        self.steps.clear()
        self._withdraw_needless(deadline, latest_first)
        candidates = [(i, s) for i in self.movable for s in range(max(self.first_site, i + 2), self.sites.end + 1)]
        better = len(candidates) <= MOST_EXCHANGED
        while better:
            better = any(self._exchange(*pair, deadline) for pair in candidates)
        return self._schedule(self.chosen)

    def _exchange(self, index: int, site: int, deadline: float) -> bool:
        """Run op ``index`` at ``site`` too and withdraw what is then needless, if that gains time."""
        if (index, site) in self.place or time.monotonic() > deadline:
            return False
        before, seconds, (_, excess) = self._bytes(), self.sites.added, self._over()
        self.steps.clear()
        self._step(True, index, site)
        self.sites.settle()
        self._withdraw_needless(deadline, but=(index, site))
        if self.sites.added < seconds - LEAST_GAIN * self.op_seconds and self._over()[1] <= excess:
            return True
        self._back_to(0, before)
        return False

    def _withdraw_needless(self, deadline: float, latest_first: bool = False, but: tuple[int, int] | None = None) -> None:
        """Withdraw all ``but`` one while that leaves no more bytes over the budget than there are."""
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
    """``schedule`` without what need not run, taken away in two orders."""
    found = []
    for latest_first in (False, True):
        search = Polishing(graph, budget, seed)
        search.start_from(schedule)
        found.append(Plan.of(graph, search.without_redundant_recomputation(deadline, latest_first), label))
    return found
