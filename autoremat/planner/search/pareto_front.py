"""Pareto front of time and memory: plans of one graph at many peaks, fixed policies, and the lower bound."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoremat.basics.display import PlainTable, Shown
from autoremat.basics.errors import ConstraintWarning
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.constraints.constraints import Constraints
from autoremat.planner.constraints.model_structure import Forward
from autoremat.planner.constraints.policies import Block, Full, Policy, Segments, Selective, Sqrt, Uniform
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner

OURS, BOUND, POLICY, TORCH = "autoremat", "lower bound", "policy", "torch"


@dataclass(frozen=True)
class Point:
    """One plan, or a lower bound on all plans of that peak. Seconds are estimates of the cost model; bytes are simulated."""

    family: str
    """One of "autoremat", "torch", "policy" and "lower bound"."""
    label: str
    """Name within the family: the requested budget, or the policy."""
    peak_bytes: int
    added_seconds: float
    step_seconds: float
    """Seconds of the step without recomputation."""
    plan: Plan | None = field(default=None, repr=False, compare=False)
    """The plan, for the option ``plan``; None for a lower bound."""

    @property
    def overhead(self) -> float:
        """Seconds of recomputation as a share of the step without it."""
        return self.added_seconds / self.step_seconds if self.step_seconds else 0.0


HEADROOM_NOTE = (
    "Peaks and budgets exclude the code headroom: small allocations of Inductor's code, which a budget must also hold."
)


class Pareto(Shown, list[Point]):
    """Points of one graph: a list that prints as a table."""

    def line(self) -> str:
        """Returns the one-line representation."""
        ours = sorted((point for point in self if point.family == OURS), key=lambda point: point.peak_bytes)
        if not ours:
            return f"{len(self)} points"
        ends = [f"{format_bytes(point.peak_bytes)} (adding {point.overhead:.1%} of the step)" for point in (ours[0], ours[-1])]
        return f"{len(self)} points, {len(ours)} of them ours, from {' to '.join(ends)}"

    def tables(self) -> Sequence[PlainTable]:
        """Returns the printed table, sorted by peak, and a note on its figures."""
        table = PlainTable("time against memory", ("peak", "added", "of the step", "family", "budget or policy"), numbers=3)
        for point in self.by_peak():
            peak, added = format_bytes(point.peak_bytes), format_seconds(point.added_seconds)
            table.add_row(peak, added, f"{point.overhead:.1%}", point.family, point.label)
        note = PlainTable("", ("",), numbers=0, show_header=False)
        note.add_row(HEADROOM_NOTE)
        return [table, note]

    def by_peak(self) -> list[Point]:
        """Returns the points by increasing peak."""
        return sorted(self, key=lambda point: (point.peak_bytes, point.added_seconds))


def point_of(plan: Plan, family: str, label: str) -> Point:
    """Returns the point of ``plan``."""
    return Point(family, label, plan.peak_bytes, plan.added_seconds, plan.graph.step_seconds, plan=plan)


def levels(least: int, most: int, count: int) -> list[int]:
    """Returns ``count`` budgets, evenly spread from ``least`` to ``most`` bytes, including both."""
    return sorted({least + (most - least) * i // max(count - 1, 1) for i in range(count)} | {least, most})


def our_points(graph: Graph, points: int, time_limit: float, host_bytes: int | None = None) -> Iterator[Point]:
    """Yields our plans at ``points`` budgets, from the minimum peak found to the baseline's peak, and the lower bound at each.

    Saving must cost the graph no time, as in what policies and torch compare.
    ``time_limit`` is the number of seconds for each budget. ``host_bytes`` bounds the bytes of stays on the host.
    """
    planner = Planner(graph, time_limit * points, limits=Limits(host_bytes=host_bytes))
    smallest = planner.lowest
    planner.restart()
    for budget in levels(smallest.peak_bytes, planner.baseline.peak_bytes, points):
        planning = planner.find(Limits(budget))
        plan = planning.plan or smallest
        yield point_of(plan, OURS, f"{budget} bytes")
        bound = planner.bounds.within(Limits(budget)).seconds
        if bound < math.inf:
            yield Point(BOUND, f"{budget} bytes", budget, bound, graph.step_seconds)


POLICIES: tuple[tuple[str, Policy], ...] = (
    ("full", Full()),
    ("uniform:2", Uniform(2)),
    ("uniform:4", Uniform(4)),
    ("sqrt", Sqrt()),
    ("segments:4", Segments(4)),
    ("selective", Selective()),
    ("selective:mlp", Selective(("mlp",))),
    ("selective:layernorm", Selective(("layernorm",))),
)
"""Policies of common practice, spelled as in the options. ``block:`` with half of the layers is added per graph."""


def policy_points(graph: Graph) -> Iterator[Point]:
    """Yields the plans without and with full recomputation, and the common policies that recompute something in this graph."""
    single = {value for op in graph.ops[: graph.num_forward] if not op.rematerializable for value in op.outputs}
    for label, saved in (
        ("save everything", graph.backward_needs),
        ("recompute everything", single.union(graph.forward_outputs)),
    ):
        yield point_of(Plan.of(graph, build_schedule(graph, saved), label), POLICY, label)
    half = len(Forward(graph).layers) // 2
    block: list[tuple[str, Policy]] = [(f"block:{half}", Block(half))] if half else []
    for label, policy in (*POLICIES, *block):
        with warnings.catch_warnings():  # a policy without effect is left out below, so its warning is redundant
            warnings.simplefilter("ignore", ConstraintWarning)
            ordered = Constraints(policy=policy, exact=True).apply(graph)
        if ordered.candidate is not None and ordered.candidate.recomputed:
            yield point_of(ordered.candidate, POLICY, label)
