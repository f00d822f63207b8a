"""What a call may do and what it costs: what torch says of it (:mod:`autoremat.ops.op_traits`), what its user declares
(:mod:`autoremat.ops.declarations`), and, for a higher-order op, what its bodies do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat.ops import declarations, op_traits
from autoremat.planner.graph.graph import Kind, Trait
from autoremat.torch_private import compat, higher_order
from autoremat.workspaces.formulas import (
    channels_last_workspace,
    estimated_bytes,
    excess_bytes,
    layouts_under_inductor,
    workspace_bytes,
)


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs of one call, bytes that it reads and writes, and those that it allocates beside its results and frees again."""

    flops: int
    moved_bytes: int
    workspace_bytes: int
    excess_bytes: int = 0
    """Bytes by which the results take more memory than their sizes say."""
    unknown: frozenset[str] = frozenset()
    """Kernels whose workspace is not known, by name; what is counted of them is an estimate, or nothing."""


def traits_of(node: fx.Node) -> Trait:
    """What ``node`` may not do."""
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


def cost_of(node: fx.Node, device_type: str, runs_on: str, fuses: bool = False) -> Cost:
    """What one call costs, with symbolic sizes at their hints; traced on a device of ``device_type``, to run on one of the type
    ``runs_on``; ``fuses``: under Inductor."""
    args, kwargs = _arguments(node)
    result = node.meta.get("val")
    moved = _tensor_bytes(node) + sum(_tensor_bytes(n) for n in node.all_input_nodes)
    declared = declarations.find(node)
    if declared is not None:
        written = higher_order.written_op(node)
        if written is not None:
            args, kwargs = (), higher_order.written_arguments(written, kwargs)
        flops, workspace = (declarations.amount(a, args, kwargs) for a in (declared.flops, declared.workspace_bytes))
        return Cost(flops, moved, workspace)
    flops = op_traits.flops_of(node, args, kwargs, result)
    bodies = higher_order.bodies(node) if higher_order.name_of(node) in higher_order.RUNS_BODIES else []
    if not bodies:
        found = workspace_of(node, args, kwargs, runs_on, fuses)
        if found is None:
            return Cost(flops, moved, estimated_bytes(node, args, runs_on), 0, frozenset([str(node.target)]))
        excess = 0 if fuses or op_traits.traits_of(node) & NO_KERNEL else excess_bytes(node, args, kwargs, result, runs_on)
        return Cost(flops, moved, found, excess)
    inside = [_cost_of_body(body, device_type, runs_on, fuses) for body in bodies]
    runs = _runs(node, args)
    held = _tensor_bytes(node) if higher_order.name_of(node) in higher_order.HOLDS_RESULTS_TWICE else 0
    return Cost(
        flops or runs * _together(node, [c.flops for c in inside]),
        max(moved, runs * _together(node, [c.moved_bytes for c in inside])),
        max(c.workspace_bytes for c in inside) + held,
        0,
        frozenset().union(*(c.unknown for c in inside)),
    )


NO_KERNEL = Trait.EFFECTFUL | Trait.COLLECTIVE
"""Calls that take no memory of torch's allocator beside their results."""


def workspace_of(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], runs_on: str, fuses: bool) -> int | None:
    """Bytes that the call allocates beside its results and frees again; None if that is not known."""
    traits = op_traits.traits_of(node)
    if traits & NO_KERNEL or higher_order.written_op(node) is not None:
        return 0  # a Triton kernel writes to what it is handed
    if Trait.OPAQUE in traits:
        return None
    result = node.meta.get("val")
    if not fuses:
        return workspace_bytes(node, args, kwargs, result, runs_on)
    if op_traits.kind_of(node, runs_on) is not Kind.EXTERN:
        return 0
    if op_traits.scatters_by_aten(node, runs_on):  # index and source are copied to lie as the result does
        return sum(_tensor_bytes(operand) for operand in node.all_input_nodes[1:])
    found = channels_last_workspace(node, args, runs_on)
    if found is not None:
        return found
    layouts = layouts_under_inductor(node, runs_on)
    sizes = [workspace_bytes(node, args, kwargs, result, runs_on, layout) for layout in layouts]
    known = [size for size in sizes if size is not None]
    return max(known) if len(known) == len(sizes) else None


ARITHMETIC_SHARE = 0.1
"""Of the seconds that a fused pointwise op is charged by its traffic, the part that is left where it moves nothing."""


def traffic_of(node: fx.Node, moved_bytes: int) -> int:
    """Of the bytes that ``node`` reads and writes, those to charge for: a fused pointwise op moves its share of the chain's."""
    return moved_bytes // 3 if op_traits.kind_of(node) is Kind.POINTWISE else moved_bytes


def storage_bytes(tensor: torch.Tensor, device_type: str) -> int:
    """Bytes of the tensor's storage, 0 if it lies on another device."""
    if tensor.device.type != device_type:
        return 0
    try:
        return compat.most(tensor.untyped_storage().nbytes())
    except NotImplementedError:
        return compat.most(tensor.numel()) * tensor.element_size()


def _arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = torch.utils._pytree.tree_map(
        lambda x: x.meta.get("val") if isinstance(x, fx.Node) else x, (node.args, node.kwargs)
    )
    return tuple(args), dict(kwargs)


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    for leaf in torch.utils._pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _tensor_bytes(node: fx.Node) -> int:
    return sum(map(tensor_bytes, _tensors(node)))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements."""
    return compat.most(tensor.numel()) * tensor.element_size()


def _runs(node: fx.Node, args: tuple[Any, ...]) -> int:
    """How often the bodies run; once where only the data decides."""
    position = higher_order.LOOPED_OVER.get(higher_order.name_of(node))
    over = torch.utils._pytree.tree_leaves(args[position]) if position is not None else []
    return compat.size_hint(over[0].shape[0]) if over else 1


def _together(node: fx.Node, amounts: list[int]) -> int:
    """The amount of all bodies: of a branch, the larger."""
    return max(amounts) if higher_order.name_of(node) == "cond" else sum(amounts)


def _cost_of_body(body: fx.GraphModule, device_type: str, runs_on: str, fuses: bool) -> Cost:
    flops = moved = peak = alive = 0
    unknown: frozenset[str] = frozenset()
    born: dict[int, int] = {}
    last_use = _last_uses(body)
    for position, node in enumerate(body.graph.nodes):
        if node.op != "call_function":
            born.update((_key(t), 0) for t in _tensors(node))  # inputs are there anyway
            continue
        cost = cost_of(node, device_type, runs_on, fuses)
        unknown |= cost.unknown
        flops, moved = flops + cost.flops, moved + traffic_of(node, cost.moved_bytes)
        for tensor in _tensors(node):
            if _key(tensor) not in born:
                born[_key(tensor)] = storage_bytes(tensor, device_type)
                alive += born[_key(tensor)]
        peak = max(peak, alive + cost.workspace_bytes)
        for key in {_key(t) for n in (node, *node.all_input_nodes) for t in _tensors(n)}:
            if last_use[key] <= position:
                alive -= born.get(key, 0)
                born[key] = 0
    return Cost(flops, moved, max(0, peak - alive), 0, unknown)  # what is alive at the end are the results


def _key(tensor: torch.Tensor) -> int:
    key = compat.storage_key(tensor)
    return id(tensor) if key is None else key


def _last_uses(body: fx.GraphModule) -> dict[int, int]:
    """For each storage, the position of the last node that holds or reads it."""
    found: dict[int, int] = {}
    for position, node in enumerate(body.graph.nodes):
        for holder in (node, *node.all_input_nodes):
            for tensor in _tensors(holder):
                found[_key(tensor)] = position
    return found
