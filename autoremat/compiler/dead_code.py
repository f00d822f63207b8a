"""Finds the dead code of a graph that Dynamo captured: the nodes that AOTAutograd would drop from it as a whole.

Dynamo's graph is not functional. A node that nobody reads may still change a tensor that others read, or have another effect. A
cut would turn a dead node into a result that a part hands over.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import fx

from autoremat.torch_private import higher_order
from autoremat.torch_private.tensors import storage_key

OPS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)

RUNNING_STATISTICS = ("batch_norm", "instance_norm")
"""Parts of the names of functions that change inputs, which torch does not count as changes in place."""

MODES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")
"""Names of functions that switch modes. A body switches them back at its end."""


def remove_dead_code(module: fx.GraphModule) -> None:
    """Removes the nodes of a captured graph that neither its results nor its effects need."""
    live = live_nodes(module.graph)
    for node in reversed(module.graph.nodes):
        if node not in live:
            module.graph.erase_node(node)
    module.recompile()


def live_nodes(graph: fx.Graph, returns: bool = True) -> set[fx.Node]:
    """Returns the nodes that results and effects of a captured graph need; the effects alone unless it ``returns``.

    A node that changes a tensor is live if that tensor's storage is an input's, or if a later live node touches it.
    """
    live = {node for node in graph.nodes if node.op == "placeholder" or (returns and node.op == "output")}
    storages = {key for node in graph.nodes if node.op in ("placeholder", "get_attr") for key in _storages([node])}
    inputs = frozenset(storages)
    for node in reversed(graph.nodes):
        read = node.op != "output" and not live.isdisjoint(node.users)
        if node in live or read or (node.op != "output" and _acts(node, inputs, storages)):
            live.add(node)
            storages |= _storages([node, *node.all_input_nodes])
    return live


def _acts(node: fx.Node, inputs: frozenset[int], storages: set[int]) -> bool:
    """Returns True if the node has an effect beside its results, or may change one of ``storages``, ``inputs`` among them."""
    if node.op == "get_attr":
        return False
    if getattr(node.target, "__name__", "") == "setitem":
        return not storages.isdisjoint(_storages(node.all_input_nodes[:1]))
    if node.op == "call_module" or not _results(node):
        return True
    if isinstance(node.target, OPS) and node.is_impure(impure_random=False):
        return True
    if any(_has_effects(body.graph) for body in higher_order.bodies(node)):
        return True
    if any(name in getattr(node.target, "__name__", str(node.target)) for name in RUNNING_STATISTICS):
        return not inputs.isdisjoint(_storages(n for n in node.all_input_nodes if not _requires_gradient(n)))
    changed = _storages(node.all_input_nodes, changed=True)
    return not (changed & inputs).isdisjoint(storages) or not (changed & _storages([node])).isdisjoint(storages)


def _has_effects(body: fx.Graph) -> bool:
    needed = (node for node in live_nodes(body, returns=False) if node.op != "placeholder")
    return any(getattr(node.target, "__name__", "") not in MODES for node in needed)


def _results(node: fx.Node) -> list[Any]:
    """Returns the tensors and numbers that a node of a captured graph makes."""
    value = node.meta.get("example_value")
    return [one for one in torch.utils._pytree.tree_leaves(value) if one is not None]


def _requires_gradient(node: fx.Node) -> bool:
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in _results(node))


def _storages(nodes: Iterable[fx.Node], changed: bool = False) -> set[int]:
    """Returns the storages of the results of ``nodes``; of those alone that the graph changes in place if ``changed``."""
    tensors = (one for one in chain.from_iterable(map(_results, nodes)) if isinstance(one, torch.Tensor))
    return {storage_key(tensor) for tensor in tensors if tensor._version or not changed}
