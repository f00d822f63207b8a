"""One budget for the parts into which a graph is split.

Torch splits one into buckets under ``DistributedDataParallel``, and ``early_gradients.py`` for hooks on gradients. Each part
comes to the backend by itself, in the sequence of the forward. When the first one comes, all parts are traced and planned,
without compiling or running any. Their plans share the budget by the ledger of the whole step, whose moments are known without
a measurement: the forwards run in sequence, the backwards in reverse. Each part is then compiled under its share, as under a
step profile.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx

from autoremat.basics.errors import BudgetInfeasible, find_cause, is_user_error, planning_error
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.capture import source_info
from autoremat.capture.capture import device_of_inputs, may_train
from autoremat.compiler.lowering import visited
from autoremat.compiler.peers import Gathers, agreed_profile
from autoremat.compiler.planning import SmallestGraph, plan_for_minimum_peak
from autoremat.compiler.problem import Problem
from autoremat.planner.graph.op import SHARDS, Role
from autoremat.planner.multigraph.ledger import Border, OpenCalls, Part, moments_of
from autoremat.planner.multigraph.step import CODE_HEADROOM, Step
from autoremat.planner.multigraph.step_profile import ENDED_BY_CLOCK, StepProfile
from autoremat.planner.plans.limits import border_values, output_bytes
from autoremat.request.budgets import note_grant, request_of_share, warn_of_open_calls
from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private import joint_graphs, split_graphs
from autoremat.torch_private.dynamo import asks_to_restart
from autoremat.torch_private.process_groups import job
from autoremat.torch_private.split_graphs import GradientHooks, PartOfGraph, Split
from autoremat.torch_private.tensors import storage_bytes, storage_key, tensors_in

log = logging.getLogger("autoremat")


class Words(NamedTuple):
    """How texts name a part of a graph, what it is part of, how to compile the whole, and what that lacks."""

    part: str
    cause: str
    whole: str
    loss: str

    @property
    def parts(self) -> str:
        """The name of all parts."""
        return f"{self.part}s {self.cause}"


BUCKETS = Words(
    "bucket", "of DistributedDataParallel", "torch._dynamo.config.optimize_ddp = False", "overlaps no communication"
)
PARTS = Words("part", "for early gradients", "early_gradients=False", "hands over all gradients at its end")


_profiles: WeakKeyDictionary[Any, StepProfile | None] = WeakKeyDictionary()
"""The steps of the graphs that are compiled in parts now. None if a graph could not be planned and falls back."""


@dataclass(frozen=True)
class SplitRequest:
    """The request of a graph. A part has the ``profile`` of the step of all parts, with its share of the budget."""

    request: Request
    profile: StepProfile | None = None
    split: Split | None = None

    @property
    def note(self) -> str:
        """The note on all parts for the report; empty for a graph with a budget of its own."""
        profile, split = self.profile, self.split
        if profile is None or split is None:
            return ""
        words = _words_of(split)
        note = (
            f"{words.part} {split.number + 1} of {split.count} {words.cause}: they share one budget of "
            f"{format_bytes(profile.budget_bytes or 0)}, of which {format_bytes(profile.peak_bytes)} are planned (baseline "
            f"{format_bytes(profile.baseline_peak_bytes)}, minimum {format_bytes(profile.minimum_peak_bytes)})"
        )
        note += f"; {split.hooks.note}" if split.hooks is not None and split.hooks.note else ""
        return note + (f"; plans {ENDED_BY_CLOCK}" if profile.step.ended_by_clock else "")

    def restate(self, error: Exception) -> None:
        """Names the figures of all parts in an error of one."""
        infeasible, profile, split = find_cause(error, BudgetInfeasible), self.profile, self.split
        if infeasible is None or profile is None or split is None:
            return
        excess, budget = max(0, infeasible.minimum_bytes - infeasible.budget_bytes), profile.budget_bytes or 0
        part = f"{_words_of(split).part} {split.number + 1} needs {format_bytes(excess)} more than its share"
        infeasible.restate(
            budget_bytes=budget,
            minimum_bytes=budget + excess,
            lower_bound_bytes=min(profile.minimum_peak_bytes, budget),
            remedies=(*self.request.limits.advice, f"{part}; {_advice_of(split)}"),
            gradient_bytes=0,
            parts=(),
            device_bytes=None,
            is_simulated=False,
        )


def request_in_split(problem: Problem, around: Surroundings) -> SplitRequest:
    """Returns the request of a graph: with its share of the common budget if it is a part, else that of ``problem``.

    Raises ``BudgetInfeasible`` if the parts do not fit together, and ``OptionsError`` for a budget of time.
    """
    request, limits = problem.request, problem.request.limits
    is_apart = not limits.bounds_peak or limits.step_share is not None or limits.takes_whole_reference or request.options.plan
    split = None if is_apart else split_graphs.current_split()
    if split is None:
        return SplitRequest(request)
    words = _words_of(split)
    limits.refuse_beside_peak(f"a graph in {words.parts} ({words.whole} compiles it as one)")
    # Also within a broken function, they fit by themselves.
    request = Request.of(request.options, request.limits, request.calls)
    if split.number == 0:  # later parts are not known as graphs any more
        if request.calls != OpenCalls():
            warn_of_open_calls()
        if split.owner not in _profiles:
            _profiles[split.owner] = planned_together(split, request, problem.patches)
        first = _profiles[split.owner]
        note_grant(request, around, None if first is None else first.budget_bytes)
    profile = _profiles.get(split.owner)
    share = None if profile is None else profile.shares_of(f"part {split.number}").get(None)
    if profile is None or share is None:  # it falls back, or has no choice of plans
        return SplitRequest(request)
    return SplitRequest(request_of_share(share, profile, request.options, request.limits.advice), profile, split)


def _words_of(split: Split) -> Words:
    return BUCKETS if split.hooks is None else PARTS


def _advice_of(split: Split) -> str:
    """Returns the advice for an error whose figures are those of all parts."""
    words = _words_of(split)
    if split.hooks is None:
        more = "gradient_as_bucket_view=True keeps no second copy of the gradients"
    elif split.hooks.are_unknown:
        more = "gradients count as kept to the end of the step. If the hooks free them, hooks_free_gradients=True says so"
    else:
        more = f"early_gradients={2 * split.count} frees gradients earlier, in more parts"
    return (
        f"the figures are those of the {split.count} {words.parts} together. {words.whole} compiles them as one graph, which "
        f"shares memory better and {words.loss}; {more}"
    )


def planned_together(split: Split, request: Request, patches: Mapping[str, Any]) -> StepProfile | None:
    """Returns the step of all parts with its budget shared out; None if one of them cannot be planned and falls back.

    Raises ``BudgetInfeasible`` if no choice of plans fits and the request does not ask for the best effort.
    """
    words = _words_of(split)

    def traced(may_repeat: bool) -> tuple[Step, frozenset[int]]:
        with split_graphs.tracing_undone():
            return step_of(split, request, patches, may_repeat)

    now(f"planning {split.count} {words.part}s together")
    try:
        step, gathering_ranks = traced(SHARDS not in request.forms)
    except Exception as error:  # models and ops are open-ended, so any error may occur
        if is_user_error(error) or asks_to_restart(error):
            raise
        if not request.falls_back:
            raise planning_error(error, f"the {split.count} {words.part}s of a graph") from error
        log.info("planning the parts together failed", exc_info=error)
        return None
    if not step.graphs:
        return None
    repeats = gathering_ranks and job() is not None
    gathers = Gathers(gathering_ranks, lambda: traced(may_repeat=False)[0]) if repeats else None
    place = f"{split.count} {words.parts}"
    advised = replace(request, limits=replace(request.limits, advice=(*request.limits.advice, _advice_of(split))))
    profile = agreed_profile(step, advised, place, gathers)
    log.info("%s share one budget: %s", place, profile.line())
    return profile


# -- the step of a split graph -----------------------------------------------------------------------------------------------


def step_of(split: Split, request: Request, patches: Mapping[str, Any], may_repeat: bool) -> tuple[Step, frozenset[int]]:
    """Returns the step of the parts of ``split``, each traced and planned, and the ranks that repeat gathers together.

    A part without a choice of plans is no graph of the step. No code is generated.
    """
    parts, received, returned = split_graphs.parts_of(split)
    device = device_of_inputs(parts[0].module, [*received.values(), *returned])
    planned = [_planned(part, request, patches, may_repeat) for part in parts]
    borders = _Borders(device.type, parts, [*received.values()], returned)
    hooks = split.hooks or GradientHooks()
    freed = {borders.place_of(received.get(name)) for name in hooks.freed} - {None}
    graphs = [graph for graph in planned if graph is not None]
    numbers = itertools.count()
    frame = [
        Part(None) if graph is None else _part(next(numbers), part, graph, borders, hooks.bytes, freed)
        for part, graph in zip(parts, planned, strict=True)
    ]
    step = Step(
        graphs=tuple(graph.in_step(f"part {number}") for number, graph in enumerate(planned) if graph is not None),
        moments=moments_of(frame, borders.all),
        order=(*(f"forward {n}" for n in range(len(graphs))), *(f"backward {n}" for n in reversed(range(len(graphs))))),
        device=str(device),
        headroom=CODE_HEADROOM if request.fuses else 0.0,
        host_bytes=request.limits.host_bytes,
    )
    return step, frozenset[int]().union(*(graph.priced.gathering_ranks for graph in graphs))


class _Borders:
    """The tensors at the borders of the parts. One storage is one border."""

    def __init__(
        self, device_type: str, parts: Sequence[PartOfGraph], received: Sequence[Any], returned: Sequence[Any]
    ) -> None:
        """Notes what the whole graph receives, what each part receives and returns, and what the whole graph returns."""
        self.device_type, self.places, self.all = device_type, dict[int, int](), list[Border]()
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
    problem = Problem(request, patches=patches, may_repeat_collectives=may_repeat)
    compares = request.limits.reference_share is not None
    return visited(problem, part.module, part.inputs, lambda priced: plan_for_minimum_peak(priced, compares))


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
