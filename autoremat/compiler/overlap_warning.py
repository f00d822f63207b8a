"""Warns if a step holds more memory than the plan of one graph counts.

Each graph is planned as if it were alone, with its calls in flight. Two things add memory: further calls that are open at the
same time, and gradients of earlier calls of the step, of any graph. Only calls of the same thread on the same device count
together. The backward may run in any thread. Budgets in bytes are judged at each call, and shares at the end of the step, for
all calls that were open together. :mod:`autoremat.compiler.backward_warning` judges how a backward runs.

Calls are watched until a step has ended in which every graph was known. A graph that gradients could bring over its budget is
watched on, because a step may have several micro-batches at any time. Otherwise a watched graph costs one more Python call
afterwards, until another graph is compiled.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
from autoremat.torch_private.process_groups import infers_metadata
from autoremat.torch_private.untraced import around_backward

TOLERANCE = 0.01
"""Share of its limit by which a step of several calls may exceed a share of what they need, which is an estimate."""

PROFILE = "autoremat.profile_step(model, *batch, memory_budget=...) shares one budget among them; pass its result on."
"""The remedy for several calls that are open together."""


class Watched:
    """A compiled graph and its report. ``by_share`` is True if its budget is a share of the reference peak."""

    def __init__(self, report: Report, by_share: bool, function: int | None = None) -> None:
        self.report, self.by_share, self.function = report, by_share, function
        self.backwards, self.sizes = Backwards(report, told_of(function)), SizeCheck(report)

    @property
    def needs_look(self) -> bool:
        """True if something may have to be told of a call by itself."""
        return bool(not self.backwards.told.told or self.sizes.assumed)

    def follow(self, node: Node, args: tuple[Any, ...], packed: Packed | None) -> None:
        """Compares the sizes of a call with the assumed ones, and looks at its backwards. Hooks keep ``packed``."""
        if self.sizes.assumed:
            self.sizes.compare(node)
        if not self.backwards.told.told:
            self.backwards.follow(node, _device_of(args), packed)

    @cached_property
    def break_note(self) -> str:
        """The note on what broke the function; empty for a function that is one graph."""
        return next((f" {note}." for note in self.report.notes if note.startswith(BROKEN)), "")

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
    def backward_peak_bytes(self) -> int:
        """Peak of the backward; that of the step if it is unknown."""
        profile, peak = self.report.profile_after, self.report.peak_bytes
        backward = () if profile is None else profile.totals[profile.border :]
        return peak if profile is None or not backward else peak - max(profile.totals) + max(backward)


@dataclass(eq=False)
class _Open:
    """An open call. Autograd holds it until its backward has run or cannot run any more."""

    graph: Watched
    device: torch.device
    leaves: frozenset[int] = frozenset()
    """The identities of its parameters."""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that ran its forward."""
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


def _ended(present: _Open, watch: Watch, *_: Any) -> None:
    """Ends the call after its backward, as an autograd hook, unless autograd keeps its saved tensors."""
    if not keeps_graph():
        watch.finish(present)


@dataclass
class SharedStep:
    """The peak of the present step over graphs under shares, and the share of what it needs without this package."""

    peak_bytes: int = 0
    limit_bytes: int = 0
    advice: str = ""
    """What broke the function, or how to count the calls of one graph."""

    def note(self, graph: Watched, earlier: Sequence[_Open]) -> None:
        """Counts a call of ``graph`` beside the open calls ``earlier``. One alone was judged when it was compiled."""
        report = graph.report
        if report.reference_bytes is None or not (earlier or graph.break_note):
            return
        peak = report.peak_bytes + sum(one.held_bytes for one in earlier)
        without_us = report.reference_bytes + sum(one.held_bytes_without_us for one in earlier)
        limit = max(int((report.budget_share or 0.0) * without_us * (1 + TOLERANCE)), report.budget_bytes or 0)
        self.peak_bytes, self.limit_bytes = max(self.peak_bytes, peak), max(self.limit_bytes, limit)
        self.advice = graph.break_note or self.advice or _counting(graph, earlier)

    def judge(self) -> None:
        """Warns if the step that ends now needed more than the share."""
        if self.peak_bytes > self.limit_bytes:
            who = "graphs of a broken function" if BROKEN in self.advice else "calls of a step that are open together"
            _warn(
                f"the {who} need {format_bytes(self.peak_bytes)} together, over the {format_bytes(self.limit_bytes)} that are "
                f"the share of what they need without autoremat: some have too little to recompute.{self.advice} {PROFILE}"
            )


class Watch:
    """The open calls of this process. ``active`` is False while no call needs watching."""

    def __init__(self) -> None:
        self.active = False
        self.open: weakref.WeakValueDictionary[int, _Open] = weakref.WeakValueDictionary()
        self.graphs: weakref.WeakSet[Watched] = weakref.WeakSet()
        self.gradients = StepGradients()
        self.shared = SharedStep()

    def add(self, graph: Watched) -> None:
        """Begins to watch the calls of ``graph``."""
        self.graphs.add(graph)
        self.active = True

    def call(self, compiled: Callable[..., Any], graph: Watched, args: tuple[Any, ...]) -> Any:
        """Returns ``compiled(*args)``, a call of ``graph``. It is recorded as open if it has a backward."""
        if self.active and (infers_metadata() or any(map(is_fake, args))):
            return compiled(*args)  # no part of a step: the call only shows shapes, to a pipeline or to a split graph
        present = self._begin(graph, args) if self.active else None
        with noting_packed() as packed:
            outputs = compiled(*args)
        node = backward_node(outputs, args)
        if node is not None:
            if present is not None:
                present.packed_bytes = None if packed is None else packed.kept_bytes(args)
                self.open[id(present)] = present
                around_backward(node, ends=partial(_ended, present, self))
            graph.follow(node, args, packed)
        return outputs

    def _begin(self, graph: Watched, args: tuple[Any, ...]) -> _Open:
        """Judges a call of ``graph`` that begins."""
        if not self.open:
            self.shared = SharedStep()
        leaves = leaves_of(args)
        present = _Open(graph, _device_of(args), frozenset(map(id, leaves)))
        self.judge(present, graph.report.peak_bytes)
        self.gradients.note(leaves, graph.function)
        return present

    def finish(self, present: _Open) -> None:
        """Closes the call ``present`` after its backward, which is judged. Without open calls, the step has ended."""
        if self.open.pop(id(present), None) is None:
            return
        self.judge(present, present.graph.backward_peak_bytes)
        self.gradients.note_backward(present.leaves)
        if not self.open:
            self.shared.judge()
            self.active = self.active and any(map(self._may_exceed, self.graphs))

    def _beside(self, present: _Open) -> list[_Open]:
        """Returns the open calls of the thread and the device of ``present``."""
        found = [one for reference in self.open.valuerefs() if (one := reference()) is not None]
        return [one for one in found if (one.device, one.thread) == (present.device, present.thread)]

    def _may_exceed(self, graph: Watched) -> bool:
        """Returns True if the gradients of all watched graphs together could bring ``graph`` over its budget."""
        more = sum(one.report.accumulated_bytes for one in self.graphs if one is not graph or not graph.counts_gradients)
        return graph.bounds_gradients and graph.report.peak_bytes + more > (graph.report.budget_bytes or 0)

    def judge(self, present: _Open, peak: int) -> None:
        """Warns if the call ``present``, which needs ``peak`` bytes, brings the step on its device over its budget in bytes.

        A share is judged at the step's end. Backwards run in the reverse order of their forwards. Calls that are open now are
        therefore open again during this call's backward.
        """
        graph, report = present.graph, present.graph.report
        here = self._beside(present)
        earlier = _earlier(present, here)
        if graph.by_share or report.budget_bytes is None:
            self.shared.note(graph, earlier)
            return
        to_own, to_others = self.gradients.live_bytes(present.device, present.leaves, graph.function, bool(here))
        more = to_others + (0 if graph.counts_gradients else to_own) if graph.bounds_gradients else 0
        in_flight = sum(one.graph is graph for one in here)
        peak -= max(0, report.in_flight - 1 - in_flight) * report.held_bytes if more else 0  # calls in flight that are not open
        held = sum(one.held_bytes for one in earlier)
        if held + more and peak + held + more > report.budget_bytes:
            self.end()
            _warn(_of_open_calls(present, earlier, peak, more) if held else _of_gradients(present, peak, more, to_others))

    def end(self) -> None:
        """Ends the watch, because one warning is enough."""
        self.active = False
        self.open.clear()
        self.graphs.clear()
        self.gradients = StepGradients()
        self.shared = SharedStep()


def _device_of(args: Iterable[Any]) -> torch.device:
    """Returns the device of a graph with these inputs: that of the first tensor on an accelerator, else the CPU."""
    found = (tensor.device for tensor in args if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu")
    return next(found, torch.device("cpu"))


def _earlier(present: _Open, here: Sequence[_Open]) -> list[_Open]:
    """Returns those of the open calls ``here`` that the budget of ``present`` bounds, and that its peak does not count.

    Budgets in bytes bound others of their kind, and so do shares.
    """
    graph = present.graph
    own = [one for one in here if one.graph is graph]
    others = [one for one in here if one.graph is not graph and one.graph.by_share == graph.by_share]
    return own[graph.report.in_flight - 1 :] + others


def _counting(graph: Watched, earlier: Sequence[_Open]) -> str:
    """Returns the advice to count the ``earlier`` calls, if all are of ``graph``."""
    alone = all(one.graph is graph for one in earlier)
    return f" For calls of one graph, in_flight={len(earlier) + graph.report.in_flight} counts so many." if alone else ""


def _of_open_calls(present: _Open, earlier: Sequence[_Open], peak: int, more: int) -> str:
    """Returns the text about ``earlier`` calls that are open, and about ``more`` bytes of gradients beside them."""
    graph, held = present.graph, sum(one.held_bytes for one in earlier)
    report, alone = graph.report, all(one.graph is graph for one in earlier)
    calls = "one earlier call holds" if len(earlier) == 1 else f"{len(earlier)} earlier calls hold"
    calls += f", beside the {report.in_flight} that in_flight counts," if report.in_flight > 1 else ""
    remedy = _counting(graph, earlier)
    if any(one.graph is graph and one.leaves.isdisjoint(present.leaves) for one in earlier):
        remedy = " For equal blocks that are compiled one by one, use autoremat.compile_blocks(blocks, memory_budget=...)."
    return (
        f"several {'calls of one compiled graph' if alone else 'compiled graphs'} are live in one step: {calls} "
        f"{format_bytes(held)} for the backward{f' beside {format_bytes(more)} of gradients' if more else ''} while this one "
        f"needs {format_bytes(peak)}, {format_bytes(held + more + peak)} together, over the budget of "
        f"{format_bytes(report.budget_bytes or 0)} that each call keeps by itself. {PROFILE}{remedy}"
    )


def _of_gradients(present: _Open, peak: int, more: int, to_others: int) -> str:
    """Returns the text about ``more`` bytes of gradients, ``to_others`` of them of parameters that the call does not take."""
    report = present.graph.report
    remedy = "Set accumulate=True to count them"
    if to_others:
        remedy = f"Lower memory_budget by the {format_bytes(to_others)} of parameters that this graph does not train"
        remedy += "" if more == to_others else ", and set accumulate=True to count the others"
    elif report.device_ledger is not None:
        remedy = "Give device_budget the number: accumulate=..."
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


def watched(compiled: Callable[..., Any], report: Report, by_share: bool) -> Callable[..., Any]:
    """Returns ``compiled`` with its calls recorded by this process's watch, and its backwards looked at."""
    graph = Watched(report, by_share, number_of_function())
    _watch.add(graph)

    def call(*args: Any) -> Any:
        return _watch.call(compiled, graph, args) if _watch.active or graph.needs_look else compiled(*args)

    return call
