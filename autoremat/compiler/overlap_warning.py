"""Warns if a step holds more memory than the plan of one graph counts.

Each graph is planned as if it were alone. Two things add memory: other calls that are open at the same time, and backwards with
``retain_graph=True``, which keep their saved tensors. Calls are watched until a step has ended in which every graph was known.
Afterwards a watched graph costs one more Python call, until another graph is compiled.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autoremat.basics.errors import BudgetWarning
from autoremat.basics.units import format_bytes
from autoremat.report.report import Report
from autoremat.torch_private.autograd import backward_node, keeps_graph


@dataclass(frozen=True, eq=False)
class Watched:
    """A compiled graph and its report.

    ``by_share`` is True if the budget is a share of the graph's own peak, which says nothing about other graphs.
    """

    report: Report
    by_share: bool


@dataclass(frozen=True)
class _Open:
    """An open call of a graph on a device."""

    graph: Watched
    device: torch.device


class _Call:
    """One call of a graph. It is open until its backward has run or autograd drops this object."""

    def __init__(self, graph: Watched) -> None:
        self.graph = graph

    def __call__(self, watch: Watch, *_: Any) -> None:
        """Closes the call after its backward, as an autograd hook; judges the call if autograd keeps its saved tensors."""
        if keeps_graph():
            watch.judge_kept(self.graph)
        else:
            watch.close(id(self))


class Watch:
    """The open calls of this process. ``active`` is False once no call needs watching."""

    def __init__(self) -> None:
        self.active = False
        self.open: dict[int, _Open] = {}

    def call(self, compiled: Callable[..., Any], graph: Watched, args: tuple[Any, ...]) -> Any:
        """Returns ``compiled(*args)``, a call of ``graph``, and records the call as open if it has a backward."""
        device = _device_of(args)
        self.judge(graph, device)
        outputs = compiled(*args)
        node = backward_node(outputs, args)
        if node is not None:
            call = _Call(graph)
            self.open[id(call)] = _Open(graph, device)
            weakref.finalize(call, self.close, id(call)).atexit = False
            node.register_hook(partial(call, self))
        return outputs

    def close(self, call: int) -> None:
        """Closes the call with this identity, which holds no memory any more."""
        if self.open.pop(call, None) is not None and not self.open:
            self.active = False  # no open call means that the step has ended

    def judge(self, graph: Watched, device: torch.device) -> None:
        """Warns if calling ``graph`` now brings the step on ``device`` over its budget.

        Backwards run in the reverse order of their forwards. Calls that are open now are therefore open again during this
        call's backward.
        """
        here = [one for one in list(self.open.values()) if one.device == device]
        earlier = [one for one in here if one.graph is graph or not graph.by_share]
        held, budget, peak = (
            sum(one.graph.report.saved_bytes for one in earlier),
            graph.report.budget_bytes,
            graph.report.peak_bytes,
        )
        if budget is None or not held or held + peak <= budget:
            return
        self.active = False
        self.open.clear()
        calls = "one earlier call holds" if len(earlier) == 1 else f"{len(earlier)} earlier calls hold"
        alone = all(one.graph is graph for one in earlier)
        _warn(
            f"several {'calls of one compiled graph' if alone else 'compiled graphs'} are live in one step: {calls} "
            f"{format_bytes(held)} for the backward while this one needs {format_bytes(peak)}, so far "
            f"{format_bytes(held + peak)} together, over the budget of {format_bytes(budget)} that each call keeps by itself. "
            "Later calls add to that. autoremat.profile_step(model, *batch, memory_budget=...) measures the whole step and "
            "shares one budget among all calls. Call it before training, on every rank at the same time, and pass its result "
            "as memory_budget"
        )

    def judge_kept(self, graph: Watched) -> None:
        """Warns if the saved tensors that ``retain_graph=True`` keeps can bring ``graph`` over its budget."""
        budget, saved, peak = graph.report.budget_bytes, graph.report.saved_bytes, graph.report.peak_bytes
        if budget is None or peak + saved <= budget or not self.active:
            return
        self.active = False
        self.open.clear()
        _warn(
            f"a backward with retain_graph=True keeps the {format_bytes(saved)} that were saved for it, which the plan of "
            f"{format_bytes(peak)} frees one after the other: the step needs up to {format_bytes(peak + saved)}, over the "
            f"budget of {format_bytes(budget)}. Sum the losses and call backward once, or lower memory_budget by as much"
        )


def _device_of(args: Iterable[Any]) -> torch.device:
    """Returns the device of a graph with these inputs: that of the first tensor on an accelerator, else the CPU."""
    found = (tensor.device for tensor in args if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu")
    return next(found, torch.device("cpu"))


def _warn(message: str) -> None:
    warnings.warn(message, BudgetWarning, stacklevel=3)


_watch = Watch()


def watched(compiled: Callable[..., Any], report: Report, by_share: bool) -> Callable[..., Any]:
    """Returns ``compiled`` with its calls recorded by this process's watch."""
    graph = Watched(replace(report, plan=None, values=()), by_share)  # drops the plan, as the graph may live long
    _watch.active = True

    def call(*args: Any) -> Any:
        return _watch.call(compiled, graph, args) if _watch.active else compiled(*args)

    return call
