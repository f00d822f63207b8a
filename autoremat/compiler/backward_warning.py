"""Warns if a backward runs in a way in which its plan does not hold, before it runs.

A plan counts a backward of one gradient that frees what was saved for it. Three things add memory: ``retain_graph=True`` and
``create_graph=True`` keep the saved tensors, ``is_grads_batched`` makes every tensor several times as large, and a further
backward of a call runs beside the gradients of the earlier ones. Hooks on saved tensors may copy them, beside the forward. Each
can begin in any step, so every call is looked at, by two hooks on its autograd node, until its function was warned of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.autograd.graph import Node

from autoremat.basics.errors import BudgetWarning
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.device_memory.inventory import Inventory
from autoremat.planner.memory.allocations import ROUNDING
from autoremat.planner.memory.simulator import BackwardBytes
from autoremat.report.report import Report
from autoremat.torch_private import autograd
from autoremat.torch_private.dynamo import until_reset
from autoremat.torch_private.untraced import around_backward

ANEW = "Call the function once for each backward"
"""The remedy for what repeated backwards of one call keep."""

MARGIN = 1.3
"""The room that a lower budget leaves for the excess, as a multiple of it: another plan frees other tensors."""


@dataclass
class Told:
    """Whether a function was warned of. Its recompilations share this object."""

    told: bool = False
    is_valid: Callable[[], bool] = field(default_factory=until_reset)
    """False after a reset of torch, which numbers functions anew."""


_told: dict[int, Told] = {}


def told_of(function: int | None) -> Told:
    """Returns what the graphs of a function share, by Dynamo's number; a new object outside of Dynamo."""
    if function is None:
        return Told()
    if function not in _told or not _told[function].is_valid():
        _told[function] = Told()
    return _told[function]


@dataclass(frozen=True)
class Backwards:
    """The backwards of one graph."""

    report: Report
    told: Told

    @cached_property
    def bytes(self) -> BackwardBytes:
        """The bytes of a backward by the plan."""
        return BackwardBytes.of(self.report.plan.timeline)

    def follow(self, node: Node, device: torch.device, packed: autograd.Packed | None) -> None:
        """Looks at the backwards of a call with this autograd node. ``packed`` is what hooks keep of its saved tensors."""
        if packed is not None:
            self._judge_copies(packed.copied_bytes)
        call = _Call(self, node, device)
        around_backward(node, call.begins, call.ended)

    def warn(self, message: str) -> None:
        """Warns once for all graphs of the function."""
        self.told.told = True
        warn_user(message, BudgetWarning)

    def _judge_copies(self, copied: int) -> None:
        """Warns if what hooks copy of the saved tensors brings the forward, at its end, over the budget."""
        held, budget = self.report.held_bytes, self.report.budget_bytes
        if copied and budget is not None and held + copied > budget:
            self.warn(
                f"hooks on saved tensors copy {format_bytes(copied)} of what a compiled forward saves: with the "
                f"{format_bytes(held)} that it saves and returns that is up to {format_bytes(held + copied)}, over the budget "
                f"of {format_bytes(budget)}. Leave the hooks out: a plan takes their place"
            )

    def peak(self, gradients: int, keeps_graph: bool) -> int:
        """Returns the peak of a backward of so many gradients under ``vmap``."""
        excess = self.report.peak_bytes - self.report.predicted_peak_bytes  # of generated code
        return self.bytes.peak(gradients, keeps_graph) + excess

    def gradients_within(self, budget: int) -> int:
        """Returns the most gradients under ``vmap`` that are within the budget."""
        return self.bytes.gradients_within(budget)


class _Call:
    """The backwards of one call. ``begins`` and ``ended`` are hooks on its autograd node."""

    def __init__(self, graph: Backwards, node: Node, device: torch.device) -> None:
        self.graph, self.device = graph, device
        self._node = weakref.ref(node)  # the node holds this object
        self._bare: list[weakref.ref[torch.Tensor]] | None = None
        """Leaves without a gradient when the first backward began that keeps its graph; None before."""
        self._gradients: list[weakref.ref[torch.Tensor]] = []
        """The gradients of such backwards. Callers of ``torch.autograd.grad`` may hold them."""

    def begins(self, received: Sequence[torch.Tensor | None]) -> None:
        """Warns if the backward that begins now needs more than the budget."""
        keeps, count = autograd.keeps_graph(), autograd.gradients_at_once(received)
        if self.graph.told.told or not (keeps or count or self._bare is not None):
            return
        node = self._node()
        if node is None or (keeps and autograd.refuses_to_keep_graph(node)):
            return  # torch raises its own error
        beside = self._live_bytes()
        if keeps and self._bare is None:
            self._bare = [weakref.ref(leaf) for leaf in autograd.own_leaves(node) if leaf.grad is None]
        budget, need = self.graph.report.budget_bytes, self.graph.peak(count, keeps) + beside
        if budget is not None and need > budget:
            self.graph.warn(_message(self.graph, need, count, beside, keeps))

    def ended(self, gradients: Iterable[torch.Tensor | None], *_: Any) -> None:
        """Notes the gradients of a backward that keeps its graph: another one may follow."""
        if autograd.keeps_graph() and not self.graph.told.told:
            self._gradients += [weakref.ref(one) for one in gradients if one is not None]

    def _live_bytes(self) -> int:
        """Returns the bytes of the gradients of earlier backwards of the call that are alive."""
        held = [one for reference in self._gradients if (one := reference()) is not None]
        leaves = [leaf for reference in self._bare or () if (leaf := reference()) is not None]
        summed = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return Inventory(self.device.type, ROUNDING if self.device.type == "cuda" else 1).bytes_of([*held, *summed])


def _message(graph: Backwards, need: int, count: int, beside: int, keeps: bool) -> str:
    """Returns the text on a backward of ``count`` gradients that needs ``need`` bytes, ``beside`` of them of earlier ones."""
    report, budget = graph.report, graph.report.budget_bytes or 0
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
        f"{_remedy(graph, need, count, keeps)}"
    )


def _remedy(graph: Backwards, need: int, count: int, keeps: bool) -> str:
    if keeps and torch.is_grad_enabled():
        return (
            "torch.compile has no second derivative of a compiled function. Compile the whole loss, and take the inner "
            "gradient there by torch.func.grad"
        )
    report, budget = graph.report, graph.report.budget_bytes or 0
    most = graph.gradients_within(budget) if count else 0
    fewer = f"Take at most {most} at once, each time from a call of its own" if most else ANEW
    fewer += ", without is_grads_batched" if count and not most else ""
    lower = budget - int(MARGIN * (need - report.peak_bytes))
    least = report.minimum_peak_bytes + report.code_headroom_bytes
    if lower >= least:
        return f"{fewer}, or leave room: memory_budget={lower} should do"
    room = f"{format_bytes(max(lower, 0))} would be left for the plan, and its least is {format_bytes(least)}"
    return f"{fewer}, or give more memory: no lower memory_budget makes room, because {room}"
