"""Runs a step with every graph on its plan of least memory, and notes what runs when and what is alive then.

While a recording is active, the backend hands its graphs to it. They are traced and planned as they would be compiled, but no
code is generated: their halves run op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from autoremat.basics.progress import now
from autoremat.capture.capture import Capture
from autoremat.compiler.cache_key import graph_key
from autoremat.compiler.partitioner import Partitioner
from autoremat.options.options import Options
from autoremat.planner.cost import Pricing
from autoremat.planner.multigraph.fronts import front_of, output_bytes, point_of
from autoremat.planner.multigraph.ledger import Moment, PlanPoint
from autoremat.planner.multigraph.step_profile import StepGraph
from autoremat.planner.plans.plan import Plan
from autoremat.step_profile.meter import Meter, Reading
from autoremat.torch_private import autograd, compat

Compiled = Callable[..., Any]


@dataclass(repr=False, eq=False)
class _Explorer(Partitioner):
    """Plans a graph for least memory, and keeps the planner for all other plans."""

    def choose(self, captured: Capture, pricing: Pricing) -> Plan:
        now(f"planning {len(captured.graph.ops):,} ops, at most {self.options.time_limit:g} s")
        self.planner, _ = self.planner_of(captured)
        return self.planner.search.smallest


@dataclass(frozen=True)
class RecordedGraph:
    """A graph that a step called, with the plan it ran on and all others."""

    key: str
    partitioner: _Explorer

    @property
    def planned(self) -> bool:
        """Whether there is a choice of plans."""
        return self.partitioner.plan is not None

    @property
    def plan(self) -> Plan:
        """The one that was run."""
        assert self.partitioner.plan is not None
        return self.partitioner.plan

    def point(self, plan: Plan) -> PlanPoint:
        """``plan`` in the ledger."""
        return point_of(plan, self.partitioner.inputs_kept)

    def profiled(self, calls: int) -> StepGraph:
        """All that a step's ledger has to know of the graph."""
        planner = self.partitioner.planner
        assert planner is not None
        source = next((op.source for op in self.plan.graph.ops if op.source), "")
        front = front_of(planner, self.partitioner.inputs_kept)
        return StepGraph(self.key, source, calls, front, self.point(planner.baseline))


@dataclass(frozen=True, slots=True)
class Event:
    """A half of a call begins or ends."""

    call: int
    backward: bool
    begins: bool
    tangent_bytes: int = 0
    """Of the gradients that a backward is handed, as it begins."""


class Recording:
    """The graphs, calls and events of a step."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.graphs: list[RecordedGraph] = []
        self.devices: set[torch.device] = set()
        self.start(None)

    def start(self, meter: Meter | None) -> None:
        """A step begins: earlier calls are forgotten, their graphs are not."""
        self.meter = meter
        self.calls: list[int] = []
        self.events: list[Event] = []

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any], config: Mapping[str, Any]) -> Compiled:
        """``gm``, planned for least memory, as a function that notes its calls."""
        key = graph_key(gm, inputs)
        fuses = self.options.compiler == "inductor"
        partitioner = _Explorer(self.options, key, fuses=fuses, must_fit=False)
        if fuses:
            module = fx.GraphModule(gm, gm.graph)
            module.meta = dict(gm.meta)
            compiled = autograd.trace_as_inductor_does(module, inputs, {**config, "custom_partitioner_fn": partitioner})
        else:
            compiled = compat.compile_uncompiled(gm, inputs, partitioner)
        self.devices.update(t.device for t in inputs if isinstance(t, torch.Tensor))
        return partial(self.run, self.number_of(RecordedGraph(key, partitioner)), compiled)

    def number_of(self, graph: RecordedGraph) -> int:
        """Its number; that of the first if several compilations are of the same graph."""
        for number, known in enumerate(self.graphs):
            if known.key == graph.key:
                return number
        self.graphs.append(graph)
        return len(self.graphs) - 1

    def note(self, event: Event) -> None:
        """An event happens now."""
        if self.meter is not None:
            self.meter.mark()
        self.events.append(event)

    def run(self, graph: int, compiled: Compiled, *args: Any) -> Any:
        """One call."""
        call = len(self.calls)
        self.calls.append(graph)
        self.note(Event(call, backward=False, begins=True))
        outputs = compiled(*args)
        self.note(Event(call, backward=False, begins=False))
        node = autograd.backward_node(outputs, args)
        if node is not None:
            node.register_prehook(partial(self.begin_backward, call))
            node.register_hook(partial(self.end_backward, call))
        return outputs

    def begin_backward(self, call: int, tangents: Sequence[torch.Tensor | None]) -> None:
        """A hook of autograd's."""
        handed = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tangents if t is not None}
        self.note(Event(call, backward=True, begins=True, tangent_bytes=sum(handed.values())))

    def end_backward(self, call: int, *_: Any) -> None:
        """A hook of autograd's."""
        self.note(Event(call, backward=True, begins=False))

    def moments(self, readings: Sequence[Reading]) -> list[Moment]:
        """The step's moments: what was measured, less what the plans that were run had a say in."""
        ran = {number: graph.point(graph.plan) for number, graph in enumerate(self.graphs) if graph.planned}
        open_calls: list[int] = []
        running: list[Event] = []
        found: list[Moment] = []
        for event, reading in zip((*self.events, None), readings, strict=True):
            graphs = tuple(self.calls[c] for c in open_calls if self.calls[c] in ran)
            saved = sum(ran[g].saved_bytes for g in graphs)
            if not running:
                found.append(Moment(reading.peak_bytes - saved, graphs))
            if event is None:
                break
            graph = self.calls[event.call]
            if not event.begins:
                running.remove(Event(event.call, event.backward, begins=True))
                if not event.backward:
                    open_calls.append(event.call)
                continue
            running.append(Event(event.call, event.backward, begins=True))
            if not event.backward:
                own = 0
            elif event.call in open_calls:
                open_calls.remove(event.call)
                own = self._own_bytes(graph, event)
            else:
                continue  # a second backward of a retained graph: what it saves is gone from the ledger already
            others = tuple(self.calls[c] for c in open_calls if self.calls[c] in ran)
            base = reading.live_bytes - sum(ran[g].saved_bytes for g in others) - own
            if graph in ran:
                found.append(Moment(base, others, graph, event.backward))
        return found

    def _own_bytes(self, number: int, event: Event) -> int:
        """What is alive as a backward begins and counted in its peak."""
        graph = self.graphs[number]
        if not graph.planned:
            return 0
        captured = graph.plan.graph
        handed = min(event.tangent_bytes, captured.tangent_bytes)
        return graph.point(graph.plan).saved_bytes + output_bytes(captured) + handed
