"""``autoremat.pareto``: compares plans of a step with torch's own partitions, fixed policies and the lower bound."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoremat.basics.checks import options_of
from autoremat.basics.errors import OptionsError, OptionWarning, PlanFileError, PlanInvalid
from autoremat.basics.progress import Tally, now, status_if_slow
from autoremat.basics.warn import warn_user
from autoremat.compiler.torch_partition import plan_of_partition
from autoremat.options.options import Options
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.pareto_front import OURS, TORCH, Pareto, our_points, point_of, policy_points
from autoremat.tools.dry_run import DryRun, dry_run
from autoremat.tools.explain import Preview, preview_visitor
from autoremat.tools.target import Target
from autoremat.tools.trace import CapturedVisitor, trace
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
    lower: bool = False,
    **kwargs: Any,
) -> Pareto:
    """Returns points of time and peak memory of ``model_or_fn(*args, **kwargs)``, which is traced once without running it.

    The result contains four kinds of points; all plans pass through the same simulator:

    - ``points`` plans, from the minimum peak found to the plan without recomputation;
    - the lower bound at the budget of each of these plans;
    - torch's partitions at ``torch_budgets``: shares in (0, 1]. An empty tuple leaves them out, because torch's partitioner
      takes minutes on a large graph;
    - fixed policies.

    With ``lower=True``, Inductor also generates the code of each plan, for ``Point.code_peak_bytes``, and compiles no kernel.
    This takes as long as ``autoremat.explain(..., lower=True)`` for each plan. The plan of a point can be applied by the option
    ``plan``.

    Times are in seconds and count recomputation alone; peaks are in bytes. After graph breaks the points describe the graph
    with the highest peak. ``print`` shows a table, and ``autoremat.report.plots.pareto`` draws the points.

    Raises ``OptionsError`` for ``points`` below 2 or a budget in ``options``, and all errors of ``autoremat.explain``.
    """
    parsed = _accepted(points, options)

    def look(preview: Preview) -> Pareto:
        return _compared(by_recomputation_alone(preview), points, torch_budgets, parsed.time_limit)

    def visiting(target: Target, resident: int) -> CapturedVisitor[Pareto | None]:
        visit = preview_visitor(parsed, target, resident, look)
        if not lower:
            return visit
        lowered = dry_run(parsed, target, resident)
        return lambda module, inputs: [
            front and with_code_peaks(front, lowered, module, inputs) for front in visit(module, inputs)
        ]

    with status_if_slow(f"comparing plans for {points} budgets", shown=parsed.progress):
        found, _ = trace(model_or_fn, args, kwargs, device, visiting)
    return max(found, key=lambda graph: max(point.peak_bytes for point in graph))


def _compared(preview: Preview, points: int, torch_budgets: Sequence[float], time_limit: float) -> Pareto:
    """Returns the points of one graph, of all kinds."""
    graph, tally = preview.priced.graph, Tally(points)
    now("planning, budget", tally.count)
    ours = []
    for point in our_points(graph, points, time_limit, preview.context.request.limits.host_bytes):
        ours.append(point)
        tally.done += point.family == OURS
    theirs, tally = [], Tally(len(torch_budgets))
    now("asking for torch's partitions", tally.count)
    for share, plan in plans_of_torch(preview, torch_budgets):
        theirs.append(point_of(plan, TORCH, f"{share:g}"))
        tally.done += 1
    now("following fixed policies")
    return Pareto([*ours, *policy_points(graph), *theirs])


def _accepted(points: int, options: Mapping[str, Any] | None) -> Options:
    """Returns the options of all points. Raises ``OptionsError`` for those that mean nothing for many budgets."""
    if points < 2:
        raise OptionsError(f"points={points} is not accepted. Accepted: 2 or more")
    if "memory_budget" in options_of(options):
        raise OptionsError("memory_budget has no meaning for pareto, which plans for many budgets: leave it out of the options")
    parsed = replace(Options.parse(options, None, compilers.inductor_config_names), memory_budget=None)
    if parsed.max_slowdown is not None:
        raise OptionsError("max_slowdown has no meaning for pareto, which lists the time of many plans: leave it out")
    return parsed


def with_code_peaks(front: Pareto, lowered: DryRun, module: fx.GraphModule, inputs: Sequence[Any]) -> Pareto:
    """Returns ``front`` with the peaks of the code that Inductor generates for its plans.

    A plan that breaks a rule of the graph has none: torch's partitions may recompute ops that must run once.
    """
    tally = Tally(sum(point.plan is not None for point in front))
    now("generating code of the plans", tally.count)
    found = Pareto()
    for point in front:
        if point.plan is not None:
            with contextlib.suppress(PlanFileError):
                report = lowered.report(module, inputs, point.plan)
                point = replace(point, code_peak_bytes=None if report is None else report.compiled_peak_bytes)
            tally.done += 1
        found.append(point)
    return found


def by_recomputation_alone(preview: Preview) -> Preview:
    """Returns ``preview`` with saves that cost no time, as in the lower bounds and in torch's objective."""
    graph = replace(preview.priced.graph, saving_seconds_per_byte=0.0)
    captured = replace(preview.priced.captured, graph=graph)
    return replace(preview, priced=replace(preview.priced, captured=captured))


def plans_of_torch(preview: Preview, shares: Sequence[float]) -> Iterator[tuple[float, Plan]]:
    """Yields torch's partitions of the joint graph at these budgets as plans, each with torch's sequence of ops.

    A partition that the simulator cannot follow is left out with a ``OptionWarning``. One cause is a random state that torch
    replays.
    """
    captured, joint = preview.priced.captured, preview.priced.joint
    for share in shares:
        halves = fake_tensors.partition_for(share, captured.joint, joint.inputs, joint.keywords)
        try:
            yield share, plan_of_partition(captured, *halves)
        except PlanInvalid as error:
            message = f"torch's partition at activation_memory_budget={share:g} is left out: {error}"
            warn_user(message, OptionWarning)
