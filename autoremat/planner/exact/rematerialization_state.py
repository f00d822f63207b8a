"""State of a local search: a set of recomputations, changed one by one, with the bytes that follow from it.

    bytes(site)  =  together(site) - apart(site)

A *site* is an op of the given sequence, before which recomputations run in the graph's sequence, or the end. A live range lasts
from its computation to its last read, which finds the newest one. So any set of recomputations is a valid plan; only its peak
can exceed the budget. Graphs must not fuse.

Bytes at a site are exact. ``together`` counts everything that is live at any time within the site. ``apart`` corrects for the
values that are never live at the same time.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from autoremat.planner.cost.durations import traffic_of
from autoremat.planner.exact.interval_model import in_order
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule


class Sites:
    """State of a search on ``graph``. The initial state has no recomputation."""

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
        for value in self.outputs[index]:
            reads = self.reads[value]
            at = bisect_left(reads, place)
            if at < len(reads) and reads[at] < until:
                return True
        return False

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
        made = [sum(self.size[value] for value in self.outputs[index]) for index in steps]
        absent, least = sum(made), np.inf
        for step, index in enumerate(steps):
            absent += gone[step] - made[step]
            least = min(least, absent - self.workspace[index])
        return least

    def schedule(self) -> Schedule:
        return in_order(self.graph, self.at)
