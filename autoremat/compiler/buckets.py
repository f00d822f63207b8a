"""One budget for the buckets into which torch splits a graph under ``DistributedDataParallel``.

Torch hands each bucket to the backend by itself, in the sequence of the forward. When it hands over the first one, all buckets
are traced and planned, without compiling or running any. Their plans share the budget by the ledger of the whole step. It is
known without a measurement: the forwards run in sequence, the backwards in reverse. Each bucket is then compiled under its
share, as under a step profile.
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
from autoremat.compiler.agreed_profile import agreed_profile
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.compiler.lowering import GraphSource
from autoremat.compiler.partitioning import tracing_to
from autoremat.compiler.planning import SmallestGraph, plan_for_minimum_peak
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
from autoremat.torch_private import ddp, fake_tensors, joint_graphs, tensor_identity

log = logging.getLogger("autoremat")


@dataclass(frozen=True)
class SharedBudget:
    """The budget of a split graph, shared out. ``shares`` has each bucket's; None for a bucket without a choice of plans."""

    profile: StepProfile
    shares: tuple[Share | None, ...]


_shared: WeakKeyDictionary[Any, SharedBudget | None] = WeakKeyDictionary()
"""The budgets of the graphs that torch splits now. None if a graph could not be planned and falls back."""


def request_in_split(source: GraphSource, request: Request, around: Surroundings) -> Request:
    """Returns the request for a graph: with its share of the common budget if it is a bucket, else ``request``.

    Raises ``BudgetInfeasible`` if the buckets do not fit together, and ``OptionsError`` for a budget of time.
    """
    split = _split_of(request)
    if split is None:
        return request
    if split.number == 0:  # torch shows all buckets only now
        if request.calls != OpenCalls():
            warn_of_open_calls()
        whole = replace(request, is_part=False)
        planned = _shared[split.owner] = _planned_together(split, whole, source.patches)
        note_grant(request, around, None if planned is None else planned.profile.budget_bytes)
    shared = _shared.get(split.owner)
    share = None if shared is None else shared.shares[split.number]
    if shared is None or share is None:
        return request
    common = CommonBudget(shared.profile, f"bucket {split.number + 1}", _advice(split))
    ledger, advice = shared.profile.device_ledger, request.limits.advice
    host = shared.profile.step.host_bytes
    limits = Limits(share.peak_bytes, step_share=share, host_bytes=host, ledger=ledger, common=common, advice=advice)
    return replace(request, limits=limits, calls=OpenCalls(), is_part=False)


def _split_of(request: Request) -> ddp.Split | None:
    """Returns the split whose bucket is compiled now; None if its buckets need no common budget."""
    limits = request.limits
    if not limits.bounds_memory or limits.step_share is not None or limits.takes_whole_reference:
        return None
    if request.plan or not ddp.is_split():
        return None
    split = ddp.current_split()
    if split is None:
        warnings.warn(
            "DistributedDataParallel splits this graph into buckets, but this version of torch does not show them: each keeps "
            "memory_budget by itself, and together they may exceed it. Set torch._dynamo.config.optimize_ddp = False, or pass "
            "the result of autoremat.profile_step as memory_budget",
            BudgetWarning,
            stacklevel=2,
        )
    elif limits.max_slowdown is not None:
        raise OptionsError(
            "max_slowdown bounds the time of one graph, and DistributedDataParallel splits this one into buckets that share "
            "memory_budget: leave one of them out, or set torch._dynamo.config.optimize_ddp = False"
        )
    return split


def _planned_together(split: ddp.Split, request: Request, patches: Mapping[str, Any]) -> SharedBudget | None:
    """Returns the budget of all buckets, shared out; None if one of them cannot be planned and falls back.

    It is called while the first bucket is compiled. Raises ``BudgetInfeasible`` if no choice of plans fits and the request does
    not ask for the best effort.
    """
    now(f"planning {split.count} buckets together")
    try:
        with ddp.tracing_undone():
            step, graphs = _step(_Tracing(split, request, patches))
    except Exception as error:  # models and ops are open-ended, so any error may occur
        if is_user_error(error):
            raise
        if not request.falls_back:
            raise planning_error(error, f"the {split.count} buckets of a graph") from error
        log.info("planning the buckets together failed", exc_info=error)
        return None
    if not step.graphs:
        return None
    place = f"{split.count} buckets of DistributedDataParallel"
    advised = replace(request, limits=replace(request.limits, advice=(*request.limits.advice, _advice(split))))
    profile = agreed_profile(step, advised, place, settles_as=f"the step of {place}", communicates=False)
    shares = [None if one is None else _share(profile, one, split, number) for number, one in enumerate(graphs)]
    log.info("%d buckets of DistributedDataParallel share one budget: %s", split.count, profile.line())
    return SharedBudget(profile, tuple(shares))


def _share(profile: StepProfile, graph: _Graph, split: ddp.Split, number: int) -> Share | None:
    """Returns the share of ``graph``, which is the bucket of that number."""
    share = profile.shares[graph.number]
    note = (
        f"bucket {number + 1} of {split.count} of DistributedDataParallel: they share one budget of "
        f"{format_bytes(profile.budget_bytes or 0)}, of which {format_bytes(profile.peak_bytes)} are planned (baseline "
        f"{format_bytes(profile.baseline_peak_bytes)}, minimum {format_bytes(profile.minimum_peak_bytes)})"
    )
    note += f"; plans {ENDED_BY_CLOCK}" if profile.step.ended_by_clock else ""
    return None if share is None else replace(share, known=graph.known, note=note)


def _advice(split: ddp.Split) -> str:
    return (
        f"the figures are those of the {split.count} buckets of DistributedDataParallel together. "
        "torch._dynamo.config.optimize_ddp = False compiles them as one graph, which shares memory better and overlaps no "
        "communication; gradient_as_bucket_view=True keeps no second copy of the gradients"
    )


# -- the step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _PlannedBucket:
    """A bucket and its graph with a planner. ``graph`` is None if the bucket has no backward."""

    bucket: ddp.Bucket
    graph: SmallestGraph | None


class _Tracing:
    """The traced buckets of a graph, and the tensors at their borders."""

    def __init__(self, split: ddp.Split, request: Request, patches: Mapping[str, Any]) -> None:
        self.request = request
        buckets, received, returned = ddp.buckets_of(split)
        self.device = device_of_inputs(buckets[0].module, [*received, *returned])
        self.buckets = [_PlannedBucket(bucket, _planned(bucket, request, patches)) for bucket in buckets]
        self.places: dict[int, int] = {}
        self.borders: list[Border] = []
        for tensor in _tensors(received):
            self._note_border(tensor, None)
        for number, bucket in enumerate(buckets):
            for tensor in _tensors(bucket.inputs):
                place = self._note_border(tensor, None)
                border = self.borders[place]
                self.borders[place] = replace(border, read_by=(*border.read_by, number))
            for tensor in _tensors(bucket.outputs):
                self._note_border(tensor, number)
        for tensor in _tensors(returned):
            place = self._note_border(tensor, None)
            self.borders[place] = replace(self.borders[place], leaves=True)

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

    def is_shared(self, tensor: Any) -> bool:
        """Returns True if several buckets receive ``tensor``. The gradient of the last waits for that of the first."""
        place = self.place_of(tensor)
        return place is not None and len(self.borders[place].read_by) > 1

    def is_received(self, tensor: Any) -> bool:
        """Returns True unless an earlier bucket made ``tensor``."""
        place = self.place_of(tensor)
        return place is None or self.borders[place].made_by is None


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def _planned(bucket: ddp.Bucket, request: Request, patches: Mapping[str, Any]) -> SmallestGraph | None:
    """Returns the bucket with its planner; None if it has no backward. No code is generated."""
    if not may_train(bucket.module, bucket.inputs):
        return None
    source_info.take_names(bucket.module)
    context = PlanningContext(request)
    found: list[SmallestGraph] = []

    def visit(priced: PricedGraph) -> None:
        found.append(plan_for_minimum_peak(priced, context, request.limits.reference_share is not None))

    with tracing_to(visit, context) as partitioner:
        fake_tensors.trace_as_compiled(bucket.module, bucket.inputs, partitioner, request.fuses, patches)
    return found[0] if found else None


def _step(traced: _Tracing) -> tuple[Step, list[_Graph | None]]:
    """Returns the step of the traced buckets, and each bucket's graph in it."""
    views = ddp.gradients_become_views()
    found = [None if one.graph is None else _BucketBorders(traced, one.bucket, one.graph) for one in traced.buckets]
    trained = [number for number, one in enumerate(found) if one is not None]
    parts = [Part(None) if one is None else one.part(trained.index(number), views) for number, one in enumerate(found)]
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
    """A bucket's graph in the step, with the holders of the values at its borders."""

    profiled: StepGraph
    known: KnownBorders
    number: int


@dataclass(frozen=True)
class _BucketBorders:
    """The borders of one bucket's graph."""

    traced: _Tracing
    bucket: ddp.Bucket
    planned: SmallestGraph

    @property
    def priced(self) -> PricedGraph:
        """The bucket's graph."""
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
        nodes = ((self.ends.inputs, self.bucket.inputs), (self.ends.outputs, self.bucket.outputs))
        found = ((self._value(n), self.traced.place_of(_at(held, i))) for some, held in nodes for i, n in some.items())
        return {value: place for value, place in found if value is not None and place is not None}

    @cached_property
    def free(self) -> set[int]:
        """The inputs that exist before the step."""
        return {value for value, place in self.places.items() if self.traced.borders[place].made_by is None}

    def part(self, number: int, views: bool) -> Part:
        """Returns the bucket as a part of the step. ``views`` is True if gradients are moved into memory of the wrapper."""
        kept = (border_values(plan, self.priced.kept_inputs, self.free) for plan in self.plans)
        counted = (Counter(self.places[value] for value in values if value in self.places) for values in kept)
        return Part(number, output_bytes(self.priced.graph), self._finished_bytes(views), reduce(Counter.__and__, counted))

    def graph(self, frame: Frame, number: int) -> _Graph:
        """Returns the bucket as a graph of the step, at the place ``number`` of the frame."""
        elsewhere = frame.held_elsewhere(number)
        held = (value for value, place in self.places.items() if place in elsewhere)
        known = KnownBorders(tuple(sorted(self.free)), tuple(sorted(held)))
        place = frame.parts[number].graph
        assert place is not None
        return _Graph(self.planned.in_step(f"bucket {number}", known), known, place)

    def _value(self, node: fx.Node) -> int | None:
        """Returns the number of the value that ``node`` holds; None unless it is a single one."""
        alias = self.priced.captured.aliases.get(node)
        return alias if isinstance(alias, int) else None

    def _finished_bytes(self, views: bool) -> int:
        """Returns the bytes of the gradients that stay when the backward has run."""
        values = self.priced.graph.values
        placeholders = self.priced.joint.module.graph.find_nodes(op="placeholder")
        static = {placeholders[index] for index in self.priced.joint.static_inputs}
        staying: set[int] = set()
        for position, node in self.ends.gradients:
            value = self._value(node)
            is_parameter = position is None or self.ends.inputs[position] in static
            tensor = None if position is None else _at(self.bucket.inputs, position)
            stays = not views or self.traced.is_shared(tensor) if is_parameter else self.traced.is_received(tensor)
            if value is not None and stays and values[value].role is Role.COMPUTED:
                staying.add(value)
        return sum(values[value].bytes for value in staying)


def _at(values: Sequence[Any], position: int) -> Any:
    return values[position] if position < len(values) else None
