"""The traits and the cost of a call.

They come from torch's description of the op (:mod:`autoremat.ops.op_traits`), from users' declarations
(:mod:`autoremat.ops.declarations`), and, for a higher-order op, from its bodies.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat.capture import communication
from autoremat.capture.pricing import FUSED_SHARE
from autoremat.ops import declarations, op_traits
from autoremat.planner.graph.op import Kind, Trait
from autoremat.torch_private import higher_order, symbolic_sizes
from autoremat.torch_private.tensors import storage_bytes, storage_key, tensor_bytes, tensors_in
from autoremat.workspaces.formulas import (
    channels_last_workspace,
    estimated_bytes,
    excess_bytes,
    layouts_under_inductor,
    workspace_bytes,
)
from autoremat.workspaces.measurement import arguments


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one call: FLOPs, bytes read and written, and bytes of workspace."""

    flops: int
    moved_bytes: int
    workspace_bytes: int
    excess_bytes: tuple[int, ...] = ()
    """For each new result, the bytes of its memory above its size. Results behind the last one have none."""
    unknown: frozenset[str] = frozenset()
    """Names of kernels with unknown workspaces. For these, the cost contains an estimate, or 0."""


def traits_of(node: fx.Node) -> Trait:
    """Returns the traits of ``node``, including those of a higher-order op's bodies."""
    traits = op_traits.traits_of(node)
    if Trait.OPAQUE not in traits:
        return traits
    if declarations.find(node) is not None:
        return traits & ~Trait.OPAQUE
    if higher_order.name_of(node) not in higher_order.RUNS_BODIES:
        return traits
    found = traits & ~Trait.OPAQUE
    for body in higher_order.bodies(node):
        for inner in body.graph.nodes:
            found |= traits_of(inner) if inner.op == "call_function" else Trait.NONE
    return found


def cost_of(node: fx.Node, device_type: str, runs_on: str, fuses: bool) -> Cost:
    """Returns the cost of one call, with symbolic sizes at their hints.

    The call was traced on a device of ``device_type`` and will run on one of type ``runs_on``. ``fuses`` is True under
    Inductor.
    """
    args, kwargs = arguments(node)
    result = node.meta.get("val")
    moved = _tensor_bytes(node) + sum(_tensor_bytes(n) for n in node.all_input_nodes)
    declared = declarations.find(node)
    if declared is not None:
        written = higher_order.written_op(node)
        if written is not None:
            args, kwargs = (), higher_order.written_arguments(written, kwargs)
        flops, workspace = (declarations.amount(a, args, kwargs) for a in (declared.flops, declared.workspace_bytes))
        return Cost(flops, moved, workspace)
    if higher_order.name_of(node) in higher_order.RUNS_BODIES and higher_order.bodies(node):
        return _simulated(node, args, moved, device_type, runs_on, fuses)
    flops = op_traits.flops_of(node, args, kwargs, result)
    found = workspace_of(node, args, kwargs, runs_on, fuses)
    if found is None:
        return Cost(flops, moved, estimated_bytes(node, args, runs_on), (), frozenset([str(node.target)]))
    excess = () if fuses or op_traits.traits_of(node) & NO_KERNEL else excess_bytes(node, args, kwargs, result, runs_on)
    return Cost(flops, moved, found, excess)


NO_KERNEL = Trait.EFFECTFUL | Trait.COLLECTIVE
"""Traits of calls that take no memory from torch's allocator beside their results, collectives on CPUs aside."""


def workspace_of(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], runs_on: str, fuses: bool) -> int | None:
    """Returns the bytes of the call's workspace; None if it is unknown."""
    traits = op_traits.traits_of(node)
    if op_traits.is_collective(node):
        return communication.workspace_bytes(node, runs_on)
    if traits & NO_KERNEL or higher_order.triton_kernel(node) is not None:
        return 0  # a Triton kernel writes into buffers that it is given
    if Trait.OPAQUE in traits:
        return None
    result = node.meta.get("val")
    if not fuses:
        return workspace_bytes(node, args, kwargs, result, runs_on)
    if op_traits.kind_of(node, runs_on) is not Kind.EXTERN:
        return 0
    if op_traits.scatters_by_aten(node, runs_on):  # index and source are copied into the result's layout
        return sum(_tensor_bytes(operand) for operand in node.all_input_nodes[1:])
    found = channels_last_workspace(node, args, runs_on)
    if found is not None:
        return found
    layouts = layouts_under_inductor(node, runs_on)
    sizes = [workspace_bytes(node, args, kwargs, result, runs_on, layout) for layout in layouts]
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(sizes) else None


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return tensors_in(node.meta.get("val"))


def _tensor_bytes(node: fx.Node) -> int:
    return sum(map(tensor_bytes, _tensors(node)))


def _simulated(node: fx.Node, args: tuple[Any, ...], moved: int, device_type: str, runs_on: str, fuses: bool) -> Cost:
    """Returns the cost of a higher-order op from those of its bodies, with a bound on the memory that it holds beside them."""
    inside = [_cost_of_body(body, device_type, runs_on, fuses) for body in higher_order.bodies(node)]
    runs, together = _runs(node, args), max if higher_order.name_of(node) == "cond" else sum  # one of the branches runs
    flops = op_traits.flops_of(node, args, {}, node.meta.get("val"))
    return Cost(
        flops or runs * together(c.flops for c in inside),
        max(moved, runs * together(c.moved_bytes for c in inside)),
        max(c.workspace_bytes for c in inside) + _held_beside_bodies(node, args, fuses),
        (),
        frozenset().union(*(c.unknown for c in inside)),
    )


def _held_beside_bodies(node: fx.Node, args: tuple[Any, ...], fuses: bool) -> int:
    """Returns a bound on the bytes that a higher-order op holds beside its results and a run of its bodies."""
    name, results = higher_order.name_of(node), _tensor_bytes(node)
    if fuses:
        return results if name in higher_order.HOLDS_RUNS else 0
    if name in higher_order.EAGER_ATTENTION:
        query, key = args[:2]
        sides = (*query.shape[:3], key.shape[2])
        scores: int = math.prod(map(symbolic_sizes.size_hint, sides)) * max(4, query.element_size())
        return scores * higher_order.EAGER_ATTENTION[name]
    if name != "scan":
        return results * higher_order.HOLDS_RESULTS.get(name, 0)
    (body,) = higher_order.bodies(node)
    returned = higher_order.results_of(body)
    slices = sum(tensor_bytes(tensor) for tensor in args[2]) // max(1, _runs(node, args))
    stacked = returned[len(args[1]) :]
    elements = sum(symbolic_sizes.size_hint(tensor.numel()) for tensor in stacked)
    first = slices + sum(map(tensor_bytes, stacked))  # from torch 2.14 on, those of the first run live as long as the loop
    return first + 2 * sum(map(tensor_bytes, returned)) + higher_order.INDEX_BYTES * elements


def _runs(node: fx.Node, args: tuple[Any, ...]) -> int:
    """Returns the number of runs of the bodies; 1 if only the data determines it."""
    position = higher_order.LOOPED_OVER.get(higher_order.name_of(node))
    over = torch.utils._pytree.tree_leaves(args[position]) if position is not None else []
    return symbolic_sizes.size_hint(over[0].shape[0]) if over else 1


def _cost_of_body(body: fx.GraphModule, device_type: str, runs_on: str, fuses: bool) -> Cost:
    flops = moved = peak = live = 0
    unknown: frozenset[str] = frozenset()
    born: dict[int, int] = {}
    uses = ((position, holder) for position, node in enumerate(body.graph.nodes) for holder in (node, *node.all_input_nodes))
    last_use = {storage_key(tensor): position for position, holder in uses for tensor in _tensors(holder)}
    for position, node in enumerate(body.graph.nodes):
        if node.op != "call_function":
            born.update((storage_key(t), 0) for t in _tensors(node))  # inputs exist anyway
            continue
        cost = cost_of(node, device_type, runs_on, fuses)
        unknown |= cost.unknown
        share = FUSED_SHARE if fuses and op_traits.kind_of(node) is Kind.POINTWISE else 1
        flops, moved = flops + cost.flops, moved + cost.moved_bytes // share
        excess = iter(cost.excess_bytes)
        for tensor in _tensors(node):
            if storage_key(tensor) not in born:
                born[storage_key(tensor)] = storage_bytes(tensor, device_type) + next(excess, 0)
                live += born[storage_key(tensor)]
        peak = max(peak, live + cost.workspace_bytes)
        for key in {storage_key(t) for n in (node, *node.all_input_nodes) for t in _tensors(n)}:
            if last_use[key] <= position:
                live -= born.get(key, 0)
                born[key] = 0
    return Cost(flops, moved, max(0, peak - live), (), unknown)  # the results are still live at the end
