"""Runs a step with every graph on its plan with the minimum peak, and records its calls and live memory.

While a recording is active, the backend hands its graphs to it. They are traced and planned as for compilation. No code is
generated: forward and backward run op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.graph import Node

from autoremat.capture.capture import device_of_inputs
from autoremat.capture.communication import may_communicate
from autoremat.capture.source_info import graph_key
from autoremat.compiler.interception import active_interceptor
from autoremat.compiler.joint_graph import Partitioner
from autoremat.compiler.lowering import Partitioning
from autoremat.compiler.planning import SmallestGraph, plan_for_minimum_peak
from autoremat.compiler.problem import Problem
from autoremat.options.options import Options
from autoremat.planner.multigraph.ledger import Moment
from autoremat.planner.plans.limits import output_bytes, point_of
from autoremat.request.budgets import request_of_recording
from autoremat.request.surroundings import current_block
from autoremat.step_profile.meter import Meter, Reading
from autoremat.torch_private import autograd, compilers
from autoremat.torch_private.dynamo import copied_with_sources, sharded_inputs
from autoremat.torch_private.process_groups import job
from autoremat.torch_private.untraced import around_backward

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class RecordedGraph:
    """A graph that a step called. ``planned`` holds the plan that ran and the planner of all others; None without a choice."""

    key: str
    planned: SmallestGraph | None
    device: torch.device

    @property
    def saved_bytes(self) -> int:
        """Bytes that a call saves under the plan that ran."""
        assert self.planned is not None
        return point_of(self.planned.plan, self.planned.priced.kept_inputs).saved_bytes


class Caller(NamedTuple):
    """A graph and the block that calls it."""

    graph: int
    """The graph's number in ``Recording.graphs``."""
    block: int | None
    """The block's number; None if the call cannot be told from others."""


@dataclass(frozen=True, slots=True)
class Event:
    """The begin or the end of a call's forward or backward."""

    call: int
    backward: bool
    begins: bool
    tangent_bytes: int = 0
    """Bytes of the gradients that a backward receives when it begins."""
    drops: bool = False
    """True at the end of a forward whose saved tensors are not kept: a hook drops them, as ``torch.utils.checkpoint`` does."""


class Recording:
    """The graphs, calls and events of a step."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.request = request_of_recording(options)
        self.graphs: list[RecordedGraph] = []
        self.communicates = False
        """True if a graph has collectives or tensor subclasses, so that all ranks need its plan."""
        self.start(None)

    @property
    def callers(self) -> list[Caller]:
        """The callers of planned graphs, in the sequence of their first calls."""
        return [caller for caller in dict.fromkeys(self.calls) if self.graphs[caller.graph].planned]

    @property
    def device(self) -> torch.device:
        """The device whose memory the budget limits: that of the first graph on an accelerator, else the CPU."""
        return next((graph.device for graph in self.graphs if graph.device.type != "cpu"), torch.device("cpu"))

    def start(self, meter: Meter | None) -> None:
        """Begins a step: drops earlier calls and events, and keeps the graphs."""
        self.meter = meter
        self.calls: list[Caller] = []
        self.events: list[Event] = []

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], config: Mapping[str, Any]) -> Compiled:
        """Returns ``gm``, planned for the minimum peak, as a callable that records its calls."""
        key, self.communicates = graph_key(gm, inputs), self.communicates or may_communicate(gm)
        problem = Problem(self.request, may_repeat_collectives=job() is None, sharded_inputs=sharded_inputs(gm))
        partitioning = Partitioning(problem, plan_for_minimum_peak)
        partitioner = Partitioner(partitioning)
        if self.options.compiler == "inductor":
            module = copied_with_sources(gm)
            compiled = autograd.trace_as_inductor_does(module, inputs, {**config, "custom_partitioner_fn": partitioner})
        else:
            compiled = compilers.compile_uncompiled(gm, inputs, partitioner)
        graph = RecordedGraph(key, partitioning.planned, device_of_inputs(gm, inputs))
        return partial(self.run, self.number_of(graph), compiled)

    def leave_out_other_devices(self) -> None:
        """Drops the plans of graphs on other devices, whose memory is no part of the step's budget."""
        self.graphs = [graph if graph.device == self.device else replace(graph, planned=None) for graph in self.graphs]

    def number_of(self, graph: RecordedGraph) -> int:
        """Returns the number of ``graph``; several compilations of the same graph share the first one's number."""
        for number, known in enumerate(self.graphs):
            if known.key == graph.key:
                return number
        self.graphs.append(graph)
        return len(self.graphs) - 1

    def note(self, event: Event) -> None:
        """Records an event that happens now, with a mark of the meter."""
        if self.meter is not None:
            self.meter.mark()
        self.events.append(event)

    def run(self, graph: int, compiled: Compiled, *args: Any) -> Any:
        """Runs one call of a graph and records the events of both its halves.

        Calls of threads that do not belong to the profiled step are not recorded.
        """
        if active_interceptor() is not self:
            return compiled(*args)
        call = len(self.calls)
        self.calls.append(Caller(graph, current_block()))
        self.note(Event(call, backward=False, begins=True))
        packed = None
        try:
            with autograd.noting_packed() as packed:
                outputs = compiled(*args)
        finally:  # a checkpoint ends a repeated forward by an exception, once it has all that the backward needs
            self.note(Event(call, backward=False, begins=False, drops=packed is not None and not packed.kept_bytes(args)))
        node = autograd.backward_node(outputs, args)
        if node is not None:
            self.follow(call, node)
        return outputs

    def follow(self, call: int, node: Node) -> None:
        """Records the begin and the end of a call's backward, whose autograd node is ``node``."""
        around_backward(node, partial(self.begin_backward, call), partial(self.end_backward, call))

    def begin_backward(self, call: int, tangents: Sequence[torch.Tensor | None]) -> None:
        """Records the begin of a backward, as an autograd hook."""
        handed = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tangents if t is not None}
        self.note(Event(call, backward=True, begins=True, tangent_bytes=sum(handed.values())))

    def end_backward(self, call: int, *_: Any) -> None:
        """Records the end of a backward, as an autograd hook."""
        self.note(Event(call, backward=True, begins=False))

    def moments(self, readings: Sequence[Reading]) -> list[Moment]:
        """Returns the step's moments: the measured bytes minus the bytes that the executed plans control.

        The moments refer to the entries of ``callers``.
        """
        number_of = {caller: number for number, caller in enumerate(self.callers)}
        ran = {caller: self.graphs[caller.graph].saved_bytes for caller in number_of}
        open_calls: list[int] = []
        dropped: set[int] = set()
        """The calls whose backward makes the saved tensors anew."""
        running: list[tuple[int, bool]] = []
        found: list[Moment] = []

        def open_now() -> tuple[tuple[int, ...], int]:
            """Returns the callers of the open calls, and the bytes that they saved."""
            callers = [self.calls[c] for c in open_calls if self.calls[c] in ran]
            return tuple(number_of[caller] for caller in callers), sum(ran[caller] for caller in callers)

        for event, reading in zip((*self.events, None), readings, strict=True):
            callers, saved = open_now()
            if not running:
                found.append(Moment(reading.peak_bytes - saved, callers))
            if event is None:
                break
            half, caller = (event.call, event.backward), self.calls[event.call]
            if not event.begins:
                running.remove(half)
                if event.drops or running:  # one within another is a forward that a backward repeats, as part of its own work
                    dropped.add(event.call)
                elif not event.backward:
                    open_calls.append(event.call)
                continue
            running.append(half)
            is_open, own = event.call in open_calls, 0
            if event.backward:
                if not is_open and event.call not in dropped:
                    continue  # a repeated backward of a retained graph; the ledger has already dropped its saved tensors
                own = self._own_bytes(caller.graph, event, is_open)
                open_calls = [call for call in open_calls if call != event.call]
            others, saved = open_now()
            if caller in ran:
                found.append(Moment(reading.live_bytes - saved - own, others, number_of[caller], event.backward))
        return found

    def _own_bytes(self, number: int, event: Event, saves: bool) -> int:
        """Returns the bytes that are live when a backward begins and that its peak counts."""
        graph = self.graphs[number]
        if not graph.planned:
            return 0
        captured = graph.planned.plan.graph
        handed = min(event.tangent_bytes, captured.tangent_bytes)
        return saves * graph.saved_bytes + output_bytes(captured) + handed
