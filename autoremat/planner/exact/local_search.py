"""Moves of a local search over insertion points.

One move evicts a value that is live at a site but not read there. The value is recomputed for its next read, with some of its
freed inputs. The other move removes a recomputation, with all recomputations that it alone needed. Every move can be undone.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autoremat.planner.exact.interval_model import recomputations
from autoremat.planner.exact.rematerialization_state import Sites
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.local_search


@dataclass
class Moves:
    """A set of recomputations of ``graph`` that moves change, for a budget of ``budget`` bytes."""

    graph: Graph
    budget: int
    seed: int
    sites: Sites = field(init=False)
    chosen: list[tuple[int, int]] = field(init=False)
    """Recomputed ops with their sites."""

    def __post_init__(self) -> None:
        graph = self.graph
        self.random = random.Random(self.seed)
        self.sites = Sites(graph)
        self.first_site = 0 if graph.single_phase else graph.num_forward
        self.movable = [index for index, movable in enumerate(self.sites.movable) if movable]
        sizes = [sum(self.sites.size[v] for v in graph.ops[index].outputs) for index in self.movable]
        self.cumulative = np.cumsum(sizes).tolist()
        self.chosen = []
        self.place: dict[tuple[int, int], int] = {}
        """Index of each pair in ``chosen``."""
        self.steps: list[tuple[bool, int, int]] = []
        """Recomputations that the current move added (True) or removed (False)."""
        self.chain = 0
        self.op_seconds = graph.step_seconds / max(len(graph.ops), 1)
        self.value_bytes = max(float(np.mean([size for size in self.sites.size if size] or [1])), 1.0)

    def _set(self, adding: bool, index: int, site: int) -> None:
        if adding:
            self.sites.add(index, site)
            self.place[index, site] = len(self.chosen)
            self.chosen.append((index, site))
            return
        self.sites.remove(index, site)
        last, number = self.chosen.pop(), self.place.pop((index, site))
        if last != (index, site):
            self.chosen[number] = last
            self.place[last] = number

    def _step(self, adding: bool, index: int, site: int) -> None:
        self._set(adding, index, site)
        self.steps.append((adding, index, site))

    def _undo(self) -> None:
        for adding, index, site in reversed(self.steps):
            self._set(not adding, index, site)

    def _withdraw(self, index: int, site: int) -> None:
        """Removes the recomputation of ``index`` at ``site``, and all recomputations that only it needed."""
        self._step(False, index, site)
        sites = self.sites
        for value in sites.inputs[index]:
            producer = sites.producer[value]
            runs = sites.runs[producer]
            made = runs[bisect_left(runs, site + 1) - 1]
            if made != producer and not sites.is_read(producer, made):
                self._withdraw(producer, made)

    def _request(self, index: int, site: int, boldness: float) -> None:
        """Adds a recomputation of ``index`` at ``site``. Each of its freed inputs is recomputed there, too, with probability
        ``boldness``."""
        sites = self.sites
        gone = [sites.producer[v] for v in sites.inputs[index] if sites.last_read(v, site) < site]
        self._step(True, index, site)
        self.chain -= 1
        runs = sites.runs[index]
        before = runs[bisect_left(runs, site) - 1]
        if before != index and not sites.is_read(index, before):
            self._withdraw(index, before)
        for producer in gone:
            if (
                self.chain > 0
                and sites.movable[producer]
                and self.random.random() < boldness
                and site not in sites.runs[producer]
            ):
                self._request(producer, site, boldness)

    def _relieve(self, moment: int) -> None:
        """Evicts a value that is live at site ``moment`` but not read there, and recomputes it for its next read."""
        total = self.cumulative[-1]
        for _ in range(settings.draws):
            index = self.movable[bisect_left(self.cumulative, self.random.random() * total)]
            following = self._gap_over(moment, index) if index < moment else None
            if following is not None:
                earliest = max(moment + 1, self.first_site)
                if self.random.random() < settings.early_probability and earliest < following:
                    following = self.random.randrange(earliest, following)
                self.chain = settings.move_recomputations
                self._request(index, following, settings.input_probability * self.random.random() ** 2)
                return

    def _gap_over(self, moment: int, index: int) -> int | None:
        """Returns the next read of a result of op ``index``, if the result is live but not read at ``moment``."""
        sites = self.sites
        for value in sites.outputs[index]:
            reads = sites.reads[value]
            at = bisect_left(reads, moment)
            if at < len(reads) and reads[at] != moment and moment not in sites.runs[index]:
                following = reads[at]
                again = following in sites.runs[index] or following < self.first_site
                if not again and sites.last_read(value, moment) >= following:
                    return following
        return None

    def start_from(self, schedule: Schedule) -> None:
        """Adds the recomputations of ``schedule`` at their sites."""
        for index, site in recomputations(self.graph, schedule):
            if self.sites.movable[index] and site not in self.sites.runs[index]:
                self._set(True, index, site)
        self.sites.settle()

    def _over(self) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], float]:
        """Returns the bytes over the budget at each site (negative: free bytes), and the sum of the positive ones."""
        over = self.sites.together - self.sites.apart - self.budget
        return over, float(over[over > 0.0].sum())

    def _schedule(self, chosen: Iterable[tuple[int, int]]) -> Schedule:
        sites = Sites(self.graph)
        for index, site in chosen:
            sites.add(index, site)
        return sites.schedule()
