"""``autoremat.pareto``: compares plans of a step with torch's own partitions, fixed policies and the lower bound."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autoremat.basics.checks import options_of
from autoremat.basics.display import PlainTable, Shown
from autoremat.basics.errors import ConstraintWarning, OptionsError, OptionWarning, PlanInvalid
from autoremat.basics.progress import status_if_slow
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.basics.warn import warn_user
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.compiler.reference import plan_of_partition
from autoremat.options.options import Options
from autoremat.planner.constraints.constraints import Constraints
from autoremat.planner.constraints.model_structure import Forward
from autoremat.planner.constraints.policies import parse
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.report.plots import BOUND, OURS, POLICY, TORCH
from autoremat.tools.explain import previews
from autoremat.torch_private import compilers, fake_tensors

POLICIES = ("full", "uniform:2", "uniform:4", "sqrt", "segments:4", "selective", "selective:mlp", "selective:layernorm")
"""Policies of common practice. ``block:`` with half of the layers is added per graph."""


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

    @classmethod
    def of(cls, plan: Plan, family: str, label: str) -> Point:
        """Returns the point of ``plan``."""
        return cls(family, label, plan.peak_bytes, plan.added_seconds, plan.graph.step_seconds, plan)

    @property
    def overhead(self) -> float:
        """Seconds of recomputation as a share of the step without it."""
        return self.added_seconds / self.step_seconds if self.step_seconds else 0.0


class Pareto(Shown, list[Point]):
    """Points of one graph: a list that prints as a table."""

    def line(self) -> str:
        ours = sorted((point.peak_bytes, point.overhead) for point in self if point.family == OURS)
        ends = [f"{format_bytes(peak)} (adding {overhead:.1%} of the step)" for peak, overhead in (*ours[:1], *ours[-1:])]
        return f"{len(self)} points, {len(ours)} of them ours, from {' to '.join(ends)}"

    def tables(self) -> Sequence[PlainTable]:
        title = "time against memory; budgets also hold the code headroom, small allocations of Inductor's code"
        table = PlainTable(title, ("peak", "added", "of the step", "family", "budget or policy"), numbers=3)
        for point in sorted(self, key=lambda point: (point.peak_bytes, point.added_seconds)):
            peak, added = format_bytes(point.peak_bytes), format_seconds(point.added_seconds)
            table.add_row(peak, added, f"{point.overhead:.1%}", point.family, point.label)
        return [table]


def pareto(
    model_or_fn: Callable[..., Any],
    *args: Any,
    points: int = 20,
    torch_budgets: Sequence[float] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> Pareto:
    """Returns points of time and peak memory of ``model_or_fn(*args, **kwargs)``, which is traced once without running it.

    These are plans at ``points`` budgets, from the minimum peak found to no recomputation, the lower bound at each, fixed
    policies, and torch's partitions at ``torch_budgets``: values of ``activation_memory_budget``, an empty tuple for none, for
    torch's partitioner takes minutes on a large graph. Times are in seconds and count recomputation alone; peaks are in bytes.
    After graph breaks the points describe the graph with the highest peak.

    Raises ``OptionsError`` for ``points`` below 2 or a budget in ``options``, and all errors of ``autoremat.explain``.
    """
    if points < 2:
        raise OptionsError(f"points={points} is not accepted. Accepted: 2 or more")
    for name in ("memory_budget", "max_slowdown"):
        if name in options_of(options):
            raise OptionsError(f"{name} has no meaning for pareto, which compares many plans: leave it out of the options")
    parsed = replace(Options.parse(options, None, compilers.inductor_config_names), memory_budget=None)

    def look(priced: PricedGraph) -> Pareto:
        host_bytes = priced.problem.request.limits.host_bytes
        ours = front_of(without_traffic(priced.graph), points, parsed.time_limit, host_bytes)
        return Pareto([*ours, *points_of_torch(priced, torch_budgets)])

    with status_if_slow(f"comparing plans for {points} budgets", shown=parsed.progress):
        found, _ = previews(model_or_fn, args, kwargs, parsed, device, look)
    return max(found, key=lambda graph: max(point.peak_bytes for point in graph))


def without_traffic(graph: Graph) -> Graph:
    """Returns ``graph`` whose saves cost no time, as in the lower bounds and in torch's objective."""
    return replace(graph, machine=replace(graph.machine, saving_seconds_per_byte=0.0))


def front_of(graph: Graph, points: int, time_limit: float, host_bytes: int | None = None) -> Iterator[Point]:
    """Yields our plans at ``points`` budgets from the least peak to the baseline's, the lower bound at each, and policies.

    ``time_limit`` is in seconds for each budget. ``host_bytes`` bounds the bytes of stays on the host.
    """
    planner = Planner(graph, time_limit * points, limits=Limits(host_bytes=host_bytes))
    smallest, baseline = planner.lowest, planner.baseline
    planner.restart()
    least, rest = smallest.peak_bytes, baseline.peak_bytes - smallest.peak_bytes
    for budget in sorted({least + rest * i // (points - 1) for i in range(points)}):
        yield Point.of(planner.find(Limits(budget)).plan or smallest, OURS, f"{budget} bytes")
        if (seconds := planner.bounds.within(Limits(budget)).seconds) < math.inf:
            yield Point(BOUND, f"{budget} bytes", budget, seconds, graph.step_seconds)
    single = {value for op in graph.ops[: graph.num_forward] if not op.rematerializable for value in op.outputs}
    schedule = build_schedule(graph, single.union(graph.forward_outputs))
    yield Point.of(baseline, POLICY, "save everything")
    yield Point.of(Plan.of(graph, schedule), POLICY, "recompute everything")
    half = len(Forward(graph).layers) // 2
    for label in (*POLICIES, *([f"block:{half}"] if half else [])):
        with warnings.catch_warnings():  # a policy without effect is left out below, so its warning is redundant
            warnings.simplefilter("ignore", ConstraintWarning)
            plan = Constraints(policy=parse(label), exact=True).apply(graph).candidate
        if plan is not None and plan.recomputed:
            yield Point.of(plan, POLICY, label)


def points_of_torch(priced: PricedGraph, shares: Sequence[float]) -> Iterator[Point]:
    """Yields torch's partitions at these budgets, in torch's sequence of ops. What the simulator cannot follow is left out."""
    captured, joint = replace(priced.captured, graph=without_traffic(priced.captured.graph)), priced.joint
    for share in shares:
        halves = fake_tensors.partition_for(share, captured.joint, joint.inputs, joint.keywords)
        try:
            yield Point.of(plan_of_partition(captured, *halves), TORCH, f"{share:g}")
        except PlanInvalid as error:
            warn_user(f"torch's partition at activation_memory_budget={share:g} is left out: {error}", OptionWarning)
