"""``autoremat.pareto``: our plans of a step beside torch's own partitions of it, fixed policies and the lower bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoremat.basics.checks import options_of
from autoremat.basics.errors import FallbackWarning, OptionsError, PlanInvalid
from autoremat.basics.progress import Tally, now, status_if_slow
from autoremat.compiler.torch_partition import plan_of_partition
from autoremat.options.options import Options
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.pareto_front import OURS, TORCH, Pareto, our_points, point_of, policy_points
from autoremat.tools.explain import Preview, previews
from autoremat.torch_private import compat, fake_tensors

TORCH_BUDGETS = tuple(tenths / 10 for tenths in range(10, 0, -1))
"""Of ``activation_memory_budget``, torch's own setting, at which its partitions are taken."""


def pareto(
    model_or_fn: Callable[..., Any],
    *args: Any,
    points: int = 20,
    torch_budgets: Sequence[float] = TORCH_BUDGETS,
    options: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    **kwargs: Any,
) -> Pareto:
    """Time against peak memory of ``model_or_fn(*args, **kwargs)``, traced once without running, as ``autoremat.explain`` does.

    ``points``: so many of our plans, from the smallest peak found to that without recomputation, each with the lower bound at
    its budget. Besides, torch's partitions at ``torch_budgets`` (shares in (0, 1]; an empty tuple leaves them out: on a large
    graph torch's partitioner takes minutes) and fixed policies, all through the same simulator. All are priced by recomputation
    alone. After graph breaks: the graph with the highest peak. ``print`` shows the list as a table; ``pictures.pareto`` draws
    it.

    Raises ``OptionsError`` for a budget in ``options``, and what ``autoremat.explain`` raises.
    """
    if points < 2:
        raise OptionsError(f"points={points} is not accepted. Accepted: 2 or more")
    if "memory_budget" in options_of(options):
        raise OptionsError("memory_budget has no meaning for pareto, which plans for many budgets: leave it out of the options")
    parsed = Options.parse(options, None, compat.inductor_config_names)

    def look(preview: Preview) -> Pareto:
        preview = by_recomputation_alone(preview)
        graph = preview.captured.graph
        tally = Tally(points)
        now("planning, budget", tally.count)
        ours = []
        for point in our_points(graph, points, parsed.time_limit):
            ours.append(point)
            tally.done += point.family == OURS
        theirs = []
        tally = Tally(len(torch_budgets))
        now("asking for torch's partitions", tally.count)
        for share, plan in plans_of_torch(preview, torch_budgets):
            theirs.append(point_of(plan, TORCH, f"{share:g}"))
            tally.done += 1
        now("following fixed policies")
        return Pareto([*ours, *policy_points(graph), *theirs])

    with status_if_slow(f"comparing plans for {points} budgets", shown=parsed.progress):
        found, _ = previews(model_or_fn, args, kwargs, parsed, device, look)
    return max(found, key=lambda graph: max(point.peak_bytes for point in graph))


def by_recomputation_alone(preview: Preview) -> Preview:
    """Saved bytes cost no time, as in the bounds and in torch's objective."""
    graph = replace(preview.captured.graph, saving_seconds_per_byte=0.0)
    return replace(preview, captured=replace(preview.captured, graph=graph))


def plans_of_torch(preview: Preview, shares: Sequence[float]) -> Iterator[tuple[float, Plan]]:
    """Torch's partitions of the joint graph at these of its budgets, order included. One that the simulator cannot follow, such
    as with random states that torch replays, is left out with an ``FallbackWarning``."""
    captured = preview.captured
    for share in shares:
        halves = fake_tensors.partition_for(share, captured.joint, preview.joint_inputs, preview.keywords)
        try:
            yield share, plan_of_partition(captured, *halves)
        except PlanInvalid as error:
            message = f"torch's partition at activation_memory_budget={share:g} is left out: {error}"
            warnings.warn(message, FallbackWarning, stacklevel=2)
