"""Which ops run again where, changed one by one, with the bytes that follow: what a local search moves in.

A *site* is an op of the given order, before which a recomputation runs, or the end; several at one site run in the graph's
order, or in another if that takes less memory. A read finds the newest copy of a value, and a copy lives from its making to
its last read. So any set of recomputations is a plan, and only its bytes can be too many. Graphs must not fuse.

Bytes at a site are exact. First all that is alive there is counted together; from that goes what is never alive at the same
moment within the site (`apart`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from autoremat.planner.cost.fused_traffic import traffic_of
from autoremat.planner.exact.interval_model import in_order
from autoremat.planner.graph.graph import Constraint, Graph
from autoremat.planner.graph.schedule import Schedule

MOST_ORDERED = 12
"""At most so many recomputations at one site are put into another order than the graph's."""


class Sites:
    """The state of a search on ``graph``: at first, nothing runs again."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.end = graph, len(graph.ops)
        self.runs: list[list[int]] = [[index] for index in range(self.end)]
        """For each op, where it runs, in order: its own place, then sites."""
        self.at: list[list[int]] = [[] for _ in range(self.end + 1)]
        """For each site, the ops that run again there, in order."""
        self.reads: list[list[int]] = [sorted(readers) for readers in graph.readers]
        """For each value, where it is read, in order, each read once."""
        self.inputs, self.outputs = graph.computed_inputs, graph.made
        self.producer = [-1 if value.producer is None else value.producer for value in graph.values]
        self.size = [0 if value.producer is None else value.bytes for value in graph.values]
        self.workspace = [op.workspace_bytes for op in graph.ops]
        self.kept = frozenset(graph.forward_outputs) | frozenset(graph.backward_outputs)
        for value in self.kept:
            self.reads[value].append(self.end)
        self.movable = self._movable()
        needed = range(self.end) if graph.single_phase else graph.required_forward
        self.seconds = [again if index in needed else 0.0 for index, again in enumerate(traffic_of(graph).recompute_seconds)]
        """What it costs to run an op again; the first run of what only the backward needs is not added work."""
        self.added = 0.0
        """Seconds of all that runs again."""
        self.together = self._together_at_first()
        """At each site, the bytes of all that is alive there at any moment."""
        self.apart = np.array([*(-float(bytes_) for bytes_ in self.workspace), 0.0])
        """At each site, by how much that exceeds the most bytes at one moment, workspaces included."""
        self.changed: set[int] = set()
        """Sites at which ``apart`` has to be found again: see :meth:`settle`."""

    def _movable(self) -> list[bool]:
        graph = self.graph
        held = frozenset(() if graph.single_phase else graph.forward_outputs)
        return [
            op.forward
            and op.rematerializable
            and op.constraint is not Constraint.SAVE
            and bool(op.outputs)
            and held.isdisjoint(op.outputs)
            for op in graph.ops
        ]

    def _together_at_first(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        bytes_at = np.zeros(self.end + 1)
        for value, made in enumerate(self.producer):
            if made >= 0:
                bytes_at[made : max([made, *self.reads[value]]) + 1] += self.size[value]
        bytes_at[self.graph.num_forward :] += self.graph.tangent_bytes
        return bytes_at

    def last_read(self, value: int, moment: int) -> int:
        """Of the newest copy of ``value`` at ``moment``: its last read, or its making if there is none."""
        runs, reads = self.runs[self.producer[value]], self.reads[value]
        following = bisect_left(runs, moment + 1)
        made = runs[following - 1]
        stop = bisect_left(reads, runs[following]) if following < len(runs) else len(reads)
        return max(reads[stop - 1], made) if stop else made

    def read_before(self, value: int, moment: int) -> int:
        """The last read of ``value`` before ``moment``, or a making after that."""
        runs, reads = self.runs[self.producer[value]], self.reads[value]
        made = runs[bisect_left(runs, moment) - 1]
        at = bisect_left(reads, moment)
        return max(reads[at - 1], made) if at else made

    def add(self, index: int, site: int) -> None:
        """Run op ``index`` at ``site``, where it does not run yet."""
        self._make_room(index, site, 1)
        insort(self.runs[index], site)
        insort(self.at[site], index)
        self.added += self.seconds[index]
        for value in self.inputs[index]:
            self._hold(value, site, 1)
            insort(self.reads[value], site)

    def remove(self, index: int, site: int) -> None:
        """The inverse of :meth:`add`."""
        for value in self.inputs[index]:
            reads = self.reads[value]
            del reads[bisect_left(reads, site)]
            self._hold(value, site, -1)
        self.runs[index].remove(site)
        self.at[site].remove(index)
        self.added -= self.seconds[index]
        self._make_room(index, site, -1)

    def _make_room(self, index: int, site: int, sign: int) -> None:
        """A new copy at ``site``: the one before it goes after its last read before. Or, with -1, the other way round."""
        self.changed.add(site)
        for value in self.outputs[index]:
            before = self.read_before(value, site)
            if self.last_read(value, site) >= site:
                self.together[before + 1 : site] -= sign * self.size[value]
            else:
                self.together[site] += sign * self.size[value]
            self.changed.add(before)

    def _hold(self, value: int, site: int, sign: int) -> None:
        """The copy of ``value`` is alive up to ``site``, or no longer."""
        last = self.last_read(value, site)
        if last < site:
            self.together[last + 1 : site + 1] += sign * self.size[value]
            self.changed.add(last)

    def is_read(self, index: int, place: int) -> bool:
        """Whether anything reads what the run of op ``index`` at ``place`` makes."""
        runs = self.runs[index]
        following = bisect_left(runs, place + 1)
        until = runs[following] if following < len(runs) else self.end + 1
        for value in self.outputs[index]:
            reads = self.reads[value]
            at = bisect_left(reads, place)
            if at < len(reads) and reads[at] < until:
                return True
        return False

    def settle(self) -> None:
        """Bring ``apart`` up to date."""
        for site in self.changed:
            if self.at[site]:
                self.apart[site] = self._apart(site)
            else:
                self.apart[site] = -self.workspace[site] if site < self.end else 0.0
        self.changed.clear()

    def _apart(self, site: int) -> float:
        """The bytes that are never alive at the same moment as the rest of the site, in its better order."""
        return self._better_order(site)[1]

    def _better_order(self, site: int) -> tuple[list[int], float]:
        """What runs again at ``site``, in the graph's order or in that of least growth, and what is then apart."""
        again = self.at[site]
        given = self._least_absent(site, again)
        if not 1 < len(again) <= MOST_ORDERED:
            return again, given
        other = self._by_growth(site, again)
        if other == again:
            return again, given
        least = self._least_absent(site, other)
        return (other, least) if least > given else (again, given)

    def _last_steps(self, site: int, steps: Sequence[int]) -> dict[int, int]:
        """For each value that is made or read at ``site`` and gone after it: the number of the step that reads it last."""
        last = {v: step for step, index in enumerate(steps) for v in (*self.outputs[index], *self.inputs[index])}
        kept = self.kept if site == self.end else ()
        return {v: step for v, step in last.items() if v not in kept and self.last_read(v, site) == site}

    def _least_absent(self, site: int, again: Sequence[int]) -> float:
        """Steps through what runs at ``site``: before a step its results do not exist, after the last read at the site what
        nothing reads later is gone."""
        steps = again if site == self.end else [*again, site]
        gone = [0] * (len(steps) + 1)
        for value, step in self._last_steps(site, steps).items():
            gone[step + 1] += self.size[value]
        made = [sum(self.size[value] for value in self.outputs[index]) for index in steps]
        absent, least = sum(made), np.inf
        for step, index in enumerate(steps):
            absent += gone[step] - made[step]
            least = min(least, absent - self.workspace[index])
        return least

    def _by_growth(self, site: int, again: Sequence[int]) -> list[int]:
        """``again`` in an order in which each step leaves as little behind as the steps that are possible then allow."""
        steps = again if site == self.end else [*again, site]
        reads: dict[int, set[int]] = {v: set() for v in self._last_steps(site, steps)}
        """Of the values that go at this site: who still has to read them."""
        for index in steps:
            for value in self.inputs[index]:
                if value in reads:
                    reads[value].add(index)
        here = {v for index in again for v in self.outputs[index]}
        left, found = list(again), []
        while left:
            ready = [index for index in left if here.isdisjoint(self.inputs[index])]
            best = min(ready, key=lambda index: (self._growth(index, reads), index))
            left.remove(best)
            found.append(best)
            here.difference_update(self.outputs[best])
            for value in self.inputs[best]:
                if value in reads:
                    reads[value].discard(best)
        return found

    def _growth(self, index: int, reads: dict[int, set[int]]) -> int:
        """By how many bytes running ``index`` next changes what is alive."""
        freed = sum(self.size[v] for v in self.inputs[index] if reads.get(v) == {index})
        return sum(self.size[v] for v in self.outputs[index]) - freed

    def schedule(self) -> Schedule:
        """The executions in order."""
        return in_order(self.graph, [self._better_order(site)[0] if self.at[site] else [] for site in range(self.end + 1)])
