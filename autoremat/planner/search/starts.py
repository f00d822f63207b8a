"""The schedules that the local search starts from: the minimum cuts of a graph at all prices per saved byte, in one segment.

They are the vertices of the convex curve of saved bytes against recomputation. Each recomputed value runs again once, just in
time, and lives until its last reader.

A split at an op turns a single-phase graph into a training step: the ops before it become the forward, the rest the backward.
The joined halves of a plan of the split are a plan of the whole graph. The split at the fullest op has the starts.
"""

from dataclasses import replace
from functools import cached_property

import numpy as np

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.min_cut import MinCut
from autoremat.planner.search.work_limit import PREPARATION, SIMULATION, WorkLimit
from autoremat.planner.settings import settings


def split_at(graph: Graph, place: int) -> Graph:
    """Returns the training step whose forward is the first ``place`` ops of ``graph``, all of which must run in the forward."""
    return replace(
        graph,
        ops=(*graph.ops[:place], *(replace(op, forward=False) for op in graph.ops[place:])),
        values=tuple(replace(value, forms=()) if value.forms else value for value in graph.values),  # stays need two halves
        forward_outputs=(),
        backward_outputs=tuple(dict.fromkeys((*graph.forward_outputs, *graph.backward_outputs))),
        must_run=tuple(range(place)),
        machine=replace(graph.machine, saving_seconds_per_byte=0.0),  # a single-phase graph saves nothing for a backward
    )


def without_recomputation(graph: Graph) -> Plan:
    """Returns the plan that runs all ops once in the given sequence and keeps every value until its last reader."""
    return Plan.of(graph, build_schedule(graph, graph.backward_needs), "save all")


def full_places(graph: Graph, stretches: int) -> list[int]:
    """Returns the op with the most live bytes without recomputation, for each of ``stretches`` equal stretches of the graph."""
    bytes_at = without_recomputation(graph).timeline.bytes_at
    parts = np.array_split(np.arange(1, len(graph.ops)), stretches)
    return [int(part[bytes_at[part].argmax()]) for part in parts if len(part)]


class Starts:
    """The minimum cuts of a graph or of its splits, within ``limit``, and the plans of other saved sets."""

    def __init__(self, graph: Graph, limit: WorkLimit | None = None) -> None:
        self.graph, self.limit = graph, limit or WorkLimit()
        if not graph.single_phase:
            with self.limit.unit(PREPARATION * len(graph.ops)):
                self.mincut = MinCut(graph, self.limit)
        self.lacks_cuts = False
        """True if the limit passed before all cuts were found."""

    def plan(self, saved: frozenset[int], label: str) -> Plan:
        """Returns the plan that saves ``saved`` and computes the rest again just in time."""
        schedule = build_schedule(self.graph, saved)
        with self.limit.unit(SIMULATION * len(schedule.sequence)):
            return Plan.of(self.graph, schedule, label)

    def save_everything(self) -> Plan:
        """Returns the plan without recomputation. All values that the backward reads are saved."""
        return self.plan(self.graph.backward_needs, "save all")

    def save_what_constraints_allow(self) -> Plan:
        """Returns the plan that recomputes only what constraints demand."""
        if self.graph.single_phase or not any(op.constraint is Constraint.RECOMPUTE for op in self.graph.ops):
            return self.save_everything()
        return self.plan(self.mincut.cut(0.0).saved, "save what constraints allow")

    def least_traffic(self) -> Plan:
        """Returns the plan of the minimum cut of least time. It recomputes only what saving would slow down."""
        return self.plan(self.mincut.cut(0.0, traffic=True).saved, "least traffic")

    def curve(self) -> list[frozenset[int]]:
        """Returns the minimum cuts at all prices, with the memory traffic of saving; the most saved bytes come first.

        Between two known cuts, the minimum cut at the price at which both cost the same is a new vertex of the curve, if there
        is one between them (Eisner and Severance, "Mathematical Techniques for Efficient Record Segmentation in Large Shared
        Databases", J. ACM 1976).
        """
        ends = [self.mincut.cut(price, traffic=True) for price in (0.0, self.mincut.top_price)]
        found = {point.saved: point for point in ends}
        gaps = [(ends[0], ends[1])]
        while gaps and len(found) < settings.levels:
            if self.limit.has_passed(settings.search_share / 2):
                self.lacks_cuts = True
                break
            gaps.sort(key=lambda pair: pair[0].bytes - pair[1].bytes)
            rich, lean = gaps.pop()
            if rich.bytes - lean.bytes <= 0.0:
                continue
            price = (lean.seconds - rich.seconds) / (rich.bytes - lean.bytes)
            middle = self.mincut.cut(max(price, 0.0), traffic=True)
            if middle.saved in found or not lean.bytes < middle.bytes < rich.bytes:
                continue
            found[middle.saved] = middle
            gaps += [(rich, middle), (middle, lean)]
        return [point.saved for point in sorted(found.values(), key=lambda p: (-p.bytes, p.seconds))]

    @cached_property
    def plans(self) -> list[Plan]:
        """The plans of all cuts, and the one that saves all that constraints allow. The first cut costs the least of all."""
        found = [self.save_what_constraints_allow()]
        if not self.graph.single_phase:
            return found + [self.plan(saved, f"cut {number}") for number, saved in enumerate(self.curve())]
        for place in full_places(self.graph, 1):
            starts = Starts(split_at(self.graph, place), self.limit)
            found += [Plan.of(self.graph, Schedule(plan.sequence, ()), plan.label) for plan in starts.plans]
            self.lacks_cuts = starts.lacks_cuts
        return found
