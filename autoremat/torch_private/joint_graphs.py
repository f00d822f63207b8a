"""Torch's private names for joint graphs: AOTAutograd's marks on nodes, and the steps of torch's partitioner."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch import compile_utils, partitioners
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd import utils as aot_utils
from torch._functorch._aot_autograd.utils import is_with_effects as is_with_effects
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch.fx.experimental.proxy_tensor import is_sym_node as is_sym_node
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

from autoremat.basics.errors import ConstraintWarning, OptionWarning
from autoremat.basics.warn import warn_user
from autoremat.torch_private import resolve

PartitionedModules = tuple[fx.GraphModule, fx.GraphModule]

BUDGET_KEY: str | None = resolve("torch.fx.traceback:MEMORY_BUDGET_ANNOTATION_KEY")
"""The key of a ``torch.autograd.graph.region_activation_memory_budget`` among a node's annotations; None without regions."""


is_tangent: Callable[[fx.Node], bool] = aot_utils._is_tangent
"""Returns True if the placeholder holds a gradient that flows into the backward."""

is_traced_in_backward: Callable[[fx.Node], bool] = partitioners._has_tag_is_backward
"""Returns True if the node was traced in autograd's backward."""

is_traced_in_forward: Callable[[fx.Node], bool] = partitioners._has_tag_is_forward
"""Returns True if the node was traced in the model's forward."""


def is_forward_input(node: fx.Node) -> bool:
    """Returns True if the placeholder belongs to the forward: a primal, or the forward's random seed or offset."""
    return bool(aot_utils._is_primal(node) or aot_utils._is_fwd_seed_offset(node))


def must_be_in_forward(node: fx.Node) -> bool:
    """Returns True if the node mutates something in the forward."""
    return node.op == "call_function" and bool(partitioners._must_be_in_forward(node))


def must_be_in_backward(node: fx.Node) -> bool:
    """Returns True if the node is tagged to run in the backward, as mutations there are."""
    return node.op == "call_function" and bool(partitioners._must_be_in_backward(node))


def is_opaque(node: fx.Node) -> bool:
    """Returns True if the node holds an object that is neither a tensor nor a symbolic number; False under torch 2.11."""
    check: Callable[[fx.Node], bool] | None = resolve("torch._functorch.partitioners:is_opaque_node")
    return check is not None and bool(check(node))


def prepare_joint(
    joint: fx.GraphModule, num_fwd_outputs: int, may_repeat: Callable[[fx.Node], bool] | None = None
) -> fx.GraphModule:
    """Returns ``joint`` after the preparation that precedes the decisions of torch's partitioner.

    It removes dead code and merges common subexpressions. It tags the values that must be saved: borders of checkpoint regions,
    collectives, effects and mutations. Collectives that ``may_repeat`` keep the tags of the model.
    """
    joint.graph.eliminate_dead_code()
    returned, gradients = joint_outputs(joint, num_fwd_outputs)
    for node in needed_for(returned):
        if is_traced_in_backward(node):  # Inductor's chunker computes gradients in the forward: its chunks need them there
            node.meta["partitioner_tag"] = "is_forward"
    if functorch_config.cse:
        merge: Callable[..., fx.Graph] = compile_utils.fx_graph_cse
        # Since torch 2.14, a call of the forward is not merged with one of the backward: a model may not want it saved.
        key = resolve("torch._functorch.compile_utils:fx_graph_cse(extra_node_key)")
        joint.graph = merge(joint.graph, **({key: needed_for(gradients).__contains__} if key else {}))
    _run_effects_once(joint)
    if partitioners.has_recomputable_ops(joint):
        joint = partitioners.cleanup_recompute_tags(joint, is_default_partition=False)
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        free = [] if may_repeat is None else [node for node in joint.graph.nodes if may_repeat(node)]
        by_model = {node: node.meta.get("recompute") for node in free}
        partitioners.force_save_collectives(joint)
        for node, policy in by_model.items():
            node.meta["recompute"] = policy
            if policy is None:
                del node.meta["recompute"]
    partitioners.force_save_effectful_ops(joint)
    partitioners.force_save_bw_mutation_src(joint)
    joint.recompile()
    return joint


def needed_for(outputs: Sequence[Any]) -> set[fx.Node]:
    """Returns the nodes that ``outputs`` are or follow from."""
    stack = [node for node in outputs if isinstance(node, fx.Node)]
    needed: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return needed


def _run_effects_once(joint: fx.GraphModule) -> None:
    """Torch 2.15 raises an error for a constraint to recompute an effect; earlier versions fail later."""
    for node in joint.graph.nodes:
        if is_with_effects(node) and node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            warn_user(
                f"a checkpoint policy orders {node.args[1]} to be recomputed, but it has an effect and runs once: its results "
                "are saved. Return MUST_SAVE for it in the policy",
                ConstraintWarning,
            )


def torchs_budget(node: fx.Node) -> float | None:
    """Returns the activation budget that the model gives torch's partitioner for the node's region; None if there is none."""
    custom = node.meta.get("custom")
    return custom.get(BUDGET_KEY) if isinstance(custom, dict) else None


def warn_of_torchs_budgets(joint: fx.GraphModule) -> None:
    """Warns of torch's own activation budgets, in the model or in the configuration: they have no effect."""
    found = {functorch_config.activation_memory_budget, *map(torchs_budget, joint.graph.nodes)}
    given = [budget for budget in found if budget is not None and budget != 1]
    if given:
        warn_user(
            f"torch's activation_memory_budget={', '.join(map(str, sorted(given)))} has no effect under this backend. It is a "
            "share of what the backward reads; memory_budget bounds the step's peak. Set memory_budget in the options instead",
            OptionWarning,
        )


def orders_streams(node: fx.Node) -> bool:
    """Returns True if the node runs on a stream of its own, or orders ops of several streams."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "streams" or (node.meta.get("custom") or {}).get("stream") is not None
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return False
    from torch._inductor.fx_passes.control_dependencies import control_deps

    return target is control_deps


def partition_as_torch_does(joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> PartitionedModules:
    """Returns the forward and the backward of torch's own partitioner, for graphs in which there is nothing to plan."""
    forward, backward = partitioners.min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
    return forward, backward


def joint_outputs(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[list[Any], list[Any]]:
    """Returns the nodes (or constants) that the forward returns, and those that the backward returns."""
    outputs = torch.utils._pytree.arg_tree_leaves(*joint.graph.output_node().args)
    return outputs[:num_fwd_outputs], outputs[num_fwd_outputs:]


def inputs_written_afterwards(joint: fx.GraphModule) -> list[fx.Node]:
    """Returns the inputs whose new values the forward returns.

    AOTAutograd copies the new values into these inputs after the forward. A backward that reads such an input reads the new
    value.
    """
    described = map(_unwrapped, joint.graph.output_node().meta.get("desc", ()))
    written = {_unwrapped(d.mutated_input) for d in described if isinstance(d, descriptors.InputMutationAOTOutput)}
    inputs: list[fx.Node] = joint.graph.find_nodes(op="placeholder")
    return [node for node in inputs if _unwrapped(node.meta.get("desc")) in written]


def _unwrapped(description: Any) -> Any:
    """Returns the description of a tensor for that of a component of it: of a tensor subclass's inner tensor."""
    while (whole := getattr(description, "base", None)) is not None:
        description = whole
    return description


@dataclass(frozen=True)
class Ends:
    """The nodes at the ends of a joint graph, by the positions of the inputs and outputs that Dynamo captured.

    Inputs and outputs without such a position are missing.
    """

    inputs: dict[int, fx.Node]
    outputs: dict[int, fx.Node]
    gradients: tuple[tuple[int | None, fx.Node], ...]
    """Each gradient with the position of its input; None for that of a parameter of the module itself."""


def ends_of(joint: fx.GraphModule, num_fwd_outputs: int) -> Ends:
    """Returns the nodes at the ends of ``joint``."""
    output = joint.graph.output_node()
    nodes = torch.utils._pytree.arg_tree_leaves(*output.args)
    described = list(zip(nodes, output.meta.get("desc", ()), strict=False))
    plain_input, plain_output = descriptors.PlainAOTInput, descriptors.PlainAOTOutput
    placeholders = [(_unwrapped(node.meta.get("desc")), node) for node in joint.graph.find_nodes(op="placeholder")]
    gradients = [
        (d.grad_of.idx if isinstance(d.grad_of, plain_input) else None, node)
        for node, d in described[num_fwd_outputs:]
        if isinstance(d, descriptors.GradAOTOutput) and isinstance(node, fx.Node)
    ]
    return Ends(
        inputs={d.idx: node for d, node in placeholders if isinstance(d, plain_input)},
        outputs={
            d.idx: node for node, d in described[:num_fwd_outputs] if isinstance(d, plain_output) and isinstance(node, fx.Node)
        },
        gradients=tuple(gradients),
    )


def extract_modules(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_opaque: list[fx.Node],
    num_fwd_outputs: int,
    static_lifetime_inputs: Collection[fx.Node],
) -> PartitionedModules:
    """Splits ``joint`` into forward and backward. The saved nodes that the backward reads become outputs of the forward.

    The outputs are in the sequence that AOTAutograd expects.
    """
    opaque = resolve("torch._functorch.partitioners:_extract_fwd_bwd_modules(saved_opaque_nodes)")
    varying: dict[str, Any] = {} if opaque is None else {opaque: saved_opaque}
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint,
        saved,
        saved_sym_nodes=saved_symbols,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=torch.utils._ordered_set.OrderedSet(static_lifetime_inputs),
        **varying,
    )
    return forward, backward


def finish_module(module: fx.GraphModule, is_backward: bool) -> fx.GraphModule:
    """Moves the unpacking of multi-output ops right behind the op, and passes random states to nested regions."""
    module = compile_utils.raise_getitems(module)
    return partitioners.thread_graphsafe_rng_from_hops(module, is_backward=is_backward)
