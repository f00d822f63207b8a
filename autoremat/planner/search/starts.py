"""The schedules that the local search starts from: the minimum cuts of a graph at all prices per saved byte, in one segment.

They are the vertices of the convex curve of saved bytes against recomputation. Each recomputed value runs again once, just in
time, and lives until its last reader. A single-phase graph has those of its splits.
"""

from __future__ import annotations

from functools import cached_property

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.min_cut import MinCut
from autoremat.planner.search.work_limit import PREPARATION, SIMULATION, WorkLimit
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.search


class Starts:
    """The minimum cuts of a graph with two phases, within ``limit``, and the plans of other saved sets."""

    def __init__(self, graph: Graph, limit: WorkLimit | None = None) -> None:
        self.graph, self.limit = graph, limit or WorkLimit()
        with self.limit.unit(PREPARATION * len(graph.ops)):
            self.mincut = MinCut(graph, self.limit)
        self.lacks_cuts = False
        """True if the limit passed before all cuts were found."""

    def plan(self, saved: frozenset[int], label: str) -> Plan:
        """Returns the plan that saves ``saved`` and computes the rest again just in time."""
        with self.limit.unit():
            schedule = build_schedule(self.graph, saved)
            self.limit.simulated += 1
            self.limit.add(SIMULATION * len(schedule.sequence))
            return Plan.of(self.graph, schedule, label)

    def save_everything(self) -> Plan:
        """Returns the plan without recomputation. All values that the backward reads are saved."""
        return self.plan(self.graph.backward_needs, "save all")

    def save_what_constraints_allow(self) -> Plan:
        """Returns the plan that recomputes only what constraints demand."""
        if not any(op.constraint is Constraint.RECOMPUTE for op in self.graph.ops):
            return self.save_everything()
        return self.plan(self.mincut.solve(0.0), "save what constraints allow")

    def least_traffic(self) -> Plan:
        """Returns the plan of the minimum cut of least time. It recomputes only what saving would slow down."""
        return self.plan(self.mincut.cut(0.0, traffic=True).saved, "least traffic")

    def curve(self) -> list[frozenset[int]]:
        """Returns the minimum cuts at all prices per saved byte, with the memory traffic of saving; the most saved bytes come
        first.

        Between two known cuts, the search tries the price at which both cost the same. The minimum cut at that price is a new
        vertex of the curve, if there is one between them. The method is that of Eisner and Severance, "Mathematical Techniques
        for Efficient Record Segmentation in Large Shared Databases", J. ACM 1976.
        """
        ends = [self.mincut.cut(price, traffic=True) for price in (0.0, self.mincut.top_price)]
        found = {point.saved: point for point in ends}
        gaps = [(ends[0], ends[1])]
        while gaps and len(found) < settings.curve_points:
            if self.limit.has_passed(settings.starts_share):
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
        cuts = [self.plan(saved, f"cut {number}") for number, saved in enumerate(self.curve())]
        return [self.save_what_constraints_allow(), *cuts]
