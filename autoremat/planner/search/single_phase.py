"""Planning of single-phase graphs, in which any op may run again anywhere later.

A split at an op turns such a graph into a training step: the ops before it become the forward, the rest the backward. Op and
value numbers stay. The joined halves of a plan of the split are therefore a plan of the whole graph. Such a plan recomputes
only ops before the split, and only after it. The cuts of several splits are starts of the local search, which recomputes
anywhere.

The lower bound of a split uses only the start of its backward. At that op, every plan whose first executions follow the given
sequence needs values from which the rest can be computed. Later program points give no bound, because values computed after the
split may be recomputed, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import numpy as np

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.lower_bounds import Bounds, Moments, working_set_bytes
from autoremat.planner.search.min_cut import MinCut
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.starts import Starts
from autoremat.planner.search.work_limit import PREPARATION, WorkLimit
from autoremat.planner.settings import SETTINGS


def split_at(graph: Graph, place: int) -> Graph:
    """Returns the training step whose forward is the first ``place`` ops of ``graph``, all of which must run in the forward.

    Raises ``ValueError`` unless both halves have ops.
    """
    if not 0 < place < len(graph.ops):
        raise ValueError(f"place={place} leaves one half of {len(graph.ops)} ops empty")
    return replace(
        graph,
        ops=(*graph.ops[:place], *(replace(op, forward=False) for op in graph.ops[place:])),
        values=tuple(replace(value, forms=()) if value.forms else value for value in graph.values),  # stays need two halves
        forward_outputs=(),
        backward_outputs=tuple(dict.fromkeys((*graph.forward_outputs, *graph.backward_outputs))),
        must_run=tuple(range(place)),
        machine=replace(graph.machine, saving_seconds_per_byte=0.0),  # a single-phase graph saves nothing for a backward
    )


def joined(graph: Graph, plan: Plan) -> Plan:
    """Returns ``plan``, a plan of a split of ``graph``, as a plan of ``graph``. A plan of ``graph`` itself is returned
    unchanged."""
    return plan if plan.graph is graph else Plan.of(graph, Schedule(plan.sequence, ()), plan.label)


def without_recomputation(graph: Graph) -> Plan:
    """Returns the plan that runs all ops once in the given sequence and keeps every value until its last reader."""
    return Plan.of(graph, build_schedule(graph, graph.backward_needs), "save all")


def full_places(graph: Graph, stretches: int) -> list[int]:
    """Returns the op with the most live bytes without recomputation, for each of ``stretches`` equal stretches of the graph."""
    bytes_at = without_recomputation(graph).timeline.bytes_at
    parts = np.array_split(np.arange(1, len(graph.ops)), stretches)
    return [int(part[bytes_at[part].argmax()]) for part in parts if len(part)]


class OnePhaseStarts:
    """The minimum cuts of the splits of a single-phase graph, as plans of the graph."""

    def __init__(self, graph: Graph, limit: WorkLimit) -> None:
        self.graph, self.limit = graph, limit
        self.lacks_cuts = False
        """True if the limit passed before all cuts were found."""

    def save_everything(self) -> Plan:
        """Returns the plan without recomputation."""
        return without_recomputation(self.graph)

    save_what_constraints_allow = least_traffic = save_everything

    @cached_property
    def plans(self) -> list[Plan]:
        """The plans of all cuts, and the one without recomputation."""
        found = [self.save_everything()]
        places = (*full_places(self.graph, 1), *full_places(self.graph, SETTINGS.search.splits - 1))
        for place in dict.fromkeys(places):  # the fullest one first
            if self.limit.has_passed(SETTINGS.search.starts_share):
                self.lacks_cuts = True
                break
            starts = Starts(split_at(self.graph, place), self.limit)
            found += [joined(self.graph, plan) for plan in starts.plans]
            self.lacks_cuts = self.lacks_cuts or starts.lacks_cuts
        return found


class OnePhaseBounds:
    """Lower bounds of a single-phase graph: the best over its splits at ops with many live bytes."""

    def __init__(self, graph: Graph, limit: WorkLimit | None = None) -> None:
        self.graph, limit = graph, limit or WorkLimit()
        self.starts: list[Moments] = []
        for place in full_places(graph, SETTINGS.bound.single_phase_stretches):
            if limit.has_passed():
                break
            with limit.unit(PREPARATION * len(graph.ops)):
                split = split_at(graph, place)
                self.starts.append(Moments(split, MinCut(split, limit), only_first=True))

    def seconds(self, budget: int, traffic: bool = True) -> float:
        """Returns a lower bound on the cost in seconds of plans within ``budget`` bytes; infinite if no plan fits."""
        if working_set_bytes(self.graph) > budget:
            return math.inf
        return max((start.seconds(budget, traffic) for start in self.starts), default=0.0)

    def peak_bytes(self) -> int:
        """Returns a lower bound on the peak of any plan."""
        return max([working_set_bytes(self.graph), *(start.moment_bytes() for start in self.starts)])


def bounds_of(graph: Graph) -> Bounds:
    """Returns the lower bounds of a graph of one or two phases."""
    return OnePhaseBounds(graph) if graph.single_phase else Moments(graph, MinCut(graph))


def fits(plan: Plan, budget: int | None) -> bool:
    """Returns True if the peak of ``plan`` is at most ``budget`` bytes (None: no bound)."""
    return budget is None or plan.peak_bytes <= budget


def outcome(
    plans: list[Plan], budget: int | None, bounds: Bounds, candidates: int, interrupted: bool = False
) -> PlanningResult:
    """Returns the cheapest fitting plan and the smallest of ``plans`` (at least one), with the lower bounds of their graph."""
    best = min((plan for plan in plans if fits(plan, budget)), key=lambda p: (p.cost_seconds, p.peak_bytes), default=None)
    smallest = min(plans, key=lambda p: (p.peak_bytes, p.cost_seconds))
    for plan in filter(None, (best, smallest)):
        plan.check()
    seconds = 0.0 if budget is None else bounds.seconds(budget)
    baseline = without_recomputation(smallest.graph)
    return PlanningResult(best, baseline, smallest, bounds.peak_bytes(), seconds, candidates, interrupted)
