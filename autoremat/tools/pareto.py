"""``autoremat.pareto``: compares plans of a step with torch's own partitions, fixed policies and the lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoremat.basics.checks import options_of
from autoremat.basics.errors import OptionsError, OptionWarning, PlanInvalid
from autoremat.basics.progress import status_if_slow
from autoremat.basics.warn import warn_user
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.compiler.reference import plan_of_partition
from autoremat.options.options import Options
from autoremat.planner.graph.graph import Graph
from autoremat.planner.search.pareto_front import TORCH, Pareto, Point, our_points, point_of, policy_points
from autoremat.tools.explain import previews
from autoremat.torch_private import compilers, fake_tensors

TORCH_BUDGETS = tuple(tenths / 10 for tenths in range(10, 0, -1))
"""Values of ``activation_memory_budget``, a setting of torch, at which its partitions are taken."""


def pareto(
    model_or_fn: Callable[..., Any],
    *args: Any,
    points: int = 20,
    torch_budgets: Sequence[float] = TORCH_BUDGETS,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> Pareto:
    """Returns points of time and peak memory of ``model_or_fn(*args, **kwargs)``, which is traced once without running it.

    The result contains four kinds of points; all plans pass through the same simulator:

    - ``points`` plans, from the minimum peak found to the plan without recomputation;
    - the lower bound at the budget of each of these plans;
    - torch's partitions at ``torch_budgets``: shares in (0, 1]. An empty tuple leaves them out, because torch's partitioner
      takes minutes on a large graph;
    - fixed policies.

    Times are in seconds and count recomputation alone; peaks are in bytes. After graph breaks the points describe the graph
    with the highest peak. ``print`` shows a table, and ``autoremat.report.plots.pareto`` draws the points. The plan of a point
    can be applied by the option ``plan``.

    Raises ``OptionsError`` for ``points`` below 2 or a budget in ``options``, and all errors of ``autoremat.explain``.
    """
    if points < 2:
        raise OptionsError(f"points={points} is not accepted. Accepted: 2 or more")
    for name in ("memory_budget", "max_slowdown"):
        if name in options_of(options):
            raise OptionsError(f"{name} has no meaning for pareto, which compares many plans: leave it out of the options")
    parsed = replace(Options.parse(options, None, compilers.inductor_config_names), memory_budget=None)

    def look(priced: PricedGraph) -> Pareto:
        graph = without_traffic(priced.graph)
        ours = our_points(graph, points, parsed.time_limit, priced.problem.request.limits.host_bytes)
        return Pareto([*ours, *policy_points(graph), *points_of_torch(priced, torch_budgets)])

    with status_if_slow(f"comparing plans for {points} budgets", shown=parsed.progress):
        found, _ = previews(model_or_fn, args, kwargs, parsed, device, look)
    return max(found, key=lambda graph: max(point.peak_bytes for point in graph))


def without_traffic(graph: Graph) -> Graph:
    """Returns ``graph`` whose saves cost no time, as in the lower bounds and in torch's objective."""
    return replace(graph, machine=replace(graph.machine, saving_seconds_per_byte=0.0))


def points_of_torch(priced: PricedGraph, shares: Sequence[float]) -> Iterator[Point]:
    """Yields torch's partitions of the joint graph at these budgets, each with torch's sequence of ops.

    A partition that the simulator cannot follow, for instance with a random state that torch replays, is left out with a
    ``OptionWarning``.
    """
    captured, joint = priced.captured, priced.joint
    captured = replace(captured, graph=without_traffic(captured.graph))
    for share in shares:
        halves = fake_tensors.partition_for(share, captured.joint, joint.inputs, joint.keywords)
        try:
            yield point_of(plan_of_partition(captured, *halves), TORCH, f"{share:g}")
        except PlanInvalid as error:
            warn_user(f"torch's partition at activation_memory_budget={share:g} is left out: {error}", OptionWarning)
