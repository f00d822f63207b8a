"""Simulated annealing over insertion points (Kirkpatrick et al., "Optimization by simulated annealing", Science 1983).

    energy  =  added seconds  +  price * sum over sites of the bytes over the budget

Random layered graphs have thousands of overlapping live ranges. Linear relaxations therefore say little about where a fitting
plan recomputes. Here moves are small and cheap (:mod:`autoremat.planner.exact.local_search`). The price rises while the state
does not fit and falls while it does. The search therefore stays near the border between the two.

The search counts moves, so only the deadline can interrupt it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autoremat.planner.exact.local_search import Moves
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.annealing


@dataclass
class Found:
    """Result of a search: the cheapest schedule that fits, if any, and the schedule of the least excess."""

    best: Schedule | None
    closest: Schedule
    interrupted: bool


class Annealing(Moves):
    """Annealing on ``graph`` for a budget of ``budget`` bytes."""

    def _propose(self, over: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Makes one move. ``over`` holds the bytes over the budget at each site of the current state."""
        over_budget = np.flatnonzero(over > 0.0)
        chance = self.random.random()
        removal = settings.removal_probability if len(over_budget) else settings.removal_probability_when_fitting
        if self.chosen and chance < removal:
            self._withdraw(*self.chosen[int(self.random.random() * len(self.chosen))])
            worst = int(self.sites.together.argmax())
            if chance >= settings.removal_only_probability and self.sites.together[worst] > self.budget:
                self._relieve(worst)
        elif len(over_budget):
            self._relieve(int(over_budget[int(self.random.random() * len(over_budget))]))
        else:
            self._relieve(int(self.random.random() * self.sites.end))

    def run(self, moves: int, hottest: float, deadline: float) -> Found:
        """Anneals from the current state with at most ``moves`` moves, and returns the result.

        ``hottest`` is the first temperature in mean seconds of an op. ``deadline`` is a time of the monotonic clock in seconds.
        """
        sites = self.sites
        factor, temperature, price = settings.initial_price, 0.0, 0.0
        over, excess = self._over()
        best, least = math.inf, math.inf
        fitting: list[tuple[int, int]] | None = None
        closest: list[tuple[int, int]] = []
        energy, interrupted = math.inf, False
        for move in range(moves if self.movable and self.cumulative[-1] else 0):
            if move % settings.update_moves == 0:
                if time.monotonic() > deadline:
                    interrupted = True
                    break
                factor *= settings.price_increase if excess else settings.price_decrease
                factor = min(max(factor, settings.minimum_price), settings.maximum_price)
                price = factor * self.op_seconds / self.value_bytes
                temperature = self.op_seconds * hottest * (settings.final_temperature / hottest) ** (move / moves)
                energy = sites.added + price * excess
            before = sites.together, sites.apart, sites.added
            sites.together, sites.apart = sites.together.copy(), sites.apart.copy()
            self.steps.clear()
            self._propose(over)
            sites.settle()
            over_now, excess_now = self._over()
            change = sites.added + price * excess_now - energy
            if change > 0.0 and self.random.random() >= math.exp(-change / temperature):
                self._undo()
                sites.changed.clear()
                sites.together, sites.apart, sites.added = before
                continue
            over, excess, energy = over_now, excess_now, energy + change
            if excess == 0.0 and sites.added < best:
                best, fitting = sites.added, self.chosen.copy()
            elif excess < least:
                least, closest = excess, self.chosen.copy()
        return Found(None if fitting is None else self._schedule(fitting), self._schedule(closest), interrupted)


def improve(
    graph: Graph, budget: int | None, time_limit: float, seed: int, found: PlanningResult, good_gap: float, deadline: float
) -> PlanningResult:
    """Returns ``found`` or a better result. If its optimality gap, as a share of the step, is at most ``good_gap``, it is
    unchanged.

    The number of moves follows from ``time_limit`` in seconds, and ``deadline`` ends the search. Graphs that
    are not plain or have constraints to recompute keep ``found``.
    """
    ordered = any(op.constraint is Constraint.RECOMPUTE for op in graph.ops)
    if budget is None or ordered or not graph.is_plain:
        return found
    # For training steps, the plans of the search are close to the optimum; for single-phase graphs, they seldom are.
    from_nothing = graph.single_phase or found.plan is None
    if found.is_converged(good_gap):
        return found
    moves = int(settings.moves_per_second * time_limit)
    lengths = lengths_of(int((1 - settings.warm_start_share) * moves), len(graph.ops)) if from_nothing else []
    for number, length in enumerate([*lengths, int(settings.warm_start_share * moves)]):
        warm = number == len(lengths)
        search = Annealing(graph, budget, seed + number)
        if warm:
            search.start_from((found.plan or found.smallest).schedule)
        reached = search.run(length, settings.warm_start_temperature if warm else settings.initial_temperature, deadline)
        found = found.with_plans([Plan.of(graph, reached.best or reached.closest, "annealed")], budget, reached.interrupted)
        if reached.interrupted or found.is_converged(good_gap):
            break
    return found


def lengths_of(moves: int, ops: int) -> list[int]:
    """Returns the lengths of successive searches from nothing, which sum to ``moves``. Each search is longer than the one
    before.

    Small graphs are searched several times. On a large graph the first search is short, so that a plan exists if the time runs
    out.
    """
    lengths: list[int] = []
    following = max(min(int(settings.first_search_share * moves), settings.first_search_moves_per_op * ops), 1)
    while moves - sum(lengths) > 3 * following:
        lengths.append(following)
        following *= 2
    return [*lengths, moves - sum(lengths)]
