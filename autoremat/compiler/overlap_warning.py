"""Warns if a step needs more memory than the plans of its graphs count.

Each graph is planned as if it were alone, with its calls in flight and a backward of one gradient that frees what was saved for
it. Four things add memory: further open calls, gradients of earlier backwards, backwards of another kind (``retain_graph``,
``create_graph``, ``is_grads_batched``), and hooks that copy saved tensors. Budgets in bytes are judged before each half of a
call, and shares once no call is open any more.

Calls are watched until a step has ended in which every graph was known, or longer if gradients could bring a graph over its
budget. Backwards of another kind may come in any step, so they are looked at until their function was warned of.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from autoremat.basics.errors import BudgetWarning
from autoremat.basics.units import format_bytes, rounded
from autoremat.basics.warn import warn_user
from autoremat.compiler.breaks import BROKEN
from autoremat.planner.memory.allocations import ROUNDING
from autoremat.planner.memory.simulator import BackwardBytes
from autoremat.report.report import Report
from autoremat.torch_private import autograd
from autoremat.torch_private.dynamo import number_of_function, resets
from autoremat.torch_private.fake_tensors import is_fake, local
from autoremat.torch_private.hooks import around_backward
from autoremat.torch_private.process_groups import infers_metadata
from autoremat.torch_private.tensors import device_of, storage_bytes, storage_key

TOLERANCE = 0.01
"""Share of its limit by which a step of several calls may exceed a share of what they need, which is an estimate."""

PROFILE = "autoremat.profile_step(model, *batch, memory_budget=...) shares one budget among all graphs; pass its result on"
BLOCKS = "For equal blocks that are compiled one by one, use autoremat.compile_blocks(blocks, memory_budget=...)"
ANEW = "Call the function once for each backward"
INSIDE = "Compile the whole loss, and take the inner gradient there by torch.func.grad"

Causes = list[tuple[str, str]]
"""What adds memory, each with its remedy."""


class Watched:
    """A compiled graph and its report. ``by_share`` is True if its budget is a share of the reference peak."""

    def __init__(self, report: Report, by_share: bool, function: int | None = None) -> None:
        self.report, self.by_share, self.function, self.budget = report, by_share, function, report.budget_bytes or 0
        self.key: object = object() if function is None else (resets(), function)
        """What its recompilations share."""
        self.assumed = dict(report.assumed_sizes)
        ledger = report.device_ledger
        self.bounds_gradients = not (by_share or (ledger is not None and ledger.counts_gradients))
        """True if the budget bounds the gradients of earlier calls too."""
        broken = (note for note in report.notes if by_share and note.startswith(BROKEN))  # each with its remedy
        self.breaks: Causes = [(note, f"Otherwise, {PROFILE}") for note in broken]

    @cached_property
    def backward_bytes(self) -> BackwardBytes:
        """The bytes of a backward by the plan."""
        return BackwardBytes.of(self.report.plan.timeline)


class Step:
    """Calls of one thread on one device that are open together, or that take the same leaves."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.thread = device, threading.get_ident()
        self.open: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
        self.functions = set[int | None]()
        self.leaves = WeakTensorKeyDictionary()
        """The versions of the leaves that its calls found without a gradient."""
        self.returned: list[tuple[weakref.ref[Any], dict[int, int], object]] = []
        """Storages that backwards returned, their bytes, and the backward, or the call if that keeps its graph."""
        self.need = self.limit = 0
        """The most bytes of calls under shares, and of their shares, since no call was open."""
        self.causes: Causes = []

    def others(self, call: Call) -> list[Call]:
        """Returns the other open calls. A backward may close one in another thread meanwhile."""
        return [one for reference in self.open.valuerefs() if (one := reference()) not in (None, call)]

    def takes(self, leaves: Sequence[torch.Tensor], function: int | None) -> bool:
        """Returns True if a call belongs to the step. It ends where a leaf changes in place, as an optimizer does it."""
        if any(version != leaf._version for leaf, version in self._noted()):
            self.leaves, self.returned = WeakTensorKeyDictionary(), []
        is_again = function in self.functions and not any(isinstance(leaf, torch.nn.Parameter) for leaf in leaves)
        return bool(self.open) or is_again or any(leaf in self.leaves for leaf in leaves)

    def note(self, leaves: Iterable[torch.Tensor]) -> None:
        """Notes the leaves of a call. A gradient that one has by then was there before the step."""
        self.leaves.update({leaf: leaf._version for leaf in leaves if leaf.grad is None and leaf not in self.leaves})

    def hold(self, gradients: Iterable[torch.Tensor | None], holder: object) -> None:
        """Notes what a backward returns to ``holder``."""
        self.returned = [one for one in self.returned if one[0]() is not None]
        for tensor in (local(one) for one in gradients if one is not None):
            with contextlib.suppress(NotImplementedError):  # it has no storage
                self.returned.append((weakref.ref(tensor.untyped_storage()), self._bytes_of([tensor]), holder))

    def gradients(self, *holders: object) -> dict[int, int]:
        """Returns the bytes of the gradients of leaves, and of those returned to ``holders``, by storage."""
        found = self._bytes_of([local(leaf.grad) for leaf, _ in self._noted() if leaf.grad is not None])
        for storage, size, holder in self.returned:
            if holder in holders and storage() is not None:
                found |= size
        return found

    def _noted(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the leaves with their versions, at once: the thread of another step may ask while its own notes more."""
        return [(leaf, version) for key, version in self.leaves.data.copy().items() if (leaf := key()) is not None]

    def _bytes_of(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        rounding = ROUNDING if self.device.type == "cuda" else 1
        here = (one for one in tensors if one.device == self.device)
        return {storage_key(one): rounded(storage_bytes(one, self.device.type), rounding) for one in here}


class Call:
    """A call of a graph. Autograd holds it until its backward has run or cannot run any more, and calls its hooks."""

    def __init__(self, watch: Watch, graph: Watched, step: Step, leaves: Iterable[torch.Tensor] = ()) -> None:
        self.watch, self.graph, self.step, self.leaves = watch, graph, step, frozenset(map(id, leaves))
        self.held_bytes = graph.report.saved_bytes
        """Bytes that the call holds for its backward. Hooks on saved tensors change it, as ``torch.utils.checkpoint`` does."""
        self.reference_bytes = graph.report.reference_saved_bytes or self.held_bytes
        """Bytes that it would hold without this package."""
        self.has_run = False
        self.token = object()
        """Stands for the call among what holds gradients, for these may outlive it."""

    def begin_backward(self, node: weakref.ref[Node], received: Sequence[torch.Tensor | None]) -> None:
        """Judges the backward of ``node`` that begins now."""
        report, causes = self.graph.report, Causes()
        keeps, count, creates = autograd.keeps_graph(), autograd.gradients_at_once(received), torch.is_grad_enabled()
        present = node()
        if present is None or (keeps and autograd.refuses_to_keep_graph(present)):
            return  # torch raises its own error
        if count:
            causes.append((f"a backward computes {count} gradients at once", f"{ANEW}, without is_grads_batched"))
        if keeps:
            causes.append(("retain_graph or create_graph keeps what was saved for a backward", INSIDE if creates else ANEW))
            self.step.note(autograd.own_leaves(present))
        if self.has_run:
            causes.append(("another backward of the call has run", ANEW))
        if causes or (self.watch.active and not self.graph.by_share):
            handed = {storage_key(one) for one in received if one is not None}
            code = report.peak_bytes - report.predicted_peak_bytes
            self.judge(lambda: self.graph.backward_bytes.peak(count, keeps) + code, causes, handed)

    def end_backward(self, gradients: Iterable[torch.Tensor | None], *_: Any) -> None:
        """Closes the call, unless autograd keeps its saved tensors: another backward may follow."""
        self.has_run, keeps = True, autograd.keeps_graph()
        if keeps or self.watch.active:
            self.step.hold(gradients, self.token if keeps else autograd.backward_number())
        if not keeps:
            self.watch.finish(self)

    def judge(self, own_bytes: Callable[[], int], causes: Causes, handed: Collection[int] = ()) -> None:
        """Warns if the call needs more than its budget, with ``own_bytes()`` by itself and all that is live beside it.

        ``causes`` tell what is unusual about itself. The storages ``handed`` to it are its own.
        """
        graph, report, others = self.graph, self.graph.report, self.graph.report.plan.graph.calls.others
        is_own, is_later = bool(causes), graph.by_share and not causes
        alike = [one for one in self.step.others(self) if one.graph.by_share == graph.by_share]
        same = [one for one in alike if one.graph is graph]
        earlier = [*same[others:], *(one for one in alike if one.graph is not graph)]
        held, live = sum(one.held_bytes for one in earlier), 0
        if graph.bounds_gradients or causes:
            found = self.step.gradients(self.token, autograd.backward_number())
            live = sum(size for key, size in found.items() if key not in handed) - report.resident_bytes
        causes = [*causes, *self._causes(earlier, held, live), *graph.breaks]
        if not causes or graph.key in self.watch.told:
            return
        absent = max(0, others - len(same)) * report.held_bytes if live > 0 else 0  # calls in flight that are not open
        need, limit = own_bytes() + held + max(0, live) - absent, graph.budget
        if graph.by_share:
            whole = (report.reference_bytes or 0) + sum(one.reference_bytes for one in earlier)
            limit = max(limit, int((report.budget_share or 0.0) * whole * (1 + TOLERANCE)))
        if not is_later:
            self.watch.warn(graph, need, limit, causes, ends=not is_own)
            return
        self.step.limit = max(self.step.limit, limit)
        if need > self.step.need:
            self.step.need, self.step.causes = need, causes

    def _causes(self, earlier: Sequence[Call], held: int, live: int) -> Causes:
        """Returns what is live beside the call: the bytes ``held`` by ``earlier`` calls, and ``live`` ones of gradients."""
        found, report = Causes(), self.graph.report
        if held:
            calls = "one earlier call holds" if len(earlier) == 1 else f"{len(earlier)} earlier calls hold"
            remedy = PROFILE
            if any(one.graph is self.graph and one.leaves.isdisjoint(self.leaves) for one in earlier):
                remedy = BLOCKS
            elif all(one.graph is self.graph for one in earlier):
                remedy = f"in_flight={len(earlier) + report.in_flight} counts so many calls"
            found.append((f"{calls} {format_bytes(held)} for the backward", remedy))
        if live > 0:
            others = live if report.resident_bytes else live - report.accumulated_bytes
            remedy = "Set accumulate=True" if report.device_ledger is None else "Give device_budget the number: accumulate=..."
            if others > 0:
                remedy = f"Lower memory_budget by {format_bytes(others)}, and set accumulate=True"
            found.append((f"{format_bytes(live)} of gradients of earlier backwards are live", remedy))
        return found


class Watch:
    """The steps of this process. ``active`` is False while none needs watching."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Watched] = weakref.WeakSet()
        self.told = set[object]()
        """The keys of the graphs that a warning told of."""
        self._joining = threading.Lock()
        self.end()

    def end(self) -> None:
        """Ends the watch, because one warning is enough."""
        self.active, self.steps = False, list[Step]()
        self.graphs.clear()

    def add(self, graph: Watched) -> None:
        """Begins to watch the calls of ``graph``."""
        self.graphs.add(graph)
        self.active = True

    def warn(self, graph: Watched, need: int, limit: int, causes: Causes, ends: bool = True) -> None:
        """Warns if a step needs more than its limit. This ``ends`` the watch, unless one graph alone needs so much."""
        if need > limit:
            self.told.add(graph.key)
            if ends:
                self.end()
            warn_user(
                f"a step needs up to {format_bytes(need)}, over its memory budget of {format_bytes(limit)}, because "
                f"{' and '.join(cause for cause, _ in causes)}. {causes[0][1]}",
                BudgetWarning,
            )

    def call(self, compiled: Callable[..., Any], graph: Watched, args: tuple[Any, ...]) -> Any:
        """Returns ``compiled(*args)``, a call of ``graph``. It is recorded as open if it has a backward."""
        if infers_metadata() or any(map(is_fake, args)):
            return compiled(*args)  # no part of a step: the call only shows shapes, to a pipeline or to a split graph
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        leaves = [one for one in tensors if one.is_leaf and one.requires_grad] if self.active else []
        step, report = Step(device_of(tensors)), graph.report
        present = Call(self, graph, self._joined(step, leaves, graph.function) if self.active else step, leaves)
        if self.active:
            present.judge(lambda: report.peak_bytes, [])
            present.step.note(leaves)
        with autograd.noting_packed() as packed:
            outputs = compiled(*args)
        node = autograd.backward_node(outputs, args)
        if node is None:
            return outputs
        if packed is not None:
            present.held_bytes = present.reference_bytes = packed.kept_bytes(args)
            if copied := sum(packed.copies.values()):
                cause = f"hooks on saved tensors copy {format_bytes(copied)}", "Leave the hooks out: a plan takes their place"
                present.judge(lambda: report.held_bytes + copied, [cause])
        if graph.assumed and (text := _of_larger_size(report, autograd.saved_numbers(node))):
            graph.assumed.clear()
            warn_user(text, BudgetWarning)
        if self.active:
            present.step.open[id(present)] = present
        # The node holds the call.
        around_backward(node, partial(present.begin_backward, weakref.ref(node)), present.end_backward)
        return outputs

    def _joined(self, new: Step, leaves: Sequence[torch.Tensor], function: int | None) -> Step:
        """Returns the step to which a call belongs: an earlier one, or the ``new`` one."""
        with self._joining:
            # The step of another thread may be within its first forward, which opens no call yet.
            self.steps = [one for one in self.steps if one.thread != new.thread or one.open or one.gradients()]
            here = (one for one in self.steps if (one.thread, one.device) == (new.thread, new.device))
            step = next((one for one in here if one.takes(leaves, function)), new)
            if step is new:
                self.steps.append(new)
        if not step.open:
            step.need = step.limit = 0
        step.functions.add(function)
        return step

    def finish(self, call: Call) -> None:
        """Closes a call after its backward. Without open calls, the watch ends, unless gradients could exceed a budget."""
        if call.step.open.pop(id(call), None) is None:
            return
        if not call.step.open:
            self.warn(call.graph, call.step.need, call.step.limit, call.step.causes)
        if self.active and not any(step.open for step in self.steps):
            total = sum(one.report.accumulated_bytes for one in self.graphs)
            free = {one: one.budget - one.report.peak_bytes for one in self.graphs if one.bounds_gradients}
            self.active = any(total - bool(g.report.resident_bytes) * g.report.accumulated_bytes > free[g] for g in free)


def _of_larger_size(report: Report, numbers: Sequence[int]) -> str:
    """Returns the text on the first of the ``numbers`` that a call saved that is larger than the plan assumes; "" without."""
    found = next(((numbers[at], most) for at, most in report.assumed_sizes if numbers[at] > most), None)
    if found is None or report.budget_bytes is None:
        return ""
    return (
        f"a size that depends on data is {found[0]} in this step, and the plan assumes at most {found[1]}, because nothing "
        f"bounds it: the budget of {format_bytes(report.budget_bytes)} may not hold. State the bound in the function that is "
        f"compiled, torch._check(size <= {found[0]}) or more, and it is planned for"
    )


_watch = Watch()


def reset() -> None:
    """Forgets the open calls of this process, whose outputs a cycle may still hold."""
    _watch.end()


def watched(compiled: Callable[..., Any], report: Report, by_share: bool) -> Callable[..., Any]:
    """Returns ``compiled`` with its calls watched."""
    graph = Watched(report, by_share, number_of_function())
    _watch.add(graph)

    def call(*args: Any) -> Any:
        is_watched = _watch.active or graph.assumed or graph.key not in _watch.told
        return _watch.call(compiled, graph, args) if is_watched else compiled(*args)

    return call
