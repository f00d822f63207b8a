"""Finds the values that are equal on all ranks of a process group, such as the residual stream of a tensor-parallel model.

| node | replicated over |
|---|---|
| all-reduce with its wait | its group: every rank receives the same bits |
| a constant tensor, such as ``full`` | every group |
| a view, or a pointwise op that draws nothing | the groups over which all its operands are |
| anything else: inputs, random draws, partial sums, reductions | none |

A claim that is wrong would give a wrong gradient, so what the graph does not prove is not claimed. Inputs are not: the graph of
one rank does not show those of the others. Numbers in the graph may be those of a rank, so ranks compare :func:`fingerprint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autoremat.ops import op_traits
from autoremat.ops.collectives import group_of

aten = torch.ops.aten

Replicated = Mapping[fx.Node, tuple[str, ...]]
"""The replicated nodes of a graph, each with the names of the groups over which it is, in the sequence of the graph."""

UNTAGGED = frozenset({aten._to_copy.default, aten._unsafe_view.default, aten.full.default, aten.scalar_tensor.default})
"""Ops with neither torch's tag for pointwise ops nor a view's schema, which compute no more than such ops do."""


def replicated_nodes(graph: fx.Graph) -> Replicated:
    """Returns the nodes of a joint graph that are replicated over the ranks of a group."""
    every = tuple(dict.fromkeys(group_of(node) for node in graph.nodes if _is_all_reduce(node)))
    found: dict[fx.Node, tuple[str, ...]] = {}
    for node in graph.nodes if every else ():
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            if not found.keys().isdisjoint(node.all_input_nodes):
                return {}  # a write changes all views of a storage
        elif groups := _groups(node, found, every):
            found[node] = groups
    return found


def fingerprint(replicated: Replicated) -> str:
    """Returns a hash of what the replicated nodes compute. It is the same on all ranks of a group, except for a wrong claim.

    It leaves out the names of groups, which differ between the groups of a mesh.
    """
    number = {node: position for position, node in enumerate(replicated)}
    groups = {group: position for position, group in enumerate(dict.fromkeys(g for one in replicated.values() for g in one))}
    lines = []
    for node, own in replicated.items():
        value = node.meta["val"]
        arguments = () if _is_all_reduce(node) else tree_leaves((node.args, node.kwargs))
        read = [number.get(one, one.type if isinstance(one, torch.device) else one) for one in arguments]
        over = [groups[group] for group in own]
        lines.append(f"{node.target} {read} {value.dtype} {tuple(value.shape)} {value.stride()} {over}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _groups(node: fx.Node, found: Replicated, every: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the groups of ``every`` over which the node is replicated. ``found`` has the replicated nodes before it."""
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return ()
    if _is_all_reduce(node):
        return (group_of(node),)
    tags = node.target.tags
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    if not (is_pointwise or node.target in UNTAGGED or op_traits.is_wait(node) or op_traits.is_view(node)):
        return ()
    operands = [found.get(operand, ()) for operand in node.all_input_nodes]
    return tuple(group for group in every if all(group in groups for groups in operands))


def _is_all_reduce(node: fx.Node) -> bool:
    return op_traits.is_collective(node) and node.target._schema.name == "_c10d_functional::all_reduce"  # type: ignore[union-attr]
