"""The step of a split graph: its parts traced and planned, and the moments of all of them.

They are known without a measurement: the forwards run in sequence, the backwards in reverse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import fx

from autoremat.capture import source_info
from autoremat.capture.capture import device_of_inputs, may_train
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.compiler.lowering import tracing_to
from autoremat.compiler.planning import SmallestGraph, plan_for_minimum_peak
from autoremat.compiler.problem import Problem
from autoremat.planner.graph.op import Role
from autoremat.planner.multigraph.frame import Border, Part, moments_of
from autoremat.planner.multigraph.step import CODE_HEADROOM, Step
from autoremat.planner.plans.limits import border_values, output_bytes
from autoremat.request.request import Request
from autoremat.torch_private import fake_tensors, joint_graphs, split_graphs
from autoremat.torch_private.split_graphs import GradientHooks, PartOfGraph, Split
from autoremat.torch_private.tensors import storage_bytes, storage_key, tensors_in


@dataclass(frozen=True)
class StepOfParts:
    """The step of a split graph, with the entry of each part; None for a part without a choice of plans."""

    step: Step
    entries: tuple[int | None, ...]
    gathering_ranks: frozenset[int]
    """The ranks that repeat gathers together."""


def step_of(split: Split, request: Request, patches: Mapping[str, Any], may_repeat: bool) -> StepOfParts:
    """Returns the step of the parts of ``split``, each traced and planned. No code is generated."""
    parts, received, returned = split_graphs.parts_of(split)
    device = device_of_inputs(parts[0].module, [*received.values(), *returned])
    planned = [_planned(part, request, patches, may_repeat) for part in parts]
    borders = _Borders(device.type)
    borders.note_all(parts, [*received.values()], returned)
    hooks = split.hooks or GradientHooks()
    freed = {borders.place_of(received.get(name)) for name in hooks.freed} - {None}
    graphs = [graph for graph in planned if graph is not None]
    numbers = iter(range(len(graphs)))
    entries = tuple(None if graph is None else next(numbers) for graph in planned)
    frame = [
        Part(None) if graph is None or entry is None else _part(entry, part, graph, borders, hooks.bytes, freed)
        for entry, part, graph in zip(entries, parts, planned, strict=True)
    ]
    step = Step(
        graphs=tuple(graph.in_step(f"part {number}") for number, graph in enumerate(planned) if graph is not None),
        moments=moments_of(frame, borders.all),
        order=(*(f"forward {n}" for n in range(len(graphs))), *(f"backward {n}" for n in reversed(range(len(graphs))))),
        device=str(device),
        headroom=CODE_HEADROOM if request.fuses else 0.0,
        host_bytes=request.limits.host_bytes,
    )
    ranks = (graph.priced.gathering_ranks for graph in graphs)
    return StepOfParts(step, entries, frozenset[int]().union(*ranks))


class _Borders:
    """The tensors at the borders of the parts. One storage is one border."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.places: dict[int, int] = {}
        self.all: list[Border] = []

    def note_all(self, parts: Sequence[PartOfGraph], received: Sequence[Any], returned: Sequence[Any]) -> None:
        """Notes what the whole graph receives, what each part receives and returns, and what the whole graph returns."""
        for tensor in tensors_in(received):
            self.note(tensor, None)
        for number, part in enumerate(parts):
            for tensor in tensors_in(part.inputs):
                place = self.note(tensor, None)
                self.all[place] = replace(self.all[place], read_by=(*self.all[place].read_by, number))
            for tensor in tensors_in(part.outputs):
                self.note(tensor, number)
        results = tensors_in(returned)
        has_loss = any(tensor.dim() == 0 for tensor in results)
        for tensor in results:
            place = self.note(tensor, None)
            # A backward begins at the loss. Without one, it may begin at any result.
            given = 0 if has_loss and tensor.dim() else self.all[place].gradient_bytes
            self.all[place] = replace(self.all[place], leaves=True, given_bytes=given)

    def note(self, tensor: torch.Tensor, made_by: int | None) -> int:
        """Returns the place of the border that holds ``tensor``, which is new if its storage is."""
        place = self.place_of(tensor)
        if place is not None:
            return place
        self.places[storage_key(tensor)] = len(self.all)
        needs_gradient = tensor.requires_grad and (made_by is not None or not isinstance(tensor, torch.nn.Parameter))
        size = storage_bytes(tensor, self.device_type)
        self.all.append(Border(size, made_by, (), gradient_bytes=size if needs_gradient else 0))
        return len(self.all) - 1

    def place_of(self, tensor: Any) -> int | None:
        """Returns the place of the border that holds ``tensor``; None if there is none."""
        return self.places.get(storage_key(tensor)) if isinstance(tensor, torch.Tensor) else None


def _planned(part: PartOfGraph, request: Request, patches: Mapping[str, Any], may_repeat: bool) -> SmallestGraph | None:
    """Returns the part with its planner; None if it has no backward."""
    if not may_train(part.module, part.inputs):
        return None
    source_info.take_names(part.module)
    problem = Problem(request, may_repeat_collectives=may_repeat)
    found: list[SmallestGraph] = []

    def visit(priced: PricedGraph) -> None:
        found.append(plan_for_minimum_peak(priced, request.limits.reference_share is not None))

    with tracing_to(visit, problem) as partitioner:
        fake_tensors.trace_joint(part.module, part.inputs, partitioner, request.fuses, patches)
    return found[0] if found else None


def _part(
    entry: int, part: PartOfGraph, planned: SmallestGraph, borders: _Borders, hook_bytes: int, freed: set[int | None]
) -> Part:
    """Returns the part with what its moments need. ``freed`` are the borders of parameters whose hooks free their gradients."""
    priced = planned.priced
    values, aliases = priced.graph.values, priced.captured.aliases
    ends = joint_graphs.ends_of(priced.joint.module, priced.joint.num_forward_outputs)

    def value_of(node: fx.Node) -> int | None:
        alias = aliases.get(node)
        return alias if isinstance(alias, int) else None

    def place_at(tensors: Sequence[Any], position: int) -> int | None:
        return borders.place_of(tensors[position]) if position < len(tensors) else None

    found = {value_of(node): place_at(part.inputs, i) for i, node in ends.inputs.items()}
    found |= {value_of(node): place_at(part.outputs, i) for i, node in ends.outputs.items()}
    plans = (border_values(plan, priced.kept_inputs) for plan in planned.planner.front())
    counted = (Counter(place for value in kept if (place := found.get(value)) is not None) for kept in plans)
    placeholders = priced.joint.module.graph.find_nodes(op="placeholder")
    static = {placeholders[index] for index in priced.joint.static_inputs}
    stay, go = set[int](), set[int]()
    views = split_graphs.gradients_become_views()
    for position, node in ends.gradients:
        value = value_of(node)
        if value is None or values[value].role is not Role.COMPUTED:
            continue
        place = None if position is None else place_at(part.inputs, position)
        border = None if place is None else borders.all[place]
        if position is None or ends.inputs[position] in static:  # of a parameter, which several parts may receive
            stays = (border is not None and len(border.read_by) > 1) or not (views or place in freed)
        else:
            stays = border is None or border.made_by is None
        if stays or place in freed:
            (stay if stays else go).add(value)
    staying, freed_bytes = (sum(values[value].bytes for value in some) for some in (stay, go - stay))
    return Part(entry, output_bytes(priced.graph), staying, reduce(Counter.__and__, counted), freed_bytes + hook_bytes)
