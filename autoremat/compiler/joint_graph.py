"""The first stages of a compilation: prepares AOTAutograd's joint graph, captures it and prices its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx

from autoremat.basics.progress import now
from autoremat.capture import communication
from autoremat.capture.capture import Capture, capture, runs_on_type
from autoremat.capture.communication import fingerprint, replicated_nodes
from autoremat.capture.forms import groups_of_shards, without_shards
from autoremat.capture.pricing import Prices
from autoremat.compiler.forms import with_allowed_forms
from autoremat.compiler.torch_partition import torchs_plan
from autoremat.ops.collectives import group_of
from autoremat.passes import before_capture
from autoremat.planner.constraints.constraints import without_saved_copies
from autoremat.planner.cost.links import HostLink, Interconnect, Links
from autoremat.planner.cost.rates import Rates
from autoremat.planner.graph.forms import SHARDS
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Role, Trait
from autoremat.planner.multigraph.ledger import Share
from autoremat.planner.multigraph.open_calls import OpenCalls
from autoremat.planner.plans.plan import Plan
from autoremat.planner.plans.plan_file import PlanFile
from autoremat.request.limits import Limits
from autoremat.request.request import Request
from autoremat.torch_private import higher_order, joint_graphs, process_groups


@dataclass(frozen=True)
class ToldPlan:
    """A plan that is applied instead of a search, because another rank or an earlier process has made it."""

    file: PlanFile
    chunks: int
    """Number of chunks of the loss."""
    ended_by_clock: bool = False
    """True if the clock ended the search for it."""
    tiles: int = 1
    """Number of tiles of the stretches that compute row by row."""


@dataclass(frozen=True)
class Reference:
    """The peak that a graph needs without this package, with its code headroom."""

    bytes: int
    source: str
    saved_bytes: int = 0
    """Bytes that the step with this peak saves for the backward."""


@dataclass(frozen=True)
class PlanningContext:
    """Everything beside the joint graph that decides its plan."""

    request: Request = field(default_factory=Request)
    extra_headroom_bytes: int = 0
    """Bytes by which the plan stays below the budget, because the code of an earlier plan needed more memory than simulated.
    A negative number loosens the plan."""
    cuda_name: str | None = None
    """Name of the CUDA device that is planned for by its data sheet. Another device may stand in for it in the graph."""
    lowers: bool = True
    """True if Inductor's code decides in the end. False if the simulation alone decides."""
    may_repeat_collectives: bool = False
    """True if ranks that share the graph follow one plan, so that they can repeat an all-gather together."""
    interconnects: Mapping[str, Interconnect] = field(default_factory=dict)
    """Measured rates of process groups, by name. The rates of other groups are assumed."""
    rates: Rates | None = None
    """The rates of the rank whose rates hold for all; None for those of the device here."""
    host_link: HostLink | None = None
    """The rates between device and host that hold for all ranks; None for those of the device here."""
    told: ToldPlan | None = None
    """The plan of another rank or of an earlier process; None for a search."""
    sharded_inputs: frozenset[int] = frozenset()
    """Positions of the inputs that are parameters under ``fully_shard``: freed after the forward, back in the backward."""
    reference: Reference | None = None
    """The reference peak by the code that Inductor generates alone; None if it is not known, or no budget is a share of it."""

    @property
    def decided_by_code(self) -> bool:
        """True if the peak of generated code decides on a plan."""
        return self.request.fuses and self.lowers


@dataclass(frozen=True)
class JointGraph:
    """A joint graph, with all that AOTAutograd passes to a partitioner."""

    module: fx.GraphModule
    inputs: Sequence[object]
    keywords: Mapping[str, Any]
    tiles: int = 1
    """Number of tiles of the stretches that compute row by row."""
    stretches: int = 0
    """Number of the stretches that are tiled."""

    @property
    def is_region(self) -> bool:
        """True if the graph is a nested compile region, which torch partitions first and without inputs.

        The surrounding graph may recompute the whole region. The budget is therefore no hard limit for it, and a share of its
        own peak has no meaning.
        """
        return not self.inputs

    @property
    def num_forward_outputs(self) -> int:
        """Number of outputs that belong to the forward."""
        return int(self.keywords["num_fwd_outputs"])

    @property
    def static_inputs(self) -> Sequence[int]:
        """Positions of the inputs whose addresses never change: parameters and buffers."""
        return self.keywords.get("static_lifetime_input_indices") or ()


@dataclass(frozen=True)
class PricedGraph:
    """A prepared joint graph with its capture, in which every op has its seconds."""

    joint: JointGraph
    captured: Capture
    kept_inputs: frozenset[int]
    """Numbers of the values that are inputs but neither parameters nor buffers. A saved input may stay live longer."""
    accumulated_bytes: int = 0
    """Bytes of the gradients of parameters, which are live beside the calls of later micro-batches."""
    unused_forms: tuple[str, ...] = ()
    """For each form that the request asks for and that no value can have, the option and the reason."""

    @property
    def graph(self) -> Graph:
        """The planner's graph."""
        return self.captured.graph

    @cached_property
    def gathering_groups(self) -> tuple[str, ...]:
        """The names of the process groups whose gathers the plan may repeat or add, in the sequence of the graph."""
        ops = zip(self.graph.ops, self.captured.op_nodes, strict=True)
        repeated = (group_of(node) for op, node in ops if Trait.GATHER in op.traits)
        return tuple(dict.fromkeys((*repeated, *groups_of_shards(self.captured))))

    @cached_property
    def gathering_ranks(self) -> frozenset[int]:
        """The ranks that repeat or add gathers together with this one; empty if the plan does neither."""
        return frozenset().union(*map(process_groups.ranks_of, self.gathering_groups))

    @cached_property
    def replication(self) -> str:
        """A hash of how the values are computed that may be kept as shards; empty without any."""
        return fingerprint(replicated_nodes(self.joint.module.graph)) if groups_of_shards(self.captured) else ""

    def with_gathers_once(self, why: str = "") -> PricedGraph:
        """Returns the graph without the permission to repeat a gather or to add one, with the reason for the report."""
        ops = tuple(replace(op, traits=op.traits & ~Trait.GATHER | Trait.COLLECTIVE) if Trait.GATHER in op.traits else op
                    for op in self.graph.ops)  # fmt: skip
        unused = self.unused_forms
        if groups_of_shards(self.captured):
            unused += (f"store={SHARDS!r} has no effect on a graph: {why}",)
        captured = without_shards(replace(self.captured, graph=replace(self.graph, ops=ops)))
        return replace(self, captured=captured, unused_forms=unused)

    def torchs_plan(self) -> Plan | None:
        """Returns torch's own partition without a budget as a plan; None if it is unknown."""
        return torchs_plan(self.captured, self.joint.inputs, self.joint.keywords)

    def name_planning(self, time_limit: float) -> None:
        """Names the planning of the graph as the present stage. ``time_limit`` is in seconds."""
        now(f"planning {len(self.graph.ops):,} ops, at most {time_limit:g} s")

    def step_share(self, limits: Limits) -> Share | None:
        """Returns the graph's share of a step's budget; None for a budget of its own, and for a nested region."""
        return None if self.joint.is_region else limits.step_share


def price_graph(joint: JointGraph, context: PlanningContext) -> PricedGraph | None:
    """Returns a joint graph prepared for the compiler, captured and with the seconds of its ops; None without a backward."""
    return capture_and_price(prepare(joint, context), context)


def prepare(joint: JointGraph, context: PlanningContext) -> JointGraph:
    """Returns the joint graph without dead code and common subexpressions, rewritten in place for the compiler."""
    now("reading the joint graph")
    joint_graphs.warn_of_torchs_budgets(joint.module)
    may_repeat = communication.is_gathering if context.may_repeat_collectives else None
    higher_order.describe_results(joint.module.graph)
    module = joint_graphs.prepare_joint(joint.module, joint.num_forward_outputs, may_repeat)
    before_capture(module, runs_on_type(module, context.cuda_name) if context.request.fuses else None)
    return replace(joint, module=module)


def capture_and_price(joint: JointGraph, context: PlanningContext) -> PricedGraph | None:
    """Returns the capture of a prepared joint graph, with the seconds of the cost model; None if it has no backward."""
    now("capturing")
    request = context.request
    links = Links(request.options.interconnect_bandwidth, request.options.interconnect_latency, context.interconnects)
    captured = capture(
        joint.module, joint.num_forward_outputs, request.fuses, context.cuda_name, context.may_repeat_collectives,
        Prices(request.options.cost_model, links, context.rates),
    )  # fmt: skip
    if captured.graph.single_phase:
        return None
    accumulated = _parameter_gradient_bytes(joint, captured)
    if request.limits.step_share is None and request.calls != OpenCalls():  # a profile counts open calls and gradients itself
        captured = replace(captured, graph=request.calls.of(captured.graph, accumulated))
    captured = replace(captured, graph=without_saved_copies(captured.graph, _sharded(joint, captured, context)))
    unused: tuple[str, ...] = ()
    if not joint.is_region:  # torch partitions it first, and the surrounding graph saves its results
        gathers = links if context.may_repeat_collectives else None
        captured, unused = with_allowed_forms(captured, request, context.cuda_name, context.host_link, gathers)
    return PricedGraph(joint, captured, _kept_inputs(joint, captured), accumulated, unused)


def _parameter_gradient_bytes(joint: JointGraph, captured: Capture) -> int:
    _, gradients = joint_graphs.joint_outputs(captured.joint, captured.num_fwd_outputs)  # one for each input of the forward
    nodes = (gradients[index] for index in joint.static_inputs if index < len(gradients))
    aliases = (captured.aliases.get(node) for node in nodes if isinstance(node, fx.Node))
    values = {alias for alias in aliases if isinstance(alias, int)}
    return sum(captured.graph.values[value].bytes for value in values.intersection(captured.graph.backward_outputs))


def _sharded(joint: JointGraph, captured: Capture, context: PlanningContext) -> frozenset[int]:
    """Returns the numbers of the values that are sharded inputs. A nested region has none: its inputs are not Dynamo's."""
    if not context.sharded_inputs or joint.is_region:
        return frozenset()
    inputs = joint_graphs.ends_of(joint.module, joint.num_forward_outputs).inputs
    found = (captured.aliases.get(node) for position, node in inputs.items() if position in context.sharded_inputs)
    return frozenset(value for value in found if isinstance(value, int))


def _kept_inputs(joint: JointGraph, captured: Capture) -> frozenset[int]:
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    static = {placeholders[index] for index in joint.static_inputs}
    values = zip(captured.graph.values, captured.value_nodes, strict=True)
    return frozenset(
        number
        for number, (value, node) in enumerate(values)
        if value.role is Role.INPUT and node is not None and node.op == "placeholder" and node not in static
    )
