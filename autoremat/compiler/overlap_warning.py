"""Warns if a step holds more memory than the plan of one graph counts.

Each graph is planned as if it were alone, with its calls in flight. Two things add memory: further calls that are open at the
same time, and gradients of earlier calls of the step, of any graph. Only calls of the same thread on the same device count
together. The backward may run in any thread. Budgets in bytes are judged at each call, and shares at the end of the step, for
all calls that were open together.

Calls are watched so until a step has ended in which every graph was known. A graph that gradients could bring over its budget
is watched on, because a step may have several micro-batches at any time. How a backward runs may change in any step, so each
one is looked at until its function was warned of (:mod:`autoremat.compiler.backward_warning`). After that, a graph costs one
more Python call, until another graph is compiled.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from autoremat.basics.errors import BudgetWarning
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.compiler.backward_warning import of_backward, of_copies
from autoremat.compiler.breaks import BROKEN
from autoremat.compiler.dynamic_shapes import of_larger_size
from autoremat.device_memory.inventory import Inventory
from autoremat.planner.memory.allocations import ROUNDING
from autoremat.planner.memory.simulator import BackwardBytes
from autoremat.report.report import Report
from autoremat.torch_private import autograd
from autoremat.torch_private.dynamo import number_of_function, resets
from autoremat.torch_private.fake_tensors import is_fake
from autoremat.torch_private.hooks import around_backward
from autoremat.torch_private.process_groups import infers_metadata
from autoremat.torch_private.tensors import device_of

TOLERANCE = 0.01
"""Share of its limit by which a step of several calls may exceed a share of what they need, which is an estimate."""

PROFILE = "autoremat.profile_step(model, *batch, memory_budget=...) shares one budget among them; pass its result on."
"""The remedy for several calls that are open together."""

_told: set[object] = set()
"""The functions of which a backward was warned of, by the number of resets of torch and by Dynamo's number."""


class Watched:
    """A compiled graph and its report. ``by_share`` is True if its budget is a share of the reference peak.

    Recompilations share Dynamo's number of the ``function``.
    """

    def __init__(self, report: Report, by_share: bool, function: int | None = None) -> None:
        self.report, self.by_share, self.function = report, by_share, function
        self._key = object() if function is None else (resets(), function)
        self.assumed = dict(report.assumed_sizes)

    @property
    def is_told(self) -> bool:
        """True if a warning told of a backward of its function."""
        return self._key in _told

    def tell(self, text: str) -> None:
        """Warns of a backward, once for all graphs of the function; not with an empty text."""
        if text and not self.is_told:
            _told.add(self._key)
            warn_user(text, BudgetWarning)

    @cached_property
    def backward_bytes(self) -> BackwardBytes:
        """The bytes of a backward by the plan."""
        return BackwardBytes.of(self.report.plan.timeline)

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


class Call:
    """A call of a graph. Autograd holds it until its backward has run or cannot run any more, and calls its hooks."""

    def __init__(self, watch: Watch, graph: Watched, device: torch.device, leaves: Iterable[torch.Tensor] = ()) -> None:
        self.watch, self.graph, self.device, self.leaves = watch, graph, device, frozenset(map(id, leaves))
        """The leaves by their identities."""
        self.thread = threading.get_ident()
        """The thread that ran its forward."""
        self.packed_bytes: int | None = None
        """Bytes that hooks on saved tensors keep in place of these, as ``torch.utils.checkpoint`` does; None without."""
        self._node: Callable[[], Node | None] = lambda: None
        self._bare: list[weakref.ref[torch.Tensor]] | None = None
        """Leaves without a gradient when the first backward began that keeps its graph; None before."""
        self._gradients: list[weakref.ref[torch.Tensor]] = []
        """The gradients of such backwards. Callers of ``torch.autograd.grad`` may hold them."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the call holds for its backward."""
        return self.graph.report.saved_bytes if self.packed_bytes is None else self.packed_bytes

    def follow(self, node: Node, packed: autograd.Packed | None) -> None:
        """Looks at what the call has saved, and at its backwards. ``packed`` is what hooks keep of its saved tensors."""
        graph, self._node = self.graph, weakref.ref(node)  # the node holds this object
        if graph.assumed and (text := of_larger_size(graph.report, autograd.saved_numbers(node))):
            graph.assumed.clear()
            warn_user(text, BudgetWarning)
        if packed is not None:
            graph.tell(of_copies(graph.report, packed.copied_bytes))
        around_backward(node, self._begins, self._ended)

    def _begins(self, received: Sequence[torch.Tensor | None]) -> None:
        """Warns if the backward that begins now needs more than the budget because of the way in which it runs."""
        keeps, count = autograd.keeps_graph(), autograd.gradients_at_once(received)
        node = self._node()
        if self.graph.is_told or node is None or not (keeps or count or self._bare is not None):
            return
        if keeps and autograd.refuses_to_keep_graph(node):
            return  # torch raises its own error
        held = [one for reference in self._gradients if (one := reference()) is not None]
        bare = [leaf for reference in self._bare or () if (leaf := reference()) is not None]
        beside = _bytes_of([*held, *(leaf.grad for leaf in bare if leaf.grad is not None)], self.device)
        if keeps and self._bare is None:
            self._bare = [weakref.ref(leaf) for leaf in autograd.own_leaves(node) if leaf.grad is None]
        self.graph.tell(of_backward(self.graph.report, self.graph.backward_bytes, count, beside, keeps))

    def _ended(self, gradients: Iterable[torch.Tensor | None], *_: Any) -> None:
        """Closes the call, unless autograd keeps its saved tensors: another backward may follow."""
        if not autograd.keeps_graph():
            self.watch.finish(self)
        elif not self.graph.is_told:
            self._gradients += [weakref.ref(one) for one in gradients if one is not None]


# -- gradients that calls of the present step have computed, and that are live beside its later calls ------------------------


class _Bare(NamedTuple):
    """A leaf without a gradient, its version, and Dynamo's number of the function that was called with it."""

    leaf: weakref.ref[torch.Tensor]
    version: int
    function: int | None


class StepGradients:
    """The leaves that calls of the present step found without a gradient.

    If such a leaf has a gradient later on, an earlier call of the step computed it. A change in place of one of them, as an
    optimizer makes it, ends the step. Gradients that are live then belong to the memory at the start of the next step.
    """

    def __init__(self) -> None:
        self._bare: dict[int, _Bare] = {}
        self.computed: dict[int, int | None] = {}
        """The backward that computed a gradient last, by the leaf's identity. Autograd holds gradients of a leaf that several
        calls take, until it has their sum."""

    def note(self, leaves: Iterable[torch.Tensor], function: int | None) -> None:
        """Records that a call of ``function`` in the present step takes ``leaves``."""
        self._bare |= {id(one): _Bare(weakref.ref(one), one._version, function) for one in leaves if one.grad is None}

    def live_bytes(self, call: Call, is_within_step: bool) -> tuple[int, int]:
        """Returns the bytes of the step's gradients on the call's device: of its own leaves, and of all others.

        ``is_within_step`` tells that other calls are open. Without them, gradients of other leaves belong to the present step
        in three cases: the running backward computed them, own leaves have gradients too, or they are inputs of an earlier
        call of the function. Else another model left them.
        """
        found = [(leaf, bare) for bare in list(self._bare.values()) if (leaf := bare.leaf()) is not None]
        if any(leaf._version != bare.version for leaf, bare in found):
            self._bare, self.computed = {}, {}
            return 0, 0
        owns, others, earlier = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
        running, function = autograd.backward_number(), call.graph.function
        for leaf, bare in found:
            waits = running is not None and self.computed.get(id(leaf)) == running
            gradient = leaf if leaf.grad is None and waits else leaf.grad  # a leaf has the size of its gradient
            if gradient is None or gradient.device != call.device:
                continue
            of_function = bare.function is not None and bare.function == function and not isinstance(leaf, torch.nn.Parameter)
            (owns if id(leaf) in call.leaves else others if waits or of_function else earlier).append(gradient)
        others += earlier if is_within_step or owns else []
        own_bytes = _bytes_of(owns, call.device)
        return own_bytes, _bytes_of([*owns, *others], call.device) - own_bytes


def _bytes_of(tensors: Collection[torch.Tensor], device: torch.device) -> int:
    return Inventory(device.type, ROUNDING if device.type == "cuda" else 1).bytes_of(tensors)


# -- the step ----------------------------------------------------------------------------------------------------------------


class SharedStep:
    """The peak of the present step over graphs under shares, and the share of what it needs without this package."""

    def __init__(self) -> None:
        self.peak_bytes = self.limit_bytes = 0
        self.advice = ""
        """What broke the function, or how to count the calls of one graph."""

    def note(self, graph: Watched, earlier: Sequence[Call]) -> None:
        """Counts a call of ``graph`` beside the open calls ``earlier``. One alone was judged when it was compiled."""
        report, reference = graph.report, graph.report.reference_bytes
        if reference is None or not (earlier or graph.break_note):
            return
        for one in earlier:
            known = one.graph.report.reference_saved_bytes
            reference += one.held_bytes if one.packed_bytes is not None or known is None else known
        limit = max(int((report.budget_share or 0.0) * reference * (1 + TOLERANCE)), report.budget_bytes or 0)
        self.peak_bytes = max(self.peak_bytes, report.peak_bytes + sum(one.held_bytes for one in earlier))
        self.limit_bytes = max(self.limit_bytes, limit)
        self.advice = graph.break_note or self.advice or _counting(graph, earlier)

    def judge(self) -> None:
        """Warns if the step that ends now needed more than the share."""
        if self.peak_bytes > self.limit_bytes:
            who = "graphs of a broken function" if BROKEN in self.advice else "calls of a step that are open together"
            warn_user(
                f"the {who} need {format_bytes(self.peak_bytes)} together, over the {format_bytes(self.limit_bytes)} that are "
                f"the share of what they need without autoremat: some have too little to recompute.{self.advice} {PROFILE}",
                BudgetWarning,
            )


class Watch:
    """The open calls of this process. ``active`` is False while no call needs watching."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Watched] = weakref.WeakSet()
        self.end()

    def end(self) -> None:
        """Ends the watch, because one warning is enough."""
        self.active = False
        self.open: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
        self.graphs.clear()
        self.gradients, self.shared = StepGradients(), SharedStep()

    def add(self, graph: Watched) -> None:
        """Begins to watch the calls of ``graph``."""
        self.graphs.add(graph)
        self.active = True

    def call(self, compiled: Callable[..., Any], graph: Watched, args: tuple[Any, ...]) -> Any:
        """Returns ``compiled(*args)``, a call of ``graph``. It is recorded as open if it has a backward."""
        if infers_metadata() or any(map(is_fake, args)):
            return compiled(*args)  # no part of a step: the call only shows shapes, to a pipeline or to a split graph
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        leaves = [one for one in tensors if one.is_leaf and one.requires_grad] if self.active else []
        present = Call(self, graph, device_of(tensors), leaves)
        if self.active:
            self.shared = self.shared if self.open else SharedStep()
            self.judge(present, graph.report.peak_bytes)
            self.gradients.note(leaves, graph.function)
        with autograd.noting_packed() as packed:
            outputs = compiled(*args)
        node = autograd.backward_node(outputs, args)
        if node is not None:
            present.packed_bytes = None if packed is None else packed.kept_bytes(args)
            if self.active:
                self.open[id(present)] = present
            present.follow(node, packed)
        return outputs

    def finish(self, present: Call) -> None:
        """Closes the call ``present`` after its backward, which is judged. Without open calls, the step has ended."""
        if self.open.pop(id(present), None) is None:
            return
        self.judge(present, present.graph.backward_peak_bytes)
        self.gradients.computed |= dict.fromkeys(present.leaves, autograd.backward_number())
        if not self.open:
            self.shared.judge()
            self.active = self.active and any(map(self._may_exceed, self.graphs))

    def _may_exceed(self, graph: Watched) -> bool:
        """Returns True if the gradients of all watched graphs together could bring ``graph`` over its budget."""
        more = sum(one.report.accumulated_bytes for one in self.graphs if one is not graph or not graph.counts_gradients)
        return graph.bounds_gradients and graph.report.peak_bytes + more > (graph.report.budget_bytes or 0)

    def judge(self, present: Call, peak: int) -> None:
        """Warns if the call ``present``, which needs ``peak`` bytes, brings the step on its device over its budget in bytes.

        A share is judged at the step's end. Backwards run in the reverse order of their forwards. Calls that are open now are
        therefore open again during this call's backward.
        """
        graph, report = present.graph, present.graph.report
        every = [one for reference in self.open.valuerefs() if (one := reference()) is not None]
        here = [one for one in every if (one.device, one.thread) == (present.device, present.thread)]
        own = [one for one in here if one.graph is graph]
        # Budgets in bytes bound others of their kind, and so do shares. The peak counts calls in flight.
        others = report.plan.graph.calls.others
        earlier = own[others:]
        earlier += [one for one in here if one.graph is not graph and one.graph.by_share == graph.by_share]
        if graph.by_share or report.budget_bytes is None:
            self.shared.note(graph, earlier)
            return
        to_own, to_others = self.gradients.live_bytes(present, bool(here))
        more = to_others + (0 if graph.counts_gradients else to_own) if graph.bounds_gradients else 0
        peak -= max(0, others - len(own)) * report.held_bytes if more else 0  # calls in flight that are not open
        held = sum(one.held_bytes for one in earlier)
        if held + more and peak + held + more > report.budget_bytes:
            self.end()
            text = _of_open_calls(present, earlier, peak, more) if held else _of_gradients(report, peak, more, to_others)
            warn_user(text, BudgetWarning)


def _counting(graph: Watched, earlier: Sequence[Call]) -> str:
    """Returns the advice to count the ``earlier`` calls, if all are of ``graph``."""
    alone = all(one.graph is graph for one in earlier)
    return f" For calls of one graph, in_flight={len(earlier) + graph.report.in_flight} counts so many." if alone else ""


def _of_open_calls(present: Call, earlier: Sequence[Call], peak: int, more: int) -> str:
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


def _of_gradients(report: Report, peak: int, more: int, to_others: int) -> str:
    """Returns the text about ``more`` bytes of gradients, ``to_others`` of them of parameters that the call does not take."""
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


_watch = Watch()


def reset() -> None:
    """Forgets the open calls of this process, whose outputs a cycle may still hold."""
    _watch.end()


def watched(compiled: Callable[..., Any], report: Report, by_share: bool) -> Callable[..., Any]:
    """Returns ``compiled`` with its calls recorded by this process's watch, and its backwards looked at."""
    graph = Watched(report, by_share, number_of_function())
    _watch.add(graph)

    def call(*args: Any) -> Any:
        return _watch.call(compiled, graph, args) if _watch.active or graph.assumed or not graph.is_told else compiled(*args)

    return call
