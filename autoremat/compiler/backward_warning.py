"""The texts on a backward that runs in a way in which its plan does not hold.

A plan counts a backward of one gradient that frees what was saved for it. Three things add memory: ``retain_graph=True`` and
``create_graph=True`` keep the saved tensors, ``is_grads_batched`` makes every tensor several times as large, and a further
backward of a call runs beside the gradients of the earlier ones. Hooks on saved tensors may copy them, beside the forward.
"""

from __future__ import annotations

import torch

from autoremat.basics.units import format_bytes
from autoremat.planner.memory.simulator import BackwardBytes
from autoremat.report.report import Report

ANEW = "Call the function once for each backward"
"""The remedy for what repeated backwards of one call keep."""

MARGIN = 1.3
"""The room that a lower budget leaves for the excess, as a multiple of it: another plan frees other tensors."""


def of_copies(report: Report, copied: int) -> str:
    """Returns the text on ``copied`` bytes of saved tensors that bring the forward, at its end, over the budget; else ""."""
    held, budget = report.held_bytes, report.budget_bytes
    if not copied or budget is None or held + copied <= budget:
        return ""
    return (
        f"hooks on saved tensors copy {format_bytes(copied)} of what a compiled forward saves: with the {format_bytes(held)} "
        f"that it saves and returns that is up to {format_bytes(held + copied)}, over the budget of {format_bytes(budget)}. "
        "Leave the hooks out: a plan takes their place"
    )


def of_backward(report: Report, by_plan: BackwardBytes, count: int, beside: int, keeps: bool) -> str:
    """Returns the text on a backward of ``count`` gradients under ``vmap``, beside the bytes of earlier ones; "" if it fits.

    ``keeps`` is True if it keeps what was saved for it.
    """
    budget, excess = report.budget_bytes, report.peak_bytes - report.predicted_peak_bytes  # of generated code
    need = by_plan.peak(count, keeps) + excess + beside
    if budget is None or need <= budget:
        return ""
    ways = []
    if count:
        ways.append(f"computes {count} gradient{'s' if count > 1 else ''} at once, under vmap")
    if keeps:
        by = "create_graph=True" if torch.is_grad_enabled() else "retain_graph=True"
        ways.append(f"keeps what was saved for it ({by}), up to {format_bytes(report.saved_bytes)}")
    if beside:
        ways.append(f"runs beside the {format_bytes(beside)} of gradients that earlier ones of the same call left")
    bound = "up to " if count else ""
    further = (
        f", and a further one the gradients of this one beside that, {format_bytes(max(count, 1) * report.gradient_bytes)}"
    )
    return (
        f"a backward {' and '.join(ways)}: it needs {bound}{format_bytes(need)}, where its plan counts "
        f"{format_bytes(report.peak_bytes)}, over the budget of {format_bytes(budget)}{further if keeps else ''}. "
        f"{_remedy(report, by_plan, budget, need, count, keeps)}"
    )


def _remedy(report: Report, by_plan: BackwardBytes, budget: int, need: int, count: int, keeps: bool) -> str:
    if keeps and torch.is_grad_enabled():
        return (
            "torch.compile has no second derivative of a compiled function. Compile the whole loss, and take the inner "
            "gradient there by torch.func.grad"
        )
    most = by_plan.gradients_within(budget) if count else 0
    fewer = f"Take at most {most} at once, each time from a call of its own" if most else ANEW
    fewer += ", without is_grads_batched" if count and not most else ""
    lower = budget - int(MARGIN * (need - report.peak_bytes))
    least = report.minimum_peak_bytes + report.code_headroom_bytes
    if lower >= least:
        return f"{fewer}, or leave room: memory_budget={lower} should do"
    room = f"{format_bytes(max(lower, 0))} would be left for the plan, and its least is {format_bytes(least)}"
    return f"{fewer}, or give more memory: no lower memory_budget makes room, because {room}"
