"""Simulated annealing over insertion points (Kirkpatrick et al., "Optimization by simulated annealing", Science 1983).

    energy  =  added seconds  +  price * sum over sites of the bytes over the budget

Moves are small and cheap. One evicts a value that is live at a site but not read there, and recomputes it for its next read,
with some of its freed inputs. The other removes a recomputation, with all that it alone needed. The price rises while the state
does not fit and falls while it does, so the search stays near the border between the two. It counts moves, so only the deadline
can interrupt it.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from autoremat.planner.exact.interval_model import sites_of
from autoremat.planner.exact.rematerialization_state import Sites
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import PlanningResult
from autoremat.planner.settings import settings


class Annealing:
    """Annealing on ``graph`` for a budget of ``budget`` bytes: a set of recomputations that moves change."""

    def __init__(self, graph: Graph, budget: int, seed: int) -> None:
        self.graph, self.budget, self.random, self.sites = graph, budget, random.Random(seed), Sites(graph)
        self.first_site = 0 if graph.single_phase else graph.num_forward
        self.movable = [index for index, movable in enumerate(self.sites.movable) if movable]
        sizes = [sum(self.sites.size[v] for v in graph.ops[index].outputs) for index in self.movable]
        self.cumulative = np.cumsum(sizes).tolist()
        self.chosen: list[tuple[int, int]] = []
        """Recomputed ops with their sites."""
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
        for index, site in zip(schedule.sequence, sites_of(self.graph, schedule), strict=True):
            if index != site and self.sites.movable[index] and site not in self.sites.runs[index]:
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

    def _propose(self, over: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Makes one move. ``over`` holds the bytes over the budget at each site of the current state."""
        over_budget = np.flatnonzero(over > 0.0)
        chance = self.random.random()
        removal = settings.removals[0] if len(over_budget) else settings.removals[1]
        if self.chosen and chance < removal:
            self._withdraw(*self.chosen[int(self.random.random() * len(self.chosen))])
            worst = int(self.sites.together.argmax())
            if chance >= settings.removals[2] and self.sites.together[worst] > self.budget:
                self._relieve(worst)
        elif len(over_budget):
            self._relieve(int(over_budget[int(self.random.random() * len(over_budget))]))
        else:
            self._relieve(int(self.random.random() * self.sites.end))

    def run(self, moves: int, hottest: float, deadline: float) -> tuple[Schedule | None, Schedule, bool]:
        """Anneals from the current state with at most ``moves`` moves.

        Returns the cheapest schedule that fits, if any, that of the least excess, and True if the deadline ended the search.
        ``hottest`` is the first temperature in mean seconds of an op. ``deadline`` is a time of the monotonic clock in seconds.
        """
        sites = self.sites
        factor, temperature, price = settings.prices[0], 0.0, 0.0
        over, excess = self._over()
        best, least = math.inf, math.inf
        fitting: list[tuple[int, int]] | None = None
        closest: list[tuple[int, int]] = []
        energy, interrupted = math.inf, False
        for move in range(moves if self.movable and self.cumulative[-1] else 0):
            if move % 64 == 0:
                if time.monotonic() > deadline:
                    interrupted = True
                    break
                factor *= settings.price_changes[0] if excess else settings.price_changes[1]
                factor = min(max(factor, settings.prices[1]), settings.prices[2])
                price = factor * self.op_seconds / self.value_bytes
                temperature = self.op_seconds * hottest * (settings.temperatures[2] / hottest) ** (move / moves)
                energy = sites.added + price * excess
            before = sites.together, sites.apart, sites.added
            sites.together, sites.apart = sites.together.copy(), sites.apart.copy()
            self.steps.clear()
            self._propose(over)
            sites.settle()
            over_now, excess_now = self._over()
            change = sites.added + price * excess_now - energy
            if change > 0.0 and self.random.random() >= math.exp(-change / temperature):
                for adding, index, site in reversed(self.steps):
                    self._set(not adding, index, site)
                sites.changed.clear()
                sites.together, sites.apart, sites.added = before
                continue
            over, excess, energy = over_now, excess_now, energy + change
            if excess == 0.0 and sites.added < best:
                best, fitting = sites.added, self.chosen.copy()
            elif excess < least:
                least, closest = excess, self.chosen.copy()
        return None if fitting is None else self._schedule(fitting), self._schedule(closest), interrupted


def improve(
    graph: Graph, budget: int | None, time_limit: float, seed: int, found: PlanningResult, good_gap: float, deadline: float
) -> PlanningResult:
    """Returns ``found`` or a better result. If its optimality gap, as a share of the step, is at most ``good_gap``, it is
    unchanged.

    The number of moves follows from ``time_limit`` in seconds, and ``deadline`` ends the search. Graphs that
    are not plain or have constraints to recompute keep ``found``.
    """
    ordered = any(op.constraint is Constraint.RECOMPUTE for op in graph.ops)
    if budget is None or ordered or not graph.is_plain or found.is_converged(good_gap):
        return found
    moves, lengths = int(settings.moves_per_second * time_limit), list[int]()
    warm_moves = int(settings.annealed_share * moves)
    # For training steps, the plans of the search are close to the optimum; for single-phase graphs, they seldom are.
    if graph.single_phase or found.plan is None:
        # Small graphs are searched several times, each longer than before. On a large one the first search is short, so that
        # a plan exists if the time runs out.
        cold_moves = int((1 - settings.annealed_share) * moves)
        following = max(min(int(settings.annealed_share * cold_moves), settings.first_search_moves_per_op * len(graph.ops)), 1)
        while cold_moves - sum(lengths) > 3 * following:
            lengths.append(following)
            following *= 2
        lengths.append(cold_moves - sum(lengths))
    for number, length in enumerate([*lengths, warm_moves]):
        warm, search = number == len(lengths), Annealing(graph, budget, seed + number)
        if warm:
            search.start_from((found.plan or found.smallest).schedule)
        best, closest, interrupted = search.run(length, settings.temperatures[warm], deadline)
        found = found.with_plans([Plan.of(graph, best or closest, "annealed")], budget, interrupted)
        if interrupted or found.is_converged(good_gap):
            break
    return found
