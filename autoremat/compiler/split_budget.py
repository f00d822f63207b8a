"""One budget for the parts into which a graph is split.

Torch splits one into buckets under ``DistributedDataParallel``, and ``early_gradients.py`` for hooks on gradients. Each part
comes to the backend by itself, in the sequence of the forward. When the first one comes, all parts are traced and planned,
without compiling or running any. Their plans share the budget by the ledger of the whole step. It is known without a
measurement: the forwards run in sequence, the backwards in reverse. Each part is then compiled under its share, as under a step
profile.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from autoremat.basics.errors import (
    BudgetWarning,
    OptionsError,
    is_user_error,
    planning_error,
)
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.capture import source_info
from autoremat.capture.call_cost import storage_bytes
from autoremat.capture.capture import device_of_inputs, may_train
from autoremat.compiler.agreed_profile import Gathers, agreed_profile
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.compiler.lowering import GraphSource
from autoremat.compiler.partitioning import tracing_to
from autoremat.compiler.planning import SmallestGraph, plan_for_minimum_peak
from autoremat.compiler.split_words import advice_of, words_of
from autoremat.planner.graph.forms import SHARDS
from autoremat.planner.graph.op import Role
from autoremat.planner.multigraph.frame import Border, Frame, Part
from autoremat.planner.multigraph.fronts import border_values, output_bytes
from autoremat.planner.multigraph.ledger import KnownBorders, Share
from autoremat.planner.multigraph.open_calls import OpenCalls
from autoremat.planner.multigraph.step_profile import CODE_HEADROOM, ENDED_BY_CLOCK, Step, StepGraph, StepProfile
from autoremat.planner.plans.plan import Plan
from autoremat.request.budgets import warn_of_open_calls
from autoremat.request.grants import note_grant
from autoremat.request.limits import CommonBudget, Limits
from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private import fake_tensors, joint_graphs, split_graphs, tensor_identity
from autoremat.torch_private.dynamo import asks_to_restart
from autoremat.torch_private.processes import job

log = logging.getLogger("autoremat")


@dataclass(frozen=True)
class SharedBudget:
    """The budget of a split graph, shared out. ``shares`` has each part's; None for a part without a choice of plans."""

    profile: StepProfile
    shares: tuple[Share | None, ...]


_shared: WeakKeyDictionary[Any, SharedBudget | None] = WeakKeyDictionary()
"""The budgets of the graphs that are compiled in parts now. None if a graph could not be planned and falls back."""


def request_in_split(source: GraphSource, request: Request, around: Surroundings) -> Request:
    """Returns the request for a graph: with its share of the common budget if it is a part, else ``request``.

    Raises ``BudgetInfeasible`` if the parts do not fit together, and ``OptionsError`` for a budget of time.
    """
    split = _split_of(request)
    if split is None:
        return request
    if split.number == 0:  # later parts are not known as graphs any more
        if request.calls != OpenCalls():
            warn_of_open_calls()
        whole = replace(request, is_part=False)
        planned = _shared[split.owner] = _planned_together(split, whole, source.patches)
        note_grant(request, around, None if planned is None else planned.profile.budget_bytes)
    shared = _shared.get(split.owner)
    share = None if shared is None else shared.shares[split.number]
    if shared is None or share is None:
        return request
    common = CommonBudget(shared.profile, f"{words_of(split).part} {split.number + 1}", advice_of(split))
    ledger, advice = shared.profile.device_ledger, request.limits.advice
    host = shared.profile.step.host_bytes
    limits = Limits(share.peak_bytes, step_share=share, host_bytes=host, ledger=ledger, common=common, advice=advice)
    return replace(request, limits=limits, calls=OpenCalls(), is_part=False)


def _split_of(request: Request) -> split_graphs.Split | None:
    """Returns the split whose part is compiled now; None if its parts need no common budget."""
    limits = request.limits
    if not limits.bounds_memory or limits.step_share is not None or limits.takes_whole_reference:
        return None
    if request.plan or not split_graphs.is_split():
        return None
    split = split_graphs.current_split()
    if split is None:
        warnings.warn(
            "DistributedDataParallel splits this graph into buckets, but this version of torch does not show them: each keeps "
            "memory_budget by itself, and together they may exceed it. Set torch._dynamo.config.optimize_ddp = False, or pass "
            "the result of autoremat.profile_step as memory_budget",
            BudgetWarning,
            stacklevel=2,
        )
    elif limits.max_slowdown is not None:
        words = words_of(split)
        raise OptionsError(
            f"max_slowdown bounds the time of one graph, and this one is split into {words.parts} that share memory_budget: "
            f"leave one of them out, or set {words.whole}"
        )
    return split


def _planned_together(split: split_graphs.Split, request: Request, patches: Mapping[str, Any]) -> SharedBudget | None:
    """Returns the budget of all parts, shared out; None if one of them cannot be planned and falls back.

    It is called while the first part is compiled. Raises ``BudgetInfeasible`` if no choice of plans fits and the request does
    not ask for the best effort.
    """
    words = words_of(split)
    now(f"planning {split.count} {words.part}s together")
    try:
        with split_graphs.tracing_undone():
            traced = _Tracing(split, request, patches, may_repeat=SHARDS not in request.forms)
            step, graphs = _step(traced)
    except Exception as error:  # models and ops are open-ended, so any error may occur
        if is_user_error(error) or asks_to_restart(error):
            raise
        if not request.falls_back:
            raise planning_error(error, f"the {split.count} {words.part}s of a graph") from error
        log.info("planning the parts together failed", exc_info=error)
        return None
    if not step.graphs:
        return None

    def run_gathers_once() -> Step:
        with split_graphs.tracing_undone():
            return _step(_Tracing(split, request, patches, may_repeat=False))[0]

    place = f"{split.count} {words.parts}"
    advised = replace(request, limits=replace(request.limits, advice=(*request.limits.advice, advice_of(split))))
    gathers = Gathers(traced.gathering_ranks, run_gathers_once) if traced.gathering_ranks and job() is not None else None
    settles_as = f"the step of {place}"
    profile = agreed_profile(step, advised, place, settles_as, communicates=gathers is not None, gathers=gathers)
    shares = [None if one is None else _share(profile, one, split, number) for number, one in enumerate(graphs)]
    log.info("%s share one budget: %s", place, profile.line())
    return SharedBudget(profile, tuple(shares))


def _share(profile: StepProfile, graph: _Graph, split: split_graphs.Split, number: int) -> Share | None:
    """Returns the share of ``graph``, which is the part of that number."""
    share, words = profile.shares[graph.number], words_of(split)
    note = (
        f"{words.part} {number + 1} of {split.count} {words.cause}: they share one budget of "
        f"{format_bytes(profile.budget_bytes or 0)}, of which {format_bytes(profile.peak_bytes)} are planned (baseline "
        f"{format_bytes(profile.baseline_peak_bytes)}, minimum {format_bytes(profile.minimum_peak_bytes)})"
    )
    note += f"; {split.hooks.note}" if split.hooks is not None and split.hooks.note else ""
    note += f"; plans {ENDED_BY_CLOCK}" if profile.step.ended_by_clock else ""
    return None if share is None else replace(share, known=graph.known, note=note)


# -- the step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _PlannedPart:
    """A part and its graph with a planner. ``graph`` is None if the part has no backward."""

    part: split_graphs.PartOfGraph
    graph: SmallestGraph | None


class _Tracing:
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
        fake_tensors.trace_as_compiled(part.module, part.inputs, partitioner, request.fuses, patches)
    return found[0] if found else None


def _step(traced: _Tracing) -> tuple[Step, list[_Graph | None]]:
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
class _Graph:
    """A part's graph in the step, with the holders of the values at its borders."""

    profiled: StepGraph
    known: KnownBorders
    number: int


@dataclass(frozen=True)
class _PartBorders:
    """The borders of one part's graph."""

    traced: _Tracing
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

    def graph(self, frame: Frame, number: int) -> _Graph:
        """Returns the part as a graph of the step, at the place ``number`` of the frame."""
        elsewhere = frame.held_elsewhere(number)
        held = (value for value, place in self.places.items() if place in elsewhere)
        known = KnownBorders(tuple(sorted(self.free)), tuple(sorted(held)))
        place = frame.parts[number].graph
        assert place is not None
        return _Graph(self.planned.in_step(f"part {number}", known), known, place)

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
