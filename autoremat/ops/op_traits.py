"""Facts about calls of ops: views, randomness, mutation and effects, fusion, FLOPs, reductions, batch norms.

Each fact has one predicate. It comes from the op's schema and tags where torch declares it, else from the table of facts
(:mod:`autoremat.ops.op_table`).
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autoremat.ops.op_table import OpFacts, facts_of
from autoremat.planner.graph.op import Constraint, Inlining, Kind, Trait
from autoremat.torch_private.joint_graphs import CheckpointPolicy, is_with_effects
from autoremat.torch_private.symbolic_sizes import size_hint

aten = torch.ops.aten

DROPOUT_OF_ATTENTION = "dropout_p"
"""The argument of fused attention's dropout. Attention draws nothing with probability 0, but ``bernoulli`` and
``native_dropout`` draw even then."""

TRAINING_ARGUMENTS = ("train", "training")
"""Arguments that turn an op's draw off if they are False. ``None`` does not turn it off."""

PURE_NAMESPACES = frozenset({"aten", "prims", "quantized_decomposed", "inductor_prims", "torchvision", "_quantized"})
"""Namespaces of ops whose schema and tags describe all their effects."""

COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d"})

ALL_GATHERS = frozenset({"_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_gather_into_tensor_coalesced"})
"""Collectives that may run again: they read one operand per rank and change nothing."""

COLLECTIVES = ALL_GATHERS | {
    "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::reduce_scatter_tensor_coalesced",
    "_c10d_functional::all_reduce", "_c10d_functional::all_reduce_coalesced",
    "_c10d_functional::all_to_all_single", "_c10d_functional::broadcast",
}  # fmt: skip
"""Collectives that write to none of their operands."""

WAITS = frozenset({"_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors"})
"""Ops that wait for a collective and return its results. Torch has the second one since 2.15."""

EFFECTS = frozenset(
    {
        "aten::_assert_scalar", "aten::_assert_async", "aten::_assert_tensor_metadata", "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size", "aten::_print", "aten::_local_scalar_dense", "aten::item",
        "profiler::_record_function_enter_new", "profiler::_record_function_enter", "profiler::_record_function_exit",
    }
)  # fmt: skip

DATA_DEPENDENT = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
"""Torch's tags of ops whose result sizes or result numbers depend on the data."""

BINDS_SIZES = "unbacked_bindings"
"""The ``node.meta`` key of symbols for sizes that only a run of the node determines."""

DRAWS = frozenset({"inductor_random", "inductor_randint"})
"""Names of Inductor's own ops that draw random numbers."""

INDUCTOR_POINTWISE = DRAWS | {"inductor_lookup_seed"}


def packet(node: fx.Node) -> Any:
    """Returns the overload packet that the node calls, or its target."""
    return getattr(node.target, "overloadpacket", node.target)


def facts(node: fx.Node) -> OpFacts:
    """Returns the row of the table for the op that the node calls."""
    return facts_of(packet(node))


def is_pointwise(node: fx.Node) -> bool:
    """Returns True if torch tags the op that the node calls as pointwise."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_view(node: fx.Node) -> bool:
    """Returns True if the schema says that a result aliases an argument without a write to it."""
    target = node.target
    if target is operator.getitem:
        return False
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return any(result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns)


def is_random(node: fx.Node) -> bool:
    """Returns True if a second execution of the node would draw other numbers, or advance the generator further."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    bound = defaults | named_arguments(node)
    probability = bound.get(DROPOUT_OF_ATTENTION)
    if isinstance(probability, (int, float)) and probability == 0:
        return False
    return all(bound.get(name) is not False for name in TRAINING_ARGUMENTS)


def traits_of_op(op: torch._ops.OpOverload) -> Trait:
    """Returns the traits that all calls of ``op`` share, independent of their arguments."""
    traits = Trait.RANDOM if torch.Tag.nondeterministic_seeded in op.tags else Trait.NONE
    if not DATA_DEPENDENT.isdisjoint(op.tags):
        traits |= Trait.DATA_DEPENDENT
    if op._schema.is_mutable:
        traits |= Trait.MUTATING
    if op.namespace in COLLECTIVE_NAMESPACES:
        traits |= Trait.COLLECTIVE
    elif op._schema.name in EFFECTS:
        traits |= Trait.EFFECTFUL
    elif op.namespace not in PURE_NAMESPACES:
        traits |= Trait.OPAQUE
    return traits


def schema_name(node: fx.Node) -> str:
    """Returns the name in the schema of the op that the node calls, such as "aten::mm"; empty if it calls none."""
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of a call of an op, by their names in its schema. Defaults are missing."""
    names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def is_collective(node: fx.Node) -> bool:
    """Returns True if the node is a call to all ranks of a group that writes to none of its operands."""
    return schema_name(node) in COLLECTIVES


def is_wait(node: fx.Node) -> bool:
    """Returns True if the node waits for a collective."""
    return schema_name(node) in WAITS


def chooses(node: fx.Node) -> bool:
    """Returns True if the node selects among several floating-point numbers."""
    read = (n.meta.get("val") for n in node.all_input_nodes)
    return (facts(node).chooses or facts_of(node.target).chooses) and any(
        isinstance(t, torch.Tensor) and t.is_floating_point() for t in read
    )


def traits_of(node: fx.Node) -> Trait:
    """Returns the node's traits, from its target and its arguments alone."""
    target = node.target
    if is_with_effects(node):
        return Trait.EFFECTFUL
    traits = Trait.DATA_DEPENDENT if node.meta.get(BINDS_SIZES) else Trait.NONE
    if isinstance(target, torch._ops.HigherOrderOperator):
        return traits | Trait.OPAQUE
    if not isinstance(target, torch._ops.OpOverload):
        return traits
    traits |= traits_of_op(target) | (Trait.DISCONTINUOUS if chooses(node) or COMPARED in node.meta else Trait.NONE)
    return traits if is_random(node) else traits & ~Trait.RANDOM


def adds_to_product(node: fx.Node) -> bool:
    """Returns True if the node adds to a matrix product that nothing else reads: Inductor merges the two into ``addmm``."""
    if packet(node) is not aten.add:
        return False
    return any(packet(n) is aten.mm and len(n.users) == 1 for n in node.all_input_nodes)


def scatters_by_aten(node: fx.Node, runs_on: str) -> bool:
    """Returns True if the node is a scatter that Inductor leaves to ATen on that device type."""
    return facts(node).adds and runs_on == "cpu" and torch.get_num_threads() > 1


def is_complex(node: fx.Node) -> bool:
    """Returns True if the node reads or returns complex numbers, for which Inductor calls ATen."""
    held = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return any(isinstance(t, torch.Tensor) and t.is_complex() for t in torch.utils._pytree.tree_leaves(held))


def kind_of(node: fx.Node, runs_on: str = "cpu") -> Kind:
    """Returns the way in which Inductor computes the node's result. The device type matters only for scatters."""
    if adds_to_product(node) or scatters_by_aten(node, runs_on) or is_complex(node):
        return Kind.EXTERN
    if (kind := facts(node).kind) is not None:
        return kind
    is_fused = getattr(packet(node), "__name__", "") in INDUCTOR_POINTWISE or is_pointwise(node)
    return Kind.POINTWISE if is_fused else Kind.EXTERN


def stays_in_kernel(node: fx.Node) -> bool:
    """Returns True if recomputing the result inside a fused kernel adds only arithmetic, and no memory traffic."""
    return kind_of(node) is Kind.POINTWISE and not facts(node).moves


MATERIALIZED = "inductor_realize_to_strides"
"""Key of a node's metadata that makes Inductor materialize its result with the traced strides."""

COMPARED = "autoremat_compared"
"""Key of a node's metadata for a value that is compared with a number chosen from it."""


def inlining_of(node: fx.Node, device_type: str) -> Inlining:
    """Returns the rule by which Inductor inlines the node's result into its readers."""
    if getattr(packet(node), "__name__", "") in DRAWS or MATERIALIZED in node.meta:
        return Inlining.NEVER
    return Inlining.ONCE if device_type == "cpu" and facts(node).computed_once else Inlining.CHEAP


def works_in_place(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that have the result's shape and strides and are read at the positions that the node writes."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return []
    if facts(node).scatters:
        candidates = [n for n in node.args[:1] if isinstance(n, fx.Node)]
    elif stays_in_kernel(node):
        candidates = node.all_input_nodes
    else:
        return []
    return [n for n in candidates if _laid_out_alike(n.meta.get("val"), result)]


def _laid_out_alike(operand: Any, result: torch.Tensor) -> bool:
    if not isinstance(operand, torch.Tensor):
        return False
    # Hints are compared, because comparisons of symbolic numbers would add guards.
    mine, wanted = ([size_hint(n) for n in (*t.shape, *t.stride())] for t in (operand, result))
    return mine == wanted


def order_of(node: fx.Node) -> Constraint:
    """Returns the constraint of a checkpoint region or a selective-checkpoint policy on the node."""
    policy = node.meta.get("recompute")
    if policy in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
        return Constraint.RECOMPUTE
    if policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        return Constraint.SAVE
    return Constraint.NONE


def demanded(node: fx.Node) -> bool:
    """Returns True if a selective-checkpoint policy demands the node's recomputation. A checkpoint region only prefers it."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


def without_data(value: Any) -> Any:
    """Replaces (fake) tensors by ``meta`` tensors of the same sizes, and symbolic numbers by their hints."""

    def sized(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            shape, strides = ([size_hint(s) for s in sizes] for sizes in (x.shape, x.stride()))
            return torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")
        return size_hint(x) if isinstance(x, torch.SymInt) else x

    return torch.utils._pytree.tree_map(sized, value)


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, matmuls: int) -> int:
    """The forward needs 2 products of the attention matrix's size, the backward 5 (Dao et al., 2022)."""
    batch, heads, queries, width = (size_hint(s) for s in query.shape)
    keys, value_width = size_hint(key.shape[2]), size_hint(value.shape[3])
    return matmuls * batch * heads * queries * keys * (width + value_width)


def _convolution_backward_flops(
    gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *arguments: Any, **_: Any
) -> int:
    """Torch's own formula counts the weight's gradient as if there were one group."""
    transposed, wanted = arguments[4], arguments[-1]
    positions = (image if transposed else gradient).shape
    per_position = [size_hint(size) for size in weight.shape[1:]]
    return 2 * math.prod(map(size_hint, positions)) * math.prod(per_position) * sum(map(bool, wanted[:2]))


FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: _attention_flops(q, k, v, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, v, *__, **___: _attention_flops(q, k, v, 5),
    aten.convolution_backward: _convolution_backward_flops,
}
"""FLOPs of ops for which torch has no formula, or a wrong one, by the arguments of the call."""


def flops_of(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Returns the FLOPs of the call with (fake) tensors; 0 without a formula: then bytes determine its time."""
    name = packet(node)
    if name in FORMULAS:
        return FORMULAS[name](*args, **kwargs)
    formula = flop_registry.get(name)
    if formula is None:
        return 0
    return int(formula(*without_data(args), **without_data(kwargs), out_val=without_data(result)))


LONG_ROW = 8192
"""Most elements of a row that one block reduces if there are few rows (`reduction_split_factor` in Inductor's `choices.py`)."""

FEW_ROWS = 2
"""Rows per multiprocessor from which each row has one block, however long it is."""


def ends_pass(node: fx.Node, multiprocessors: int) -> bool:
    """Returns True if a kernel that reads the operands of ``node`` knows its result only at the end.

    A kernel that reduces rows has each row in the cache when its result is known, and goes on with both. What depends on the
    result of one of these runs in another kernel, which reads the operand again:

    - A reduction over dimensions that are not the innermost in memory, such as the statistics of a batch norm.
    - A reduction of few long rows. Inductor divides each among several blocks, and another kernel combines their results.
    - A scatter.
    """
    known = facts(node)
    if known.scatters or not known.reduces:
        return known.scatters
    operand = node.all_input_nodes[0].meta["val"]
    reduced = _reduced(node, operand)
    sizes, strides = ([size_hint(number) for number in numbers] for numbers in (operand.shape, operand.stride()))
    rows = math.prod(size for dimension, size in enumerate(sizes) if dimension not in reduced)
    length = math.prod(size for dimension, size in enumerate(sizes) if dimension in reduced)
    steps = {dimension: stride for dimension, stride in enumerate(strides) if stride and sizes[dimension] > 1}
    innermost = min((stride for dimension, stride in steps.items() if dimension not in reduced), default=math.inf)
    return any(steps.get(dimension, 0) > innermost for dimension in reduced) or (
        rows < FEW_ROWS * multiprocessors and length > LONG_ROW
    )


def _reduced(node: fx.Node, operand: torch.Tensor) -> set[int]:
    named = named_arguments(node)
    if "normalized_shape" in named:
        return set(range(operand.dim() - len(named["normalized_shape"]), operand.dim()))
    chosen: Any = named.get("dim", named.get("dims"))
    return {one % max(1, operand.dim()) for one in ([chosen] if isinstance(chosen, int) else chosen or range(operand.dim()))}


BATCH_NORM_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
BATCH_NORM_RESULTS = 3
"""Number of results that a second run has: the normalized input, and the mean and deviation of the batch."""


def averages_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the running averages, inputs of the graph, that a second run of the node need not read; none for any other op.

    In training, the results do not depend on the averages. The step has overwritten them by the second run, which must not move
    them again. The types of mean and deviation follow the averages' if the input has another type and there is no weight.
    """
    if node.target is not aten._native_batch_norm_legit_functional.default or len(node.args) != len(BATCH_NORM_ARGUMENTS):
        return ()
    given = dict(zip(BATCH_NORM_ARGUMENTS, node.args, strict=True))
    averages = (given["running_mean"], given["running_var"])
    types = {read.meta["val"].dtype for read in (given["input"], *averages) if isinstance(read, fx.Node)}
    if given["training"] is not True or (len(types) > 1 and given["weight"] is None):
        return ()
    found = tuple(average for average in averages if isinstance(average, fx.Node) and average.op == "placeholder")
    return found if len(found) == len(averages) else ()


def forget_averages(call: fx.Node) -> None:
    """Makes ``call``, a copy of a batch norm, a call that neither reads nor moves the running averages."""
    given: dict[str, Any] = dict(zip(BATCH_NORM_ARGUMENTS, call.args, strict=True))
    call.target = aten._native_batch_norm_legit.no_stats
    call.args = tuple(value for name, value in given.items() if not name.startswith("running"))
    call.meta["val"] = call.meta["val"][:BATCH_NORM_RESULTS]
