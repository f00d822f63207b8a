"""Simulated annealing over insertion points (Kirkpatrick et al., "Optimization by simulated annealing", Science 1983).

    energy  =  added seconds  +  price * sum over sites of the bytes over the budget

Moves are small and cheap. One evicts a value that is live at a site but not read there, and recomputes it for its next read,
with some of its freed inputs. The other removes a recomputation, with all that it alone needed. The price rises while the state
does not fit and falls while it does, so the search stays near the border between the two. It counts moves, so only the deadline
can interrupt it.
"""

import math
import random
import time
from bisect import bisect_left, insort

import numpy as np

from autoremat.planner.cost.durations import traffic_of
from autoremat.planner.exact.interval_model import in_order, sites_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import PlanningResult
from autoremat.planner.settings import settings


class Sites:
    """A set of recomputations, changed one by one, with the bytes that follow from it. At first there is none.

        bytes(site)  =  together(site) - apart(site)

    A *site* is an op of the given sequence, before which recomputations run in the graph's sequence, or the end. A live range
    lasts from its computation to its last read. So any set is a valid plan; only its peak can exceed the budget. Bytes are
    exact: ``together`` counts what is live at any time within the site, ``apart`` what of it is never live at the same time.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.end = graph, len(graph.ops)
        self.runs: list[list[int]] = [[index] for index in range(self.end)]
        """For each op, the places where it runs, ascending: its own place, then its sites."""
        self.at: list[list[int]] = [[] for _ in range(self.end + 1)]
        """For each site, the ops that are recomputed there, ascending."""
        self.reads: list[list[int]] = [sorted(readers) for readers in graph.readers]
        """For each value, the sites and ops where it is read, ascending and without duplicates."""
        self.inputs, self.outputs = graph.computed_inputs, graph.made
        self.producer = graph.makers
        self.size = [0 if value.producer is None else value.bytes for value in graph.values]
        self.workspace = [op.workspace_bytes for op in graph.ops]
        self.kept = frozenset(graph.forward_outputs) | frozenset(graph.backward_outputs)
        for value in self.kept:
            self.reads[value].append(self.end)
        held = set(() if graph.single_phase else graph.forward_outputs)
        may_move = (op.forward and op.may_run_again and bool(op.outputs) and held.isdisjoint(op.outputs) for op in graph.ops)
        self.movable = list(may_move)
        self.seconds = traffic_of(graph).repeat_seconds
        self.added = 0.0
        self.together = np.zeros(self.end + 1)
        """Bytes of everything that is live at any time within each site, without workspaces."""
        for value, made in enumerate(self.producer):
            if made >= 0:
                self.together[made : max([made, *self.reads[value]]) + 1] += self.size[value]
        self.together[graph.num_forward :] += graph.tangent_bytes
        self.apart = np.array([*(-float(bytes_) for bytes_ in self.workspace), 0.0])
        """At each site, ``together`` minus the maximum bytes live at one time, workspaces included."""
        self.changed: set[int] = set()
        """Sites whose ``apart`` is out of date (see :meth:`settle`)."""

    def last_read(self, value: int, moment: int) -> int:
        """Returns the last read of the live range of ``value`` at ``moment``, or its computation if nothing reads it."""
        runs, reads = self.runs[self.producer[value]], self.reads[value]
        following = bisect_left(runs, moment + 1)
        made = runs[following - 1]
        stop = bisect_left(reads, runs[following]) if following < len(runs) else len(reads)
        return max(reads[stop - 1], made) if stop else made

    def read_before(self, value: int, moment: int) -> int:
        """Returns the last read of ``value`` before ``moment``, or its last computation before if that is later."""
        runs, reads = self.runs[self.producer[value]], self.reads[value]
        made = runs[bisect_left(runs, moment) - 1]
        at = bisect_left(reads, moment)
        return max(reads[at - 1], made) if at else made

    def add(self, index: int, site: int) -> None:
        """Adds a recomputation of op ``index`` at ``site``, where it must not run yet."""
        self._make_room(index, site, 1)
        insort(self.runs[index], site)
        insort(self.at[site], index)
        self.added += self.seconds[index]
        for value in self.inputs[index]:
            self._hold(value, site, 1)
            insort(self.reads[value], site)

    def remove(self, index: int, site: int) -> None:
        """Removes a recomputation; the inverse of :meth:`add`."""
        for value in self.inputs[index]:
            reads = self.reads[value]
            del reads[bisect_left(reads, site)]
            self._hold(value, site, -1)
        self.runs[index].remove(site)
        self.at[site].remove(index)
        self.added -= self.seconds[index]
        self._make_room(index, site, -1)

    def _make_room(self, index: int, site: int, sign: int) -> None:
        """Splits the live ranges of the results of ``index`` at ``site`` (``sign`` 1), or joins them again (-1)."""
        self.changed.add(site)
        for value in self.outputs[index]:
            before = self.read_before(value, site)
            if self.last_read(value, site) >= site:
                self.together[before + 1 : site] -= sign * self.size[value]
            else:
                self.together[site] += sign * self.size[value]
            self.changed.add(before)

    def _hold(self, value: int, site: int, sign: int) -> None:
        """Extends the live range of ``value`` up to ``site`` (``sign`` 1), or shortens it again (-1)."""
        last = self.last_read(value, site)
        if last < site:
            self.together[last + 1 : site + 1] += sign * self.size[value]
            self.changed.add(last)

    def is_read(self, index: int, place: int) -> bool:
        """Returns True if any op reads a result of the execution of ``index`` at ``place``."""
        runs = self.runs[index]
        following = bisect_left(runs, place + 1)
        until = runs[following] if following < len(runs) else self.end + 1
        reads = (self.reads[value] for value in self.outputs[index])
        return any(bisect_left(one, place) < bisect_left(one, until) for one in reads)

    def settle(self) -> None:
        for site in self.changed:
            if self.at[site]:
                self.apart[site] = self._least_absent(site)
            else:
                self.apart[site] = -self.workspace[site] if site < self.end else 0.0
        self.changed.clear()

    def _least_absent(self, site: int) -> float:
        """Returns the bytes of ``together`` that are absent at the fullest step of ``site``, less that step's workspace."""
        steps = self.at[site] if site == self.end else [*self.at[site], site]
        last = {value: step for step, index in enumerate(steps) for value in (*self.outputs[index], *self.inputs[index])}
        gone = [0] * (len(steps) + 1)
        for value, step in last.items():
            if self.last_read(value, site) == site and not (site == self.end and value in self.kept):
                gone[step + 1] += self.size[value]
        made = [self.graph.made_bytes[index] for index in steps]
        absent, least = sum(made), np.inf
        for step, index in enumerate(steps):
            absent += gone[step] - made[step]
            least = min(least, absent - self.workspace[index])
        return least


class Annealing:
    """Annealing on ``graph`` for a budget of ``budget`` bytes: a set of recomputations that moves change."""

    def __init__(self, graph: Graph, budget: int, seed: int) -> None:
        self.graph, self.budget, self.random, self.sites = graph, budget, random.Random(seed), Sites(graph)
        self.first_site = 0 if graph.single_phase else graph.num_forward
        self.movable = [index for index, movable in enumerate(self.sites.movable) if movable]
        self.cumulative = np.cumsum([graph.made_bytes[index] for index in self.movable]).tolist()
        self.chosen: list[tuple[int, int]] = []
        """Recomputed ops with their sites."""
        self.place: dict[tuple[int, int], int] = {}
        """Index of each pair in ``chosen``."""
        self.steps: list[tuple[bool, int, int]] = []
        """Recomputations that the current move added (True) or removed (False)."""
        self.chain = 0
        self.op_seconds = graph.step_seconds / max(len(graph.ops), 1)
        self.value_bytes = max(float(np.mean([size for size in self.sites.size if size] or [1])), 1.0)

    def change(self, adding: bool, index: int, site: int) -> None:
        """Adds or removes a recomputation."""
        self.steps.append((adding, index, site))
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

    def _withdraw(self, index: int, site: int) -> None:
        """Removes the recomputation of ``index`` at ``site``, and all recomputations that only it needed."""
        self.change(False, index, site)
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
        self.change(True, index, site)
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
        for _ in range(settings.refusals):
            index = self.movable[bisect_left(self.cumulative, self.random.random() * total)]
            following = self._gap_over(moment, index) if index < moment else None
            if following is not None:
                self.chain = settings.move_recomputations
                self._request(index, following, self.random.random() ** 2)
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

    def _over(self) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], float]:
        """Returns the bytes over the budget at each site (negative: free bytes), and the sum of the positive ones."""
        over = self.sites.together - self.sites.apart - self.budget
        return over, float(over[over > 0.0].sum())

    def _propose(self, over: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Makes one move. ``over`` holds the bytes over the budget at each site of the current state."""
        over_budget = np.flatnonzero(over > 0.0)
        if self.chosen and self.random.random() < 0.5:
            self._withdraw(*self.chosen[int(self.random.random() * len(self.chosen))])
            worst = int(self.sites.together.argmax())
            if self.sites.together[worst] > self.budget:
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
        factor, temperature, price = settings.price, 0.0, 0.0
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
                factor *= 1.0 + (settings.price_change if excess else -settings.price_change)
                factor = min(max(factor, settings.price), 1.0 / settings.price)
                price = factor * self.op_seconds / self.value_bytes
                temperature = self.op_seconds * hottest * (settings.temperature / 100 / hottest) ** (move / moves)
                energy = sites.added + price * excess
            before = sites.together, sites.apart, sites.added
            sites.together, sites.apart = sites.together.copy(), sites.apart.copy()
            self.steps.clear()
            self._propose(over)
            sites.settle()
            over_now, excess_now = self._over()
            change = sites.added + price * excess_now - energy
            if change > 0.0 and self.random.random() >= math.exp(-change / temperature):
                for adding, index, site in self.steps[::-1]:
                    self.change(not adding, index, site)
                sites.changed.clear()
                sites.together, sites.apart, sites.added = before
                continue
            over, excess, energy = over_now, excess_now, energy + change
            if excess == 0.0 and sites.added < best:
                best, fitting = sites.added, self.chosen.copy()
            elif excess < least:
                least, closest = excess, self.chosen.copy()
        return None if fitting is None else in_order(self.graph, fitting), in_order(self.graph, closest), interrupted


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
    moves = int(settings.moves_per_second * time_limit) // 2
    # For training steps, the plans of the search are close to the optimum; for single-phase graphs, they seldom are.
    for warm in (False, True) if graph.single_phase or found.plan is None else (True,):
        search = Annealing(graph, budget, seed + warm)
        if warm:
            schedule = (found.plan or found.smallest).schedule
            for index, site in zip(schedule.sequence, sites_of(graph, schedule), strict=True):
                if index != site and search.sites.movable[index] and site not in search.sites.runs[index]:
                    search.change(True, index, site)
            search.sites.settle()
        best, closest, interrupted = search.run(moves, settings.temperature / (10 if warm else 1), deadline)
        found = found.with_plans([Plan.of(graph, best or closest, "annealed")], budget, interrupted)
        if interrupted or found.is_converged(good_gap):
            break
    return found
