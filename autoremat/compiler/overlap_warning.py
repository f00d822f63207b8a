"""Warns if a step holds more memory than the plan of one graph counts.

Each graph is planned as if it were alone, with its calls in flight. Three things add memory: further calls that are open at the
same time, saved tensors that ``retain_graph=True`` keeps, and gradients of earlier micro-batches. Only calls of the same thread
on the same device count together. The backward may run in any thread.

Calls are watched until a step has ended in which every graph was known. Afterwards a watched graph costs one more Python call,
until another graph is compiled.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from autoremat.basics.errors import BudgetWarning
from autoremat.basics.units import format_bytes
from autoremat.report.report import Report
from autoremat.torch_private.autograd import backward_node, keeps_graph
from autoremat.torch_private.pipelining import infers_metadata


@dataclass(frozen=True, eq=False)
class Watched:
    """A compiled graph and its report.

    ``by_share`` is True if the budget is a share of the graph's own peak, which says nothing about other graphs.
    """

    report: Report
    by_share: bool


@dataclass(frozen=True)
class _Open:
    """An open call of a graph on a device. ``thread`` is the one that ran its forward."""

    graph: Watched
    device: torch.device
    thread: int = field(default_factory=threading.get_ident)


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
        self.first_calls: weakref.WeakKeyDictionary[Watched, Versions | None] = weakref.WeakKeyDictionary()
        """Versions of the parameters at the first call of a graph, if gradients that stay could bring the next call over the
        budget; None after that call."""

    def call(self, compiled: Callable[..., Any], graph: Watched, args: tuple[Any, ...]) -> Any:
        """Returns ``compiled(*args)``, a call of ``graph``, and records the call as open if it has a backward."""
        if infers_metadata():
            return compiled(*args)  # no part of a step
        device = _device_of(args)
        self.judge_accumulated(graph, args)
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
        if self.open.pop(call, None) is not None and not self.open:  # no open call means that the step has ended
            self.active = any(versions is not None for versions in self.first_calls.values())

    def judge(self, graph: Watched, device: torch.device) -> None:
        """Warns if calling ``graph`` now brings the step on ``device`` over its budget.

        Backwards run in the reverse order of their forwards. Calls that are open now are therefore open again during this
        call's backward.
        """
        thread, counted = threading.get_ident(), graph.report.in_flight - 1  # calls that the graph's own peak contains
        here = [one for one in list(self.open.values()) if one.device == device and one.thread == thread]
        own = [one for one in here if one.graph is graph]
        earlier = own[counted:] + [one for one in here if one.graph is not graph and not graph.by_share]
        held = sum(one.graph.report.saved_bytes for one in earlier)
        budget, peak = graph.report.budget_bytes, graph.report.peak_bytes
        if budget is None or not held or held + peak <= budget:
            return
        self._end()
        calls = "one earlier call holds" if len(earlier) == 1 else f"{len(earlier)} earlier calls hold"
        if counted:
            calls += f", beside the {counted + 1} that in_flight counts,"
        alone = all(one.graph is graph for one in earlier)
        remedy = f" For calls of one graph, in_flight={len(own) + 1} counts so many." if alone else ""
        _warn(
            f"several {'calls of one compiled graph' if alone else 'compiled graphs'} are live in one step: {calls} "
            f"{format_bytes(held)} for the backward while this one needs {format_bytes(peak)}, so far "
            f"{format_bytes(held + peak)} together, over the budget of {format_bytes(budget)} that each call keeps by itself. "
            f"Later calls add to that.{remedy} autoremat.profile_step(model, *batch, memory_budget=...) measures the whole "
            "step and shares one budget among all calls. Call it before training, on every rank at the same time, and pass its "
            "result as memory_budget"
        )

    def judge_accumulated(self, graph: Watched, args: tuple[Any, ...]) -> None:
        """Warns if gradients of an earlier micro-batch bring this call of ``graph`` over the budget.

        The gradients are those of an earlier micro-batch if the parameters had none at the first call and did not change since.
        """
        budget, peak, more = graph.report.budget_bytes, graph.report.peak_bytes, graph.report.accumulated_bytes
        ledger = graph.report.device_ledger
        counted = graph.by_share or graph.report.resident_bytes or (ledger is not None and ledger.counts_gradients)
        if budget is None or counted or not more or peak + more <= budget:
            return
        parameters = [one for one in args if isinstance(one, torch.Tensor) and one.is_leaf and one.requires_grad]
        versions: Versions = tuple((id(one), one._version) for one in parameters)
        has_gradients = any(one.grad is not None for one in parameters)
        if graph not in self.first_calls:
            self.first_calls[graph] = None if has_gradients else versions
            return
        first, self.first_calls[graph] = self.first_calls[graph], None
        if not has_gradients or first != versions:
            return
        self._end()
        _warn(
            f"this call adds to the gradients of an earlier micro-batch: their {format_bytes(more)} are live beside the "
            f"{format_bytes(peak)} of the call, {format_bytes(peak + more)} together, over the budget of "
            f"{format_bytes(budget)} that the first call keeps. "
            + ("Set accumulate=True to count them" if ledger is None else "Give device_budget the number: accumulate=...")
        )

    def _end(self) -> None:
        """Ends the watch, because one warning is enough."""
        self.active = False
        self.open.clear()
        self.first_calls.clear()

    def judge_kept(self, graph: Watched) -> None:
        """Warns if the saved tensors that ``retain_graph=True`` keeps can bring ``graph`` over its budget."""
        budget, saved, peak = graph.report.budget_bytes, graph.report.saved_bytes, graph.report.peak_bytes
        if budget is None or peak + saved <= budget or not self.active:
            return
        self._end()
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


Versions = tuple[tuple[int, int], ...]
"""Identities of parameters with the numbers of their in-place changes."""

_watch = Watch()


def watched(compiled: Callable[..., Any], report: Report, by_share: bool) -> Callable[..., Any]:
    """Returns ``compiled`` with its calls recorded by this process's watch."""
    graph = Watched(replace(report, plan=None, values=()), by_share)  # drops the plan, as the graph may live long
    _watch.active = True

    def call(*args: Any) -> Any:
        return _watch.call(compiled, graph, args) if _watch.active else compiled(*args)

    return call
