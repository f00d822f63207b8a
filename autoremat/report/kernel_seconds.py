"""Seconds of a plan by the kernels of its generated code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoremat.planner.cost.code_seconds import code_seconds
from autoremat.planner.memory.allocations import Kernel, KernelWork
from autoremat.planner.plans.plan import Plan


def timed(
    plan: Plan, kernels: Sequence[Kernel | None], halves: Mapping[bool, Sequence[KernelWork]]
) -> tuple[tuple[Kernel | None, ...], tuple[float, float] | None]:
    """Returns ``kernels``, one for each execution of ``plan``, with their seconds; and the seconds of forward and backward.

    ``halves`` are named by ``is_backward``. Unless both are known, the kernels are unchanged and the seconds None.
    """
    if len(halves) < 2:
        return tuple(kernels), None
    beside, sums, begin = defaultdict[int, float](float), [], 0
    for is_backward, executions in ((False, plan.schedule.forward), (True, plan.schedule.backward)):
        first: dict[str, int] = {}
        for position, op in enumerate(executions, begin):
            first.setdefault(plan.graph.ops[op].name, position)
        seconds = code_seconds(plan.graph, executions, halves[is_backward])
        for kernel, lasts in zip(halves[is_backward], seconds, strict=True):
            if positions := [first[name] for name, _ in kernel.ops if name in first]:
                beside[max(positions)] += lasts
        sums.append(sum(seconds))
        begin += len(executions)
    found = (None if one is None else replace(one, seconds=beside.get(place)) for place, one in enumerate(kernels))
    return tuple(found), (sums[0], sums[1])
