"""Warns if a step holds more memory than the plan of one graph counts.

Each graph is planned as if it were alone, with its calls in flight. Two things add memory: further calls that are open at the
same time, and gradients of earlier calls of the step, of any graph. Only calls of the same thread on the same device count
together. The backward may run in any thread. :mod:`autoremat.compiler.backward_warning` judges how it runs.

Calls are watched until a step has ended in which every graph was known. A graph that gradients could bring over its budget is
watched on, because a step may have several micro-batches at any time. Otherwise a watched graph costs one more Python call
afterwards, until another graph is compiled.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd.graph import Node

from autoremat.basics.errors import BudgetWarning
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.compiler.backward_warning import Backwards, told_of
from autoremat.compiler.breaks import BROKEN
from autoremat.compiler.dynamic_shapes import SizeCheck
from autoremat.compiler.step_gradients import StepGradients, leaves_of
from autoremat.report.report import Report
from autoremat.torch_private.autograd import Packed, backward_node, keeps_graph, noting_packed
from autoremat.torch_private.dynamo import number_of_function
from autoremat.torch_private.fake_tensors import is_fake
from autoremat.torch_private.pipelining import infers_metadata
from autoremat.torch_private.untraced import around_backward, when_dropped


@dataclass(frozen=True, eq=False)
class Watched:
    """A compiled graph and its report.

    ``by_share`` is True if the budget is a share of the graph's own peak, which says nothing about other graphs.
    """

    report: Report
    by_share: bool
    is_part: bool = False
    """True if the graph is one of several of a broken function, which keep a share together."""
    function: int | None = None
    """Dynamo's number of the function."""
    backwards: Backwards | None = None
    sizes: SizeCheck | None = None

    def limit_beside(self, earlier: Iterable[_Open]) -> int | None:
        """Returns the share of what this graph and the ``earlier`` calls need together without this package; None for bytes."""
        report = self.report
        if not self.by_share or report.budget_share is None or report.reference_bytes is None:
            return None
        beside = sum(one.held_bytes_without_us for one in earlier)
        return max(int(report.budget_share * (report.reference_bytes + beside)), report.budget_bytes or 0)

    @property
    def needs_no_look(self) -> bool:
        """True if nothing is left to be told of a call by itself."""
        return (self.backwards is None or self.backwards.told.told) and (self.sizes is None or not self.sizes.assumed)

    def follow(self, node: Node, args: tuple[Any, ...], packed: Packed | None) -> None:
        """Compares the sizes of a call with those that were planned for, and looks at its backwards.

        ``packed`` is what hooks keep of its saved tensors.
        """
        if self.sizes is not None and self.sizes.assumed:
            self.sizes.compare(node)
        if self.backwards is not None and not self.backwards.told.told:
            self.backwards.follow(node, _device_of(args), packed)

    @property
    def counts_gradients(self) -> bool:
        """True if the peak contains the gradients of earlier micro-batches."""
        return bool(self.report.resident_bytes)

    @cached_property
    def bounds_gradients(self) -> bool:
        """True if the budget bounds the gradients of earlier calls too."""
        ledger = self.report.device_ledger
        return not (self.by_share or self.report.budget_bytes is None or (ledger is not None and ledger.counts_gradients))

    @cached_property
    def forward_excess_bytes(self) -> int:
        """Bytes by which the peak of the forward exceeds the backward's; 0 if it does not."""
        profile = self.report.profile_after
        backward = () if profile is None else profile.totals[profile.border :]
        return 0 if profile is None or not backward else max(profile.totals) - max(backward)


@dataclass(frozen=True)
class _Open:
    """An open call of a graph on a device. ``thread`` is the one that ran its forward; ``leaves`` are the identities of its
    parameters."""

    graph: Watched
    device: torch.device
    leaves: frozenset[int] = frozenset()
    thread: int = field(default_factory=threading.get_ident)
    packed_bytes: int | None = None
    """Bytes that hooks on saved tensors keep in place of these, such as those of ``torch.utils.checkpoint``; None without."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the call holds for its backward."""
        return self.graph.report.saved_bytes if self.packed_bytes is None else self.packed_bytes

    @property
    def held_bytes_without_us(self) -> int:
        """Bytes that the call would hold without this package, as far as that is known."""
        known = self.graph.report.reference_saved_bytes
        return self.held_bytes if self.packed_bytes is not None or known is None else known


class _Call:
    """One call of a graph. It is open until its backward has run or autograd drops this object."""


def _ended(call: _Call, watch: Watch, *_: Any) -> None:
    """Ends the call after its backward, as an autograd hook, unless autograd keeps its saved tensors."""
    if not keeps_graph():
        watch.finish(id(call))


@dataclass
class PartsOfStep:
    """The peak of the present step over the graphs of a broken function, and the share of its reference peak, in bytes."""

    peak_bytes: int = 0
    limit_bytes: int = 0
    why: str = ""
    """A note on what broke the function."""

    def note(self, running: Report, earlier: list[_Open]) -> None:
        """Counts a call of ``running`` beside the open calls ``earlier``, under our plans and without this package."""
        held = sum(one.held_bytes for one in earlier)
        without_us = sum(one.held_bytes_without_us for one in earlier) + (running.reference_bytes or 0)
        own = max(int((running.budget_share or 0.0) * without_us), running.budget_bytes or 0)
        self.peak_bytes, self.limit_bytes = max(self.peak_bytes, held + running.peak_bytes), max(self.limit_bytes, own)
        self.why = next((f" {note}." for note in running.notes if note.startswith(BROKEN)), self.why)

    def judge(self) -> None:
        """Warns if the step that ends now needed more than the share. The next one begins."""
        peak, limit = self.peak_bytes, self.limit_bytes
        self.peak_bytes = self.limit_bytes = 0
        if peak > limit:
            _warn(
                f"the graphs of a broken function need {format_bytes(peak)} together, over the {format_bytes(limit)} that are "
                f"the share of their reference peak: some have nothing left to recompute.{self.why} "
                "autoremat.profile_step(function, *inputs, memory_budget=...) shares one budget among them"
            )


class Watch:
    """The open calls of this process. ``active`` is False while no call needs watching."""

    def __init__(self) -> None:
        self.active = False
        self.open: dict[int, _Open] = {}
        self.graphs: weakref.WeakSet[Watched] = weakref.WeakSet()
        self.gradients = StepGradients()
        self.parts = PartsOfStep()

    def add(self, graph: Watched) -> None:
        """Begins to watch the calls of ``graph``."""
        self.graphs.add(graph)
        self.active = True

    def call(self, compiled: Callable[..., Any], graph: Watched, args: tuple[Any, ...]) -> Any:
        """Returns ``compiled(*args)``, a call of ``graph``, and records the call as open if it has a backward."""
        if infers_metadata() or any(map(is_fake, args)):
            return compiled(*args)  # no part of a step: the call only shows shapes, to a pipeline or to a split graph
        leaves = leaves_of(args)
        present = _Open(graph, _device_of(args), frozenset(map(id, leaves)))
        self.judge(present, graph.report.peak_bytes)
        self.gradients.note(leaves, graph.function)
        if graph.is_part:
            self.parts.note(graph.report, [one for one in self._open_beside(present) if one.graph.is_part])
        with noting_packed() as packed:
            outputs = compiled(*args)
        if packed is not None:
            present = replace(present, packed_bytes=packed.kept_bytes(args))
        node = backward_node(outputs, args)
        if node is not None:
            call = _Call()
            self.open[id(call)] = present
            when_dropped(call, self.close, id(call))
            around_backward(node, ends=partial(_ended, call, self))
            graph.follow(node, args, packed)
        return outputs

    def finish(self, call: int) -> None:
        """Judges the backward that ends the call with this identity, and closes the call."""
        present = self.open.get(call)
        self.close(call)
        if present is None or not self.active:
            return
        self.judge(present, present.graph.report.peak_bytes - present.graph.forward_excess_bytes)
        self.gradients.note_backward(present.leaves)
        if not self.open:  # a call without a backward, as of an evaluation, is no step
            self.active = any(map(self._may_exceed, self.graphs))

    def close(self, call: int) -> None:
        """Closes the call with this identity, which holds no memory any more."""
        if self.open.pop(call, None) is not None and not self.open:  # no open call means that the step has ended
            self.parts.judge()

    def _open_beside(self, present: _Open) -> list[_Open]:
        """Returns the open calls of the thread and the device of ``present``."""
        return [one for one in list(self.open.values()) if one.device == present.device and one.thread == present.thread]

    def _may_exceed(self, graph: Watched) -> bool:
        """Returns True if the gradients of all watched graphs together could bring ``graph`` over its budget."""
        more = sum(one.report.accumulated_bytes for one in self.graphs if one is not graph or not graph.counts_gradients)
        return graph.bounds_gradients and graph.report.peak_bytes + more > (graph.report.budget_bytes or 0)

    def judge(self, present: _Open, peak: int) -> None:
        """Warns if the call ``present``, which needs ``peak`` bytes, brings the step on its device over its budget.

        Backwards run in the reverse order of their forwards. Calls that are open now are therefore open again during this
        call's backward.
        """
        graph, budget, counted = present.graph, present.graph.report.budget_bytes, present.graph.report.in_flight - 1
        here = self._open_beside(present)
        own = [one for one in here if one.graph is graph]
        earlier = own[counted:] + [one for one in here if one.graph is not graph and not graph.by_share]
        held = sum(one.held_bytes for one in earlier)
        to_own, to_others = self.gradients.live_bytes(present.device, present.leaves, graph.function, bool(here))
        if budget is None:
            return
        more = to_others + (0 if graph.counts_gradients else to_own) if graph.bounds_gradients else 0
        peak -= max(0, counted - len(own)) * graph.report.held_bytes if more else 0  # calls in flight that are not open
        limit = graph.limit_beside(earlier)
        if peak + held + more <= (limit or budget) or not held + more:
            return
        self.end()
        _warn(_of_open_calls(present, earlier, peak, more, limit) if held else _of_gradients(present, peak, more, to_others))

    def end(self) -> None:
        """Ends the watch, because one warning is enough."""
        self.active = False
        self.open.clear()
        self.graphs.clear()
        self.gradients.forget()
        self.parts = PartsOfStep()


def _device_of(args: Iterable[Any]) -> torch.device:
    """Returns the device of a graph with these inputs: that of the first tensor on an accelerator, else the CPU."""
    found = (tensor.device for tensor in args if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu")
    return next(found, torch.device("cpu"))


def _of_open_calls(present: _Open, earlier: Collection[_Open], peak: int, more: int, limit: int | None) -> str:
    """Returns the text about ``earlier`` calls that are open, and about ``more`` bytes of gradients beside them.

    ``limit`` is the share of what all these calls need; None for a budget in bytes.
    """
    graph, counted = present.graph, present.graph.report.in_flight - 1
    held = sum(one.held_bytes for one in earlier)
    calls = "one earlier call holds" if len(earlier) == 1 else f"{len(earlier)} earlier calls hold"
    if counted:
        calls += f", beside the {counted + 1} that in_flight counts,"
    alone = all(one.graph is graph for one in earlier)
    remedy = f" For calls of one graph, in_flight={len(earlier) + counted + 1} counts so many." if alone else ""
    if any(one.graph is graph and one.leaves.isdisjoint(present.leaves) for one in earlier):
        remedy = " For equal blocks that are compiled one by one, use autoremat.compile_blocks(blocks, memory_budget=...)."
    gradients = f" beside {format_bytes(more)} of gradients" if more else ""
    kept = f"the budget of {format_bytes(graph.report.budget_bytes or 0)} that each call keeps by itself"
    if limit is not None:
        kept = f"the {format_bytes(limit)} that are the share of what these calls need without autoremat"
    return (
        f"several {'calls of one compiled graph' if alone else 'compiled graphs'} are live in one step: {calls} "
        f"{format_bytes(held)} for the backward{gradients} while this one needs {format_bytes(peak)}, so far "
        f"{format_bytes(held + more + peak)} together, over {kept}. Later calls add to that. "
        "autoremat.profile_step(model, *batch, memory_budget=...) measures the whole step and shares one budget among all "
        f"calls. Call it before training, on every rank at the same time, and pass its result as memory_budget.{remedy}"
    )


def _of_gradients(present: _Open, peak: int, more: int, to_others: int) -> str:
    """Returns the text about ``more`` bytes of gradients, ``to_others`` of them of parameters that the call does not take."""
    report = present.graph.report
    if to_others:
        remedy = f"Lower memory_budget by the {format_bytes(to_others)} of parameters that this graph does not train"
        remedy += "" if more == to_others else ", and set accumulate=True to count the others"
    else:
        asks_ledger = report.device_ledger is not None
        remedy = "Give device_budget the number: accumulate=..." if asks_ledger else "Set accumulate=True to count them"
    return (
        f"this call adds to gradients of earlier calls of the step: their {format_bytes(more)} are live beside the "
        f"{format_bytes(peak)} of the call, {format_bytes(peak + more)} together, over the budget of "
        f"{format_bytes(report.budget_bytes or 0)} that each call keeps by itself. {remedy}"
    )


def _warn(message: str) -> None:
    warn_user(message, BudgetWarning)


_watch = Watch()


def reset() -> None:
    """Forgets the open calls of this process, whose outputs a cycle may still hold."""
    _watch.end()


def watched(compiled: Callable[..., Any], report: Report, by_share: bool, is_part: bool = False) -> Callable[..., Any]:
    """Returns ``compiled`` with its calls recorded by this process's watch, and its backwards looked at."""
    function = number_of_function()
    graph = Watched(report, by_share, is_part, function, Backwards(report, told_of(function)), SizeCheck(report))
    _watch.add(graph)

    def call(*args: Any) -> Any:
        if _watch.active:
            return _watch.call(compiled, graph, args)
        if graph.needs_no_look:
            return compiled(*args)
        with noting_packed() as packed:
            outputs = compiled(*args)
        node = backward_node(outputs, args)
        if node is not None:
            graph.follow(node, args, packed)
        return outputs

    return call
