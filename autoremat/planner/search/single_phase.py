"""Graphs of one phase, in which any op may run again anywhere later.

Split at a place, such a graph is a training step: what comes before is its forward, the rest its backward. Op and value
numbers stay, so a plan of the split graph, its two halves joined, is a plan of the whole. It recomputes only ops before the
place, and only after it: several places are tried, and the best plan is taken.

For the bounds only the start of the backward counts. At that op every plan whose first executions are in the given order
needs values from which all the rest that reads earlier values can run; later moments say nothing, because what is made
after the place may be recomputed too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule, build_schedule
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.candidates import Strategies
from autoremat.planner.search.lower_bounds import Bounds, Moments, working_set_bytes
from autoremat.planner.search.min_cut import MinCut
from autoremat.planner.search.planner import Planner, PlanningResult

SPLITS = 4
"""Places at which a graph is split to be planned: the fullest op of all, and of each of one fewer stretches."""

BOUND_STRETCHES = 16
"""Stretches of a graph of which the fullest op gives a bound."""


def split_at(graph: Graph, place: int) -> Graph:
    """The training step whose forward is the first ``place`` ops of ``graph``, all of which run in it.

    Raises ``ValueError`` unless both halves have ops.
    """
    if not 0 < place < len(graph.ops):
        raise ValueError(f"place={place} leaves one half of {len(graph.ops)} ops empty")
    return replace(
        graph,
        ops=(*graph.ops[:place], *(replace(op, forward=False) for op in graph.ops[place:])),
        forward_outputs=(),
        backward_outputs=tuple(dict.fromkeys((*graph.forward_outputs, *graph.backward_outputs))),
        must_run=tuple(range(place)),
        saving_seconds_per_byte=0.0,  # nothing is saved for a backward where there is none
    )


def joined(graph: Graph, plan: Plan) -> Plan:
    """A plan of a split of ``graph`` as a plan of ``graph``; a plan of ``graph`` itself stays as it is."""
    return plan if plan.graph is graph else Plan.of(graph, Schedule(plan.sequence, ()), plan.label)


def without_recomputation(graph: Graph) -> Plan:
    """All ops in the given order, everything kept for its last reader."""
    return Plan.of(graph, build_schedule(graph, graph.backward_needs), "save all")


def full_places(graph: Graph, stretches: int) -> list[int]:
    """Of each of so many stretches of a graph of one phase, the op during which most is alive without recomputation."""
    bytes_at = without_recomputation(graph).timeline.bytes_at
    parts = np.array_split(np.arange(1, len(graph.ops)), stretches)
    return [int(part[bytes_at[part].argmax()]) for part in parts if len(part)]


def steps_of(graph: Graph) -> Iterator[Graph]:
    """The training steps to plan for ``graph``: itself, or its splits, at the fullest op first, if it has one phase (none for
    less than two ops)."""
    if not graph.single_phase:
        yield graph
        return
    for place in dict.fromkeys((*full_places(graph, 1), *full_places(graph, SPLITS - 1))):
        yield split_at(graph, place)


class OnePhaseBounds:
    """The bounds of a graph of one phase: the best over splits at its full places."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        splits = [split_at(graph, place) for place in full_places(graph, BOUND_STRETCHES)]
        self.starts = [Moments(split, MinCut(split), only_first=True) for split in splits]
        self._seconds: dict[int, float] = {}  # every split asks for the same budgets

    def seconds(self, budget: int) -> float:
        """Every plan within ``budget`` bytes adds at least so many seconds; infinite if there is none."""
        if budget not in self._seconds:
            enough = working_set_bytes(self.graph) <= budget
            most = max((start.seconds(budget) for start in self.starts), default=0.0)
            self._seconds[budget] = most if enough else math.inf
        return self._seconds[budget]

    def peak_bytes(self) -> int:
        """Every plan has at least this peak."""
        return max([working_set_bytes(self.graph), *(start.moment_bytes() for start in self.starts)])


def bounds_of(graph: Graph) -> Bounds:
    """The bounds of a graph of one or two phases."""
    return OnePhaseBounds(graph) if graph.single_phase else Moments(graph, MinCut(graph))


def fits(plan: Plan, budget: int | None) -> bool:
    """Whether the peak of ``plan`` is at most ``budget`` bytes (None: no bound)."""
    return budget is None or plan.peak_bytes <= budget


def outcome(plans: list[Plan], budget: int | None, bounds: Bounds, candidates: int, interrupted: bool) -> PlanningResult:
    """The cheapest and the smallest of ``plans``, of which there is at least one, with the bounds of their graph."""
    best = min((plan for plan in plans if fits(plan, budget)), key=lambda p: (p.cost_seconds, p.peak_bytes), default=None)
    smallest = min(plans, key=lambda p: (p.peak_bytes, p.cost_seconds))
    for plan in filter(None, (best, smallest)):
        plan.check()
    seconds = 0.0 if budget is None else bounds.seconds(budget)
    baseline = without_recomputation(smallest.graph)
    return PlanningResult(best, baseline, smallest, bounds.peak_bytes(), seconds, candidates, interrupted)


def search(graph: Graph, budget: int | None, time_limit: float, strategies: Strategies) -> PlanningResult:
    """The cheapest plan that these strategies of candidates find within ``budget`` bytes (None: no bound).

    Filling is stepwise: a larger budget never costs more. Each split may take half of the time that is left.
    """
    if not graph.single_phase:
        return Planner(graph, time_limit, strategies, stepwise=True).find(budget)
    deadline = time.monotonic() + time_limit
    plans, bounds = [without_recomputation(graph)], OnePhaseBounds(graph)
    simulated, interrupted = 1, False
    for step in steps_of(graph):
        known = min((plan.added_seconds for plan in plans if fits(plan, budget)), default=math.inf)
        if known <= (0.0 if budget is None else bounds.seconds(budget)):
            break
        left = deadline - time.monotonic()
        if left <= 0.0 and simulated > 1:
            interrupted = True
            break
        planner = Planner(step, left / 2, strategies, stepwise=True, bounds=bounds)
        found = (planner.choose(budget, known), planner.search.smallest)
        plans += [joined(graph, plan) for plan in filter(None, found)]
        simulated += planner.search.simulated
        interrupted = interrupted or planner.search.interrupted
    return outcome(plans, budget, bounds, simulated, interrupted)
