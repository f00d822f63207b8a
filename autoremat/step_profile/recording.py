"""Runs a step with every graph on its plan with the minimum peak, and records its calls and live memory.

While a recording is active, the backend hands its graphs to it. They are traced and planned as for compilation. No code is
generated: forward and backward run op by op.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoremat.basics.errors import StepProfileError
from autoremat.capture.capture import device_of_inputs
from autoremat.capture.communication import may_communicate
from autoremat.capture.source_info import graph_key
from autoremat.compiler.joint_graph import Partitioner
from autoremat.compiler.lowering import Partitioning
from autoremat.compiler.planning import SmallestGraph, plan_for_minimum_peak
from autoremat.compiler.problem import Problem
from autoremat.measure.peak import PeakTracker, Reading, track_peak
from autoremat.options.options import Options
from autoremat.planner.multigraph.ledger import Moment
from autoremat.planner.plans.limits import output_bytes, point_of
from autoremat.request.budgets import request_of_recording
from autoremat.request.surroundings import BLOCK, RECEIVER
from autoremat.torch_private import autograd, compilers
from autoremat.torch_private.dynamo import copied_with_sources, sharded_inputs
from autoremat.torch_private.hooks import around_backward, untraced, when_dropped
from autoremat.torch_private.process_groups import job

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class RecordedGraph:
    """A graph that a step called. ``planned`` holds the plan that ran and the planner of all others; None without a choice."""

    key: str
    planned: SmallestGraph | None
    device: torch.device


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


def meter_of(device: torch.device) -> PeakTracker:
    """Returns a meter for ``device``. Raises ``StepProfileError`` for devices other than the CPU and CUDA."""
    if device.type not in ("cpu", "cuda"):
        raise StepProfileError(f"a step profile measures the CPU and CUDA devices, not {device.type!r}")
    return track_peak(device)


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

    def start(self, meter: PeakTracker | None) -> None:
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
            compiled = compilers.trace_as_inductor_does(module, inputs, {**config, "custom_partitioner_fn": partitioner})
        else:
            compiled = compilers.compile_uncompiled(gm, inputs, partitioner)
        keys = [graph.key for graph in self.graphs]
        if key not in keys:
            self.graphs.append(RecordedGraph(key, partitioning.planned, device_of_inputs(gm, inputs)))
        return partial(self.run, (*keys, key).index(key), compiled)  # several compilations of a graph share its number

    def leave_out_other_devices(self) -> None:
        """Drops the plans of graphs on other devices, whose memory is no part of the step's budget."""
        self.graphs = [graph if graph.device == self.device else replace(graph, planned=None) for graph in self.graphs]

    def note(self, event: Event) -> None:
        """Records an event that happens now, with a mark of the meter."""
        if self.meter is not None:
            self.meter.mark()
        self.events.append(event)

    def run(self, graph: int, compiled: Compiled, *args: Any) -> Any:
        """Runs one call of a graph and records the events of both its halves.

        Calls of threads that do not belong to the profiled step are not recorded.
        """
        if RECEIVER.get() != self.compile:
            return compiled(*args)
        call = len(self.calls)
        self.calls.append(Caller(graph, BLOCK.get()))
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
        planned = {caller: self.graphs[caller.graph].planned for caller in number_of}
        ran = {caller: point_of(p.plan, p.priced.kept_inputs).saved_bytes for caller, p in planned.items() if p is not None}
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
                if (smallest := planned.get(caller)) is not None:  # its peak counts it
                    graph = smallest.plan.graph
                    own = is_open * ran[caller] + output_bytes(graph) + min(event.tangent_bytes, graph.tangent_bytes)
                open_calls = [call for call in open_calls if call != event.call]
            others, saved = open_now()
            if caller in ran:
                found.append(Moment(reading.live_bytes - saved - own, others, number_of[caller], event.backward))
        return found


# -- the first steps of a training loop --------------------------------------------------------------------------------------


MOST_DISTURBED = 4
"""Number of measured steps that may be thrown away because a graph was compiled within them."""

MOST_PASSES = 64
"""Number of backward passes within which a step is expected to begin without gradients of earlier micro-batches."""


class _Alive:
    """An object that lives as long as the backward of a call may still run."""


class FirstSteps(Recording):
    """The recording of the first steps. ``moments_found`` has the moments of the measured step; None before its end."""

    def __init__(self, options: Options, has_gradients: Callable[[], bool]) -> None:
        super().__init__(options)
        self.has_gradients = has_gradients
        self.moments_found: list[Moment] | None = None
        self.is_traced = False
        """True once a step has run in which the graphs were traced."""
        self.disturbed = self.passes = self.all_passes = 0
        """Numbers of measured steps in which a graph was compiled, and of backward passes in this step and in all."""
        self.waiting: set[int] = set()
        """The calls that wait for their backward."""
        self.in_pass = self.has_ended = self.compiles = False
        self._before_update: RemovableHandle | None = None

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], config: Mapping[str, Any]) -> Compiled:
        """Returns ``gm`` as :meth:`Recording.compile` does. A step in which this happens is measured again."""
        self.compiles = True
        return super().compile(gm, inputs, config)

    def run(self, graph: int, compiled: Compiled, *args: Any) -> Any:
        """Runs one call of a graph, and begins a step with the first one.

        No profiler starts in the call in which another one stops, so such a step is not measured. Dynamo's record of this
        region is open. At its end torch would write into the memory of the first profiler, because the second one runs.
        """
        if RECEIVER.get() == self.compile and self.moments_found is None:
            # Abandoned are calls that have had no backward, or one that failed, if none can follow.
            none_follows = bool(self.calls) and not self.waiting and autograd.backward_number() is None
            ends = self.has_ended or (none_follows and (self.in_pass or not self.passes))
            was_measured = ends and self.meter is not None
            if ends:
                self.settle()
            if not self.calls and not was_measured:
                self._begin()
        return super().run(graph, compiled, *args)

    def follow(self, call: int, node: Node) -> None:
        """Records the backward of a call, and the end of the pass in which it runs."""
        step, alive = self.events, _Alive()
        self.waiting.add(call)
        when_dropped(alive, self._dropped, step, call)

        def begins(tangents: Any) -> None:
            if self.events is step:
                if not self.in_pass:
                    self.in_pass = True
                    autograd.when_backward_ends(partial(self._pass_ended, step))
                self.begin_backward(call, tangents)

        def ends(*_: Any, alive: _Alive = alive) -> None:
            if self.events is step:
                self.waiting.discard(call)
                self.end_backward(call)

        around_backward(node, begins, ends)

    def settle(self) -> None:
        """Finishes the step that has ended: keeps its moments if it was measured undisturbed.

        Not during a backward, whose end would bring a stopped profiler back.
        """
        if self.moments_found is not None:
            return
        meter, is_complete = self.meter, self.has_ended
        if self._before_update is not None:
            self._before_update.remove()
            self._before_update = None
        if meter is not None:
            with contextlib.nullcontext() if is_complete else contextlib.suppress(RuntimeError):
                meter.__exit__(None, None, None)
            self.disturbed += is_complete and self.compiles
            if is_complete and (not self.compiles or self.disturbed > MOST_DISTURBED):
                self.leave_out_other_devices()
                self.moments_found = self.moments(meter.readings[: len(self.events) + 1])
                return
        self.is_traced = self.is_traced or (is_complete and meter is None)
        self.start(None)
        self.waiting.clear()
        self.passes = 0
        self.in_pass = self.has_ended = self.compiles = False

    def _begin(self) -> None:
        """Begins a step: one that is measured, if all graphs are traced and earlier micro-batches left no gradients."""
        if not self.is_traced or (self.options.accumulate and self.has_gradients() and self.all_passes < MOST_PASSES):
            return
        meter = meter_of(self.device)
        try:
            meter.__enter__()
        except RuntimeError as error:
            raise StepProfileError(
                "the second training step measures the memory around the blocks, which is impossible inside another profiler "
                "or `track_peak`: begin these after two steps"
            ) from error
        self.start(meter)
        self._before_update = register_optimizer_step_pre_hook(untraced(self._settle_before_update))

    def _settle_before_update(self, *_: Any) -> None:
        """Stops the measurement before the optimizer's own step, which is no part of it."""
        if self.has_ended and autograd.backward_number() is None:
            self.settle()

    def _pass_ended(self, step: list[Event]) -> None:
        """Ends the recorded step with the pass after which no call waits for its backward."""
        if self.events is not step or self.has_ended:
            return
        self.in_pass = False
        self.passes += 1
        self.all_passes += 1
        self._end_if_complete()

    def _dropped(self, step: list[Event], call: int) -> None:
        """Stops waiting for a backward that cannot run any more."""
        if self.events is step and call in self.waiting:
            self.waiting.discard(call)
            if not self.in_pass:
                self._end_if_complete()

    def _end_if_complete(self) -> None:
        if not self.waiting and self.passes >= (2 if self.options.accumulate else 1):
            self.has_ended = True
            if self.meter is not None:
                self.meter.mark()
