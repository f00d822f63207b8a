"""The step of a split graph: its parts traced and planned, and the ledger of all of them.

The ledger is known without a measurement: the forwards run in sequence, the backwards in reverse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import fx

from autoremat.capture import source_info
from autoremat.capture.call_cost import storage_bytes
from autoremat.capture.capture import device_of_inputs, may_train
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.compiler.partitioning import tracing_to
from autoremat.compiler.planning import SmallestGraph, plan_for_minimum_peak
from autoremat.planner.graph.op import Role
from autoremat.planner.multigraph.frame import Border, Frame, Part
from autoremat.planner.multigraph.fronts import border_values, output_bytes
from autoremat.planner.multigraph.ledger import KnownBorders
from autoremat.planner.multigraph.step import CODE_HEADROOM, Step, StepGraph
from autoremat.planner.plans.plan import Plan
from autoremat.request.request import Request
from autoremat.torch_private import fake_tensors, joint_graphs, split_graphs, tensor_identity


@dataclass(frozen=True, eq=False)
class _PlannedPart:
    """A part and its graph with a planner. ``graph`` is None if the part has no backward."""

    part: split_graphs.PartOfGraph
    graph: SmallestGraph | None


class TracedParts:
    """The traced parts of a graph, and the tensors at their borders."""

    def __init__(self, split: split_graphs.Split, request: Request, patches: Mapping[str, Any], may_repeat: bool) -> None:
        self.request = request
        parts, received, returned = split_graphs.parts_of(split)
        self.device = device_of_inputs(parts[0].module, [*received.values(), *returned])
        self.parts = [_PlannedPart(part, _planned(part, request, patches, may_repeat)) for part in parts]
        self.places: dict[int, int] = {}
        self.borders: list[Border] = []
        for tensor in _tensors([*received.values()]):
            self._note_border(tensor, None)
        for number, part in enumerate(parts):
            for tensor in _tensors(part.inputs):
                place = self._note_border(tensor, None)
                border = self.borders[place]
                self.borders[place] = replace(border, read_by=(*border.read_by, number))
            for tensor in _tensors(part.outputs):
                self._note_border(tensor, number)
        results = _tensors(returned)
        has_loss = any(tensor.dim() == 0 for tensor in results)
        for tensor in results:
            place = self._note_border(tensor, None)
            # A backward begins at the loss. Without one, it may begin at any result.
            given = 0 if has_loss and tensor.dim() else self.borders[place].gradient_bytes
            self.borders[place] = replace(self.borders[place], leaves=True, given_bytes=given)
        self.views = split_graphs.gradients_become_views()
        self.hooks = split.hooks or split_graphs.GradientHooks()
        self.freed = {self.place_of(received.get(name)) for name in self.hooks.freed} - {None}

    @property
    def gathering_ranks(self) -> frozenset[int]:
        """The ranks that repeat gathers together."""
        graphs = (one.graph for one in self.parts if one.graph is not None)
        return frozenset[int]().union(*(graph.priced.gathering_ranks for graph in graphs))

    def _note_border(self, tensor: torch.Tensor, made_by: int | None) -> int:
        """Returns the index of the border that holds ``tensor``, which is new if its storage is."""
        place = self.place_of(tensor)
        if place is not None:
            return place
        key = tensor_identity.storage_key(tensor)
        self.places[id(tensor) if key is None else key] = len(self.borders)
        needs_gradient = tensor.requires_grad and (made_by is not None or not isinstance(tensor, torch.nn.Parameter))
        size = storage_bytes(tensor, self.device.type)
        self.borders.append(Border(size, made_by, (), gradient_bytes=size if needs_gradient else 0))
        return len(self.borders) - 1

    def place_of(self, tensor: Any) -> int | None:
        """Returns the index of the border that holds ``tensor``; None if there is none."""
        if not isinstance(tensor, torch.Tensor):
            return None
        key = tensor_identity.storage_key(tensor)
        return self.places.get(id(tensor) if key is None else key)

    def is_freed(self, tensor: Any) -> bool:
        """Returns True if a hook frees the gradient of ``tensor`` as soon as it is made."""
        return self.place_of(tensor) in self.freed

    def stays(self, parameter: Any) -> bool:
        """Returns True if a gradient of ``parameter`` takes memory after the backward of its part.

        If several parts receive the parameter, the gradient of the last waits for that of the first.
        """
        place = self.place_of(parameter)
        is_shared = place is not None and len(self.borders[place].read_by) > 1
        return is_shared or not (self.views or place in self.freed)

    def is_received(self, tensor: Any) -> bool:
        """Returns True unless an earlier part made ``tensor``."""
        place = self.place_of(tensor)
        return place is None or self.borders[place].made_by is None


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _planned(
    part: split_graphs.PartOfGraph, request: Request, patches: Mapping[str, Any], may_repeat: bool
) -> SmallestGraph | None:
    """Returns the part with its planner; None if it has no backward. No code is generated."""
    if not may_train(part.module, part.inputs):
        return None
    source_info.take_names(part.module)
    context = PlanningContext(request, may_repeat_collectives=may_repeat)
    found: list[SmallestGraph] = []

    def visit(priced: PricedGraph) -> None:
        found.append(plan_for_minimum_peak(priced, context, request.limits.reference_share is not None))

    with tracing_to(visit, context) as partitioner:
        fake_tensors.trace_joint(part.module, part.inputs, partitioner, request.fuses, patches)
    return found[0] if found else None


def step_of(traced: TracedParts) -> tuple[Step, list[PartGraph | None]]:
    """Returns the step of the traced parts, and each part's graph in it."""
    found = [None if one.graph is None else _PartBorders(traced, one.part, one.graph) for one in traced.parts]
    trained = [number for number, one in enumerate(found) if one is not None]
    parts = [Part(None) if one is None else one.in_frame(trained.index(number)) for number, one in enumerate(found)]
    frame = Frame(parts, traced.borders)
    graphs = [None if one is None else one.graph(frame, number) for number, one in enumerate(found)]
    order = [f"forward {number}" for number in range(len(trained))]
    step = Step(
        graphs=tuple(graph.profiled for graph in graphs if graph is not None),
        moments=frame.moments(),
        order=(*order, *(one.replace("forward", "backward") for one in reversed(order))),
        device=str(traced.device),
        headroom=CODE_HEADROOM if traced.request.fuses else 0.0,
        host_bytes=traced.request.limits.host_bytes,
    )
    return step, graphs


@dataclass(frozen=True)
class PartGraph:
    """A part's graph in the step, with the holders of the values at its borders."""

    profiled: StepGraph
    known: KnownBorders
    number: int


@dataclass(frozen=True)
class _PartBorders:
    """The borders of one part's graph."""

    traced: TracedParts
    part: split_graphs.PartOfGraph
    planned: SmallestGraph

    @property
    def priced(self) -> PricedGraph:
        """The part's graph."""
        return self.planned.priced

    @cached_property
    def ends(self) -> joint_graphs.Ends:
        """The nodes at the ends of the graph."""
        return joint_graphs.ends_of(self.priced.joint.module, self.priced.joint.num_forward_outputs)

    @cached_property
    def plans(self) -> Sequence[Plan]:
        """All plans that the search finds."""
        return self.planned.planner.front()

    @cached_property
    def places(self) -> dict[int, int]:
        """The border of each value that is one, by the value's number."""
        nodes = ((self.ends.inputs, self.part.inputs), (self.ends.outputs, self.part.outputs))
        found = ((self._value(n), self.traced.place_of(_at(held, i))) for some, held in nodes for i, n in some.items())
        return {value: place for value, place in found if value is not None and place is not None}

    @cached_property
    def free(self) -> set[int]:
        """The inputs that exist before the step."""
        return {value for value, place in self.places.items() if self.traced.borders[place].made_by is None}

    def in_frame(self, number: int) -> Part:
        """Returns the part with what the frame needs of it, as graph ``number`` of the step."""
        kept = (border_values(plan, self.priced.kept_inputs, self.free) for plan in self.plans)
        counted = (Counter(self.places[value] for value in values if value in self.places) for values in kept)
        keeps = reduce(Counter.__and__, counted)
        staying, freed = self._gradient_bytes()
        return Part(number, output_bytes(self.priced.graph), staying, keeps, freed + self.traced.hooks.bytes)

    def graph(self, frame: Frame, number: int) -> PartGraph:
        """Returns the part as a graph of the step, at the place ``number`` of the frame."""
        elsewhere = frame.held_elsewhere(number)
        held = (value for value, place in self.places.items() if place in elsewhere)
        known = KnownBorders(tuple(sorted(self.free)), tuple(sorted(held)))
        place = frame.parts[number].graph
        assert place is not None
        return PartGraph(self.planned.in_step(f"part {number}", known), known, place)

    def _value(self, node: fx.Node) -> int | None:
        """Returns the number of the value that ``node`` holds; None unless it is a single one."""
        alias = self.priced.captured.aliases.get(node)
        return alias if isinstance(alias, int) else None

    def _gradient_bytes(self) -> tuple[int, int]:
        """Returns the bytes of the gradients that stay after the backward, and of those that hooks free then."""
        values = self.priced.graph.values
        placeholders = self.priced.joint.module.graph.find_nodes(op="placeholder")
        static = {placeholders[index] for index in self.priced.joint.static_inputs}
        staying: set[int] = set()
        freed: set[int] = set()
        for position, node in self.ends.gradients:
            value = self._value(node)
            is_parameter = position is None or self.ends.inputs[position] in static
            tensor = None if position is None else _at(self.part.inputs, position)
            if value is None or values[value].role is not Role.COMPUTED:
                continue
            if self.traced.stays(tensor) if is_parameter else self.traced.is_received(tensor):
                staying.add(value)
            elif self.traced.is_freed(tensor):
                freed.add(value)
        return sum(values[value].bytes for value in staying), sum(values[value].bytes for value in freed - staying)


def _at(values: Sequence[Any], position: int) -> Any:
    return values[position] if position < len(values) else None
