"""The first stages of a compilation: prepares AOTAutograd's joint graph, captures it and prices its ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import OptionWarning
from autoremat.basics.progress import now
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.capture import communication
from autoremat.capture.capture import Capture, capture, device_of_joint, runs_on_type
from autoremat.capture.communication import fingerprint, group_of, replicated_nodes
from autoremat.capture.forms import groups_of_shards, with_forms
from autoremat.capture.pricing import ROOFLINE, Prices
from autoremat.compiler.problem import Problem
from autoremat.measure.calibration import host_link_of
from autoremat.passes import before_capture
from autoremat.passes.insert_transfers import FORMS
from autoremat.planner.constraints.constraints import without_saved_copies
from autoremat.planner.cost.links import Links, assumed_host_link
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import BITS, HOST, SHARDS, Role, Trait
from autoremat.planner.multigraph.ledger import OpenCalls
from autoremat.planner.plans.limits import Share
from autoremat.planner.settings import settings
from autoremat.torch_private import compilers, higher_order, joint_graphs, process_groups
from autoremat.torch_private.autograd import retraces_backwards
from autoremat.torch_private.symbolic_sizes import UNKNOWN_SIZE, data_dependent_sizes
from autoremat.torch_private.tensors import tensors_in


@dataclass(frozen=True)
class JointGraph:
    """A joint graph, with all that AOTAutograd passes to a partitioner."""

    module: fx.GraphModule
    inputs: Sequence[object]
    keywords: Mapping[str, Any]
    chunks: int = 1
    """Number of chunks of the loss."""
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
    """A prepared joint graph of a problem with its capture, in which every op has its seconds."""

    problem: Problem
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
    def gathering_ranks(self) -> frozenset[int]:
        """The ranks that repeat or add gathers together with this one; empty if the plan does neither."""
        ops = zip(self.graph.ops, self.captured.op_nodes, strict=True)
        repeated = {group_of(node) for op, node in ops if Trait.GATHER in op.traits}
        return frozenset().union(*map(process_groups.ranks_of, repeated.union(groups_of_shards(self.captured))))

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
        values = tuple(replace(one, forms=tuple(f for f in one.forms if f.name != SHARDS)) for one in self.graph.values)
        captured = replace(self.captured, graph=replace(self.graph, ops=ops, values=values))
        return replace(self, captured=captured, unused_forms=unused)

    def name_planning(self) -> None:
        """Names the planning of the graph as the present stage."""
        now(f"planning {len(self.graph.ops):,} ops, at most {self.problem.request.options.time_limit:g} s")

    @property
    def share(self) -> Share | None:
        """The graph's share of a step's budget; None for a budget of its own, and for a nested region."""
        return None if self.joint.is_region else self.problem.request.limits.step_share


class Partitioner(joint_graphs.CustomPartitionerFn):
    """Hands the joint graphs of one compilation to ``partition``.

    ``identity`` stands for everything that the result depends on and that torch does not hash itself. None disables torch's
    caches.
    """

    def __init__(
        self, partition: Callable[[JointGraph], joint_graphs.PartitionedModules], identity: tuple[object, ...] | None = None
    ) -> None:
        self.partition: Callable[[JointGraph], joint_graphs.PartitionedModules] | None = partition
        self.identity = identity

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **keywords: Any) -> joint_graphs.PartitionedModules:
        assert self.partition is not None, "called after release"
        return self.partition(JointGraph(gm, joint_inputs, keywords))

    def release(self) -> None:
        """Drops ``partition``, and with it the plans: Inductor's compiled code keeps a reference to the partitioner."""
        self.partition = None

    # Torch copies, prints and hashes the configuration that contains this object. Only its identity matters there.

    def uuid(self) -> Any:
        """Returns the identity."""
        return self.identity

    def __getstate__(self) -> dict[str, Any]:
        return {"identity": self.identity, "partition": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self

    def __repr__(self) -> str:
        return f"Partitioner{self.identity}"


def price_graph(joint: JointGraph, problem: Problem) -> PricedGraph | None:
    """Returns a joint graph prepared for the compiler, captured and with the seconds of its ops; None without a backward."""
    now("reading the joint graph")
    joint_graphs.warn_of_torchs_budgets(joint.module)
    may_repeat = communication.is_gathering if problem.may_repeat_collectives else None
    higher_order.describe_results(joint.module.graph)
    module = joint_graphs.prepare_joint(joint.module, joint.num_forward_outputs, may_repeat)
    before_capture(module, runs_on_type(module, problem.cuda_name) if problem.request.fuses else None)
    return capture_and_price(replace(joint, module=module), problem)


def capture_and_price(joint: JointGraph, problem: Problem) -> PricedGraph | None:
    """Returns the capture of a prepared joint graph, with the seconds of the cost model; None if it has no backward."""
    now("capturing")
    request = problem.request
    links = Links(request.options.interconnect_bandwidth, request.options.interconnect_latency)
    captured = capture(
        joint.module, joint.num_forward_outputs, request.fuses, problem.cuda_name, problem.may_repeat_collectives,
        Prices(request.options.cost_model, links, problem.rates),
    )  # fmt: skip
    if captured.graph.single_phase:
        return None
    graph, aliases = captured.graph, captured.aliases
    _, gradients = joint_graphs.joint_outputs(captured.joint, captured.num_fwd_outputs)  # one for each input of the forward
    of_parameters = {aliases.get(gradients[i]) for i in joint.static_inputs if i < len(gradients) and gradients[i] is not None}
    accumulated = sum(graph.values[value].bytes for value in set(graph.backward_outputs) if value in of_parameters)
    if request.calls != OpenCalls():
        captured = replace(captured, graph=request.calls.of(captured.graph, accumulated))
    sharded = frozenset[int]()
    if problem.sharded_inputs and not joint.is_region:  # the inputs of a region are not Dynamo's
        inputs = joint_graphs.ends_of(joint.module, joint.num_forward_outputs).inputs
        found = (aliases.get(node) for position, node in inputs.items() if position in problem.sharded_inputs)
        sharded = frozenset(value for value in found if isinstance(value, int))
    captured = replace(captured, graph=without_saved_copies(captured.graph, sharded))
    unused: tuple[str, ...] = ()
    if not joint.is_region:  # torch partitions it first, and the surrounding graph saves its results
        captured, unused = with_allowed_forms(captured, problem, links)
    placeholders = joint.module.graph.find_nodes(op="placeholder")
    passed = set(placeholders).difference(placeholders[index] for index in joint.static_inputs)
    values = enumerate(zip(captured.graph.values, captured.value_nodes, strict=True))
    kept = frozenset(number for number, (value, node) in values if value.role is Role.INPUT and node in passed)
    return PricedGraph(problem, joint, captured, kept, accumulated, unused)


def note_on_sizes(graph: fx.Graph) -> str:
    """Returns a note on what the plan of a traced graph assumes of sizes that depend on data; empty without such sizes."""
    values = [node.meta.get("val") for node in graph.nodes]
    numbers = [value for value in values if isinstance(value, torch.SymInt)]
    bounds = data_dependent_sizes([*tensors_in(values), *numbers])
    if not bounds:
        return ""
    if None in bounds.values():
        free = list(bounds.values()).count(None)
        return (
            f"sizes that depend on data, {free} of them without a bound, are assumed to be "
            f"at most {UNKNOWN_SIZE}: state a bound in the function, torch._check(size <= ...)"
        )
    most = max(bound or 0 for bound in bounds.values())
    return (
        f"sizes that depend on data count at their upper bounds, up to {most}: torch._check(size <= ...) in the function "
        "states a lower one"
    )


# -- forms of saved tensors ------------------------------------------------------------------------------------------------


def with_allowed_forms(captured: Capture, problem: Problem, gathers: Links) -> tuple[Capture, tuple[str, ...]]:
    """Returns ``captured`` with the forms of its values. For each form asked for that none has, returns option and reason.

    ``gathers`` are the links between the ranks.
    """
    request, card, link = problem.request, problem.cuda_name, problem.host_link
    possible = request.forms & FORMS.keys()
    if not possible:
        return captured, ()
    now("listing the forms of saved tensors")
    why = dict[str, str]()
    if setting := refused_setting(captured):
        why = dict.fromkeys((HOST, BITS, SHARDS), f"the code cannot carry out under {setting} what it takes")
    else:
        if HOST in possible:
            device = device_of_joint(captured.joint)
            link = link or (assumed_host_link(card) if card else host_link_of(device, request.options.cost_model != ROOFLINE))
            if link is None:
                why[HOST] = f"{captured.device.name} has no memory apart from the host's, so a copy would free none"
        if SHARDS in possible and not problem.may_repeat_collectives:
            why[SHARDS] = "its ranks plan apart, and only those that follow one plan can gather together"
        replicated = replicated_nodes(captured.joint.graph) if SHARDS in possible else {}
        captured = with_forms(captured, possible, link, replicated, gathers if problem.may_repeat_collectives else None)
    least, found = format_bytes(settings.least_form_bytes), {form.name for v in captured.graph.values for form in v.forms}
    store = request.options.store or ()
    options = {HOST: "host_memory"} | {name: f"store={name!r}" for name in (BITS, SHARDS) if name in store}
    usual = {
        HOST: f"no result of the forward that could be kept there has at least {least}",
        BITS: f"no result of the forward that could be packed is a mask of at least {least}",
        SHARDS: f"no result of the forward of at least {least} is known to be equal on all ranks of a group and divides among "
        "them: results of an all-reduce are, and what follows from these alone, element by element",
    }
    unused = [name for name in options if name in request.forms and name not in found]
    return captured, tuple(f"{options[name]} has no effect on a graph: {why.get(name, usual[name])}" for name in unused)


def refused_setting(captured: Capture) -> str:
    """Returns the present setting of Inductor under which code of the graph cannot carry out stays; empty if it can."""
    if retraces_backwards():
        return "compiled autograd (torch._dynamo.config.compiled_autograd)"
    if not captured.graph.machine.fuses:
        return ""
    if captured.runs_on == "cuda" and compilers.records_cuda_graphs():
        return 'CUDA graphs (mode="reduce-overhead", triton.cudagraphs)'
    return "a wrapper in C++ (cpp_wrapper)" if compilers.writes_wrapper_in_cpp() else ""


def warn_of_unused_forms(unused: Sequence[str]) -> None:
    """Warns with ``OptionWarning`` of each option in ``unused``, which states the reason why it has no effect."""
    for text in unused:
        warn_user(text, OptionWarning)
