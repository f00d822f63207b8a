"""Simulated annealing over where ops run again (Kirkpatrick et al., "Optimization by simulated annealing", 1983).

Random layered graphs have thousands of overlapping lifetimes, so that linear relaxations say little of where a plan that fits
is. Here moves are small and cheap: one op runs again where its result is read next after a crowded site, with those of its
inputs that are gone; or something no longer runs again; or both. Whatever is then read by nobody goes as well. The energy
is the added seconds plus a price for the bytes over the budget at each site. The price rises while the state does not fit
and falls while it does, so the search stays near the border.

Moves are counted; only the deadline can cut the search short.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from autoremat.graph import Graph, Order
from autoremat.plans import Plan
from autoremat.schedule import Schedule
from autoremat.solvers import Planning
from autoremat.solvers.event_gap import recomputations
from autoremat.solvers.sites import Sites

COLDEST = 0.03
"""The last temperature, in mean seconds of an op."""

FIRST_PRICE, LEAST_PRICE, MOST_PRICE = 0.05, 0.02, 50.0
"""Of the mean bytes of a value over the budget at one site, in mean seconds of an op."""

DEARER, CHEAPER, EVERY = 1.02, 0.97, 64
"""How the price changes with a state that does not fit, and with one that fits; after how many moves."""

LEAVING, LEAVING_WHEN_FITTING, ALONE = 0.35, 0.6, 0.15
"""How likely a move takes away a recomputation: if the state does not fit, if it fits; and does nothing else."""

MOST_BOLD, LONGEST_CHAIN = 0.6, 10
"""The highest probability with which an input that is gone runs again too, rather than be held; how many do at most."""

EARLY = 0.2
"""How likely an op runs again before its result is read, while its inputs are there still."""

TRIES = 60
"""Values that are drawn before a site is found to hold nothing that could go."""

MOVES_PER_SECOND = 4000
"""Of the time limit: few enough that neighbourhoods have time too."""

MOST_EXCHANGED, LEAST_GAIN = 1_000, 1e-6
"""Up to how many places for recomputations each is tried in place of others; a gain, in mean seconds of an op."""

MOST_AFRESH = 5_000
"""Recomputations of a plan that makes everything anew for every reader: enough for a chain of a hundred ops."""

HOT, WARM = 3.0, 0.3
"""First temperatures, in mean seconds of an op: from nothing, and from a plan that is good already."""

WARM_SHARE, SHORTEST_SHARE, MOVES_PER_OP = 0.2, 0.2, 300
"""Of the moves: how many go to annealing the best plan once more; how many the first search from nothing takes at most, and
how many that is for each op."""


Bytes = tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]], float]
"""At each site together and apart, and the seconds added (see ``Sites``)."""


@dataclass
class Found:
    """What a search comes to: the cheapest schedule that fits, if any; the one of least excess."""

    best: Schedule | None
    closest: Schedule
    interrupted: bool


@dataclass
class Annealing:
    """A search on ``graph`` for ``budget`` bytes."""

    graph: Graph
    budget: int
    seed: int
    sites: Sites = field(init=False)
    chosen: list[tuple[int, int]] = field(init=False)
    """What runs again: ops with their sites."""

    def __post_init__(self) -> None:
        graph = self.graph
        self.random = random.Random(self.seed)
        self.sites = Sites(graph)
        self.first_site = 0 if graph.one_phase else graph.num_forward
        self.movable = [index for index, movable in enumerate(self.sites.movable) if movable]
        sizes = [sum(self.sites.size[v] for v in graph.ops[index].outputs) for index in self.movable]
        self.cumulative = np.cumsum(sizes).tolist()
        self.chosen = []
        self.place: dict[tuple[int, int], int] = {}
        """Where each pair stands in ``chosen``."""
        self.steps: list[tuple[bool, int, int]] = []
        """What the present move has added (True) and removed."""
        self.chain = 0
        self.op_seconds = graph.step_seconds / max(len(graph.ops), 1)
        self.value_bytes = max(float(np.mean([size for size in self.sites.size if size] or [1])), 1.0)

    # -- moves -----------------------------------------------------------------------------------------------------------

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
        """Do not run ``index`` at ``site``, nor what ran again only for that."""
        self._step(False, index, site)
        sites = self.sites
        for value in sites.inputs[index]:
            producer = sites.producer[value]
            runs = sites.runs[producer]
            made = runs[bisect_left(runs, site + 1) - 1]
            if made != producer and not sites.is_read(producer, made):
                self._withdraw(producer, made)

    def _request(self, index: int, site: int, boldness: float) -> None:
        """Run ``index`` at ``site``, and maybe there, with probability ``boldness`` each, those of its inputs that are gone."""
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
        """Give up a value that is alive over ``moment`` but not read there, until its next read."""
        total = self.cumulative[-1]
        for _ in range(TRIES):
            index = self.movable[bisect_left(self.cumulative, self.random.random() * total)]
            following = self._gap_over(moment, index) if index < moment else None
            if following is not None:
                earliest = max(moment + 1, self.first_site)
                if self.random.random() < EARLY and earliest < following:
                    following = self.random.randrange(earliest, following)
                self.chain = LONGEST_CHAIN
                self._request(index, following, MOST_BOLD * self.random.random() ** 2)
                return

    def _gap_over(self, moment: int, index: int) -> int | None:
        """Where a result of op ``index`` is read next, if it is alive over ``moment`` and could be run again by then."""
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

    def _propose(self, over: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Make a move from a state that is ``over`` the budget by so many bytes at each site."""
        crowded = np.flatnonzero(over > 0.0)
        chance = self.random.random()
        if self.chosen and chance < (LEAVING if len(crowded) else LEAVING_WHEN_FITTING):
            self._withdraw(*self.chosen[int(self.random.random() * len(self.chosen))])
            worst = int(self.sites.together.argmax())
            if chance >= ALONE and self.sites.together[worst] > self.budget:
                self._relieve(worst)
        elif len(crowded):
            self._relieve(int(crowded[int(self.random.random() * len(crowded))]))
        else:
            self._relieve(int(self.random.random() * self.sites.end))

    # -- the search ------------------------------------------------------------------------------------------------------

    def start_from(self, schedule: Schedule) -> None:
        """Run again what ``schedule`` recomputes, where it does."""
        for index, site in recomputations(self.graph, schedule):
            if self.sites.movable[index] and site not in self.sites.runs[index]:
                self._set(True, index, site)
        self.sites.settle()

    def without_the_needless(self, deadline: float, latest_first: bool = False) -> Schedule:
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
        self._withdraw_needless(deadline)
        if self.sites.added < seconds - LEAST_GAIN * self.op_seconds and self._over()[1] <= excess:
            return True
        self._back_to(0, before)
        return False

    def _withdraw_needless(self, deadline: float, latest_first: bool = False) -> None:
        """Withdraw while that leaves no more bytes over the budget than there are."""
        direction = -1 if latest_first else 1
        gone, (_, excess) = True, self._over()
        while gone:
            gone = False
            for index, site in sorted(self.chosen, key=lambda pair: (direction * pair[1], -pair[0])):
                if (index, site) not in self.place or time.monotonic() > deadline:
                    continue
                mark, before = len(self.steps), self._bytes()
                self._withdraw(index, site)
                self.sites.settle()
                _, excess_now = self._over()
                if excess_now <= excess:
                    gone, excess = True, excess_now
                else:
                    self._back_to(mark, before)

    def _bytes(self) -> Bytes:
        """What a step changes in place, for :meth:`_back_to`."""
        return self.sites.together.copy(), self.sites.apart.copy(), self.sites.added

    def _back_to(self, mark: int, before: Bytes) -> None:
        """Undo all steps but the first ``mark``; ``before`` is the state of the sites then."""
        for adding, index, site in reversed(self.steps[mark:]):
            self._set(not adding, index, site)
        del self.steps[mark:]
        self.sites.changed.clear()
        self.sites.together, self.sites.apart, self.sites.added = before

    def run(self, moves: int, hottest: float, deadline: float) -> Found:
        """Anneal from the present state; ``deadline`` is a time of the monotonic clock, in seconds."""
        sites = self.sites
        factor, temperature, price = FIRST_PRICE, 0.0, 0.0
        over, excess = self._over()
        best, least = math.inf, math.inf
        fitting: list[tuple[int, int]] | None = None
        closest: list[tuple[int, int]] = []
        energy, interrupted = math.inf, False
        for move in range(moves if self.movable and self.cumulative[-1] else 0):
            if move % EVERY == 0:
                if time.monotonic() > deadline:
                    interrupted = True
                    break
                factor = min(max(factor * (DEARER if excess else CHEAPER), LEAST_PRICE), MOST_PRICE)
                price = factor * self.op_seconds / self.value_bytes
                temperature = self.op_seconds * hottest * (COLDEST / hottest) ** (move / moves)
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

    def _over(self) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], float]:
        """The bytes over the budget at each site (negative: left), and the sum of the positive ones."""
        over = self.sites.together - self.sites.apart - self.budget
        return over, float(over[over > 0.0].sum())

    def _schedule(self, chosen: Iterable[tuple[int, int]]) -> Schedule:
        sites = Sites(self.graph)
        for index, site in chosen:
            sites.add(index, site)
        return sites.schedule()


def improve(
    graph: Graph, budget: int | None, time_limit: float, seed: int, found: Planning, good_gap: float, deadline: float
) -> Planning:
    """The outcome ``found``, or a better one; nothing is tried if its gap, as a share of the step, is ``good_gap`` or less.

    How long is annealed follows from ``time_limit``, in seconds; at ``deadline`` it ends. Graphs that fuse and those with
    orders to recompute are left alone.
    """
    ordered = any(op.order is Order.RECOMPUTE for op in graph.ops)
    if budget is None or graph.fuses or ordered:
        return found
    # The search's plans of a training step are seldom far off; of a graph of one phase they are.
    from_nothing = graph.one_phase or found.plan is None
    if found.plan is None and (schedule := afresh(graph)) is not None:
        found = found.with_plans([Plan.of(graph, schedule, "afresh")], budget, interrupted=False)
        found = found.with_plans(polished(graph, budget, seed, schedule, "afresh", deadline), budget, interrupted=False)
    if found.settled(good_gap):
        return found
    moves = int(MOVES_PER_SECOND * time_limit)
    lengths = lengths_of(int((1 - WARM_SHARE) * moves), len(graph.ops)) if from_nothing else []
    for number, length in enumerate([*lengths, int(WARM_SHARE * moves)]):
        warm = number == len(lengths)
        search = Annealing(graph, budget, seed + number)
        if warm:
            search.start_from((found.plan or found.smallest).schedule)
        reached = search.run(length, WARM if warm else HOT, deadline)
        plans = [Plan.of(graph, reached.best or reached.closest, "annealed")]
        if reached.best is not None:
            plans += polished(graph, budget, seed, reached.best, "annealed", deadline)
        found = found.with_plans(plans, budget, reached.interrupted)
        if reached.interrupted or found.settled(good_gap):
            break
    return found


def polished(graph: Graph, budget: int, seed: int, schedule: Schedule, label: str, deadline: float) -> list[Plan]:
    """``schedule`` without what need not run, taken away in two orders."""
    found = []
    for latest_first in (False, True):
        search = Annealing(graph, budget, seed)
        search.start_from(schedule)
        found.append(Plan.of(graph, search.without_the_needless(deadline, latest_first), label))
    return found


def afresh(graph: Graph) -> Schedule | None:
    """Every op of the part in which ops run again makes anew, from what the graph is given, all that it reads.

    Takes little memory and much time. None if that is more than ``MOST_AFRESH`` recomputations.
    """
    sites, recomputations = Sites(graph), 0
    for site in range(0 if graph.one_phase else graph.num_forward, sites.end + 1):
        wanted: set[int] = set()
        unseen = [*(sites.kept if site == sites.end else sites.inputs[site])]
        while unseen:
            producer = sites.producer[unseen.pop()]
            # What the op just before has made is there.
            if sites.movable[producer] and producer + 1 < site and producer not in wanted:
                wanted.add(producer)
                unseen += sites.inputs[producer]
        recomputations += len(wanted)
        if recomputations > MOST_AFRESH:
            return None
        for index in sorted(wanted):
            sites.add(index, site)
    return sites.schedule()


def lengths_of(moves: int, ops: int) -> list[int]:
    """Of searches from nothing on a graph of so many ops, which take ``moves`` together, each longer than the one before.

    Small graphs are searched more than once; the first search of a large one is short, so that there is a plan if the time is
    cut short.
    """
    lengths: list[int] = []
    following = max(min(int(SHORTEST_SHARE * moves), MOVES_PER_OP * ops), 1)
    while moves - sum(lengths) > 3 * following:
        lengths.append(following)
        following *= 2
    return [*lengths, moves - sum(lengths)]
