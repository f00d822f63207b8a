"""Finds collectives, and the nodes that belong to one: the call, the unpackings of its results, and the waits for them.

A collective returns before its results are complete. The wait for a result returns the same memory, complete. Call and waits
are one op of the graph, so a plan repeats all of them or none, and no incomplete result crosses into the backward. Its seconds
are those of its process group's interconnect.

        shard ── all_gather_into_tensor ── wait_tensor ── view ── mm
                 '----------- one op -------------'

Also finds the values that are equal on all ranks of a process group, such as the residual stream of a tensor-parallel model.

| node | replicated over |
|---|---|
| all-reduce with its wait | its group: every rank receives the same bits |
| a constant tensor, such as ``full`` | every group |
| a view, or a pointwise op that draws nothing | the groups over which all its operands are |
| anything else: inputs, random draws, partial sums, reductions | none |

A claim that is wrong would give a wrong gradient, so what the graph does not prove is not claimed. Inputs are not: the graph of
one rank does not show those of the others. Numbers in the graph may be those of a rank, so ranks compare :func:`fingerprint`.
"""

import hashlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from autoremat.ops import op_traits
from autoremat.planner.cost.links import Interconnect, Links, Pattern, sent_bytes, steps_of
from autoremat.torch_private import joint_graphs, process_groups
from autoremat.torch_private.tensors import tensor_bytes, tensors_in


def awaited_call(wait: fx.Node) -> fx.Node | None:
    """Returns the collective that ``wait`` completes as part of one op; None if the two stay ops of their own.

    They stay apart if another node reads an incomplete result, if a result is awaited twice, or if the two belong to different
    halves of the step.
    """
    if not op_traits.is_wait(wait) or not wait.all_input_nodes:
        return None
    calls = {unpacked(operand) for operand in wait.all_input_nodes}
    call = calls.pop()
    return call if not calls and _is_awaited_once(call) else None


def is_gathering(node: fx.Node) -> bool:
    """Returns True if the node belongs to an all-gather that is one op with its waits."""
    call = awaited_call(node) if op_traits.is_wait(node) else node
    return call is not None and op_traits.schema_name(call) in op_traits.ALL_GATHERS and bool(waits_for(call))


def waits_for(call: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the waits that are one op with the collective ``call``; empty for any other call."""
    found = (node for holder in _results(call) for node in holder.users if op_traits.is_wait(node))
    return tuple(dict.fromkeys(found)) if _is_awaited_once(call) else ()


def _is_awaited_once(call: fx.Node) -> bool:
    if not op_traits.is_collective(call):
        return False
    readers = [node for holder in _results(call) for node in holder.users if node.target is not operator.getitem]
    awaits = [node for node in readers if op_traits.is_wait(node)]
    return (
        bool(awaits)
        and len(awaits) == len(readers)
        and all(len(holder.users) <= 1 for holder in _results(call) if isinstance(holder.meta.get("val"), torch.Tensor))
        and all(unpacked(operand) is call for node in awaits for operand in node.all_input_nodes)
        and all(joint_graphs.is_traced_in_backward(node) == joint_graphs.is_traced_in_backward(call) for node in awaits)
    )


def _results(call: fx.Node) -> Iterator[fx.Node]:
    """Yields the call and all unpackings of its results."""
    yield call
    for user in call.users:
        if user.target is operator.getitem:
            yield from _results(user)


def unpacked(node: fx.Node) -> fx.Node:
    """Returns the call whose (nested) result ``node`` unpacks."""
    while node.target is operator.getitem and isinstance(source := node.args[0], fx.Node):
        node = source
    return node


def may_communicate(gm: fx.GraphModule) -> bool:
    """Returns True if Dynamo's graph, or one inside of it, has a collective or a tensor subclass, which may bring collectives.

    Collectives of hooks, as those of DistributedDataParallel, lie outside of the graph.
    """
    bodies = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for node in (node for graph in bodies for node in graph.nodes):
        target: Any = node.target
        namespace = getattr(target, "namespace", None) or str(getattr(target, "_qualified_op_name", "")).partition("::")[0]
        value = node.meta.get("example_value")
        if (
            namespace in op_traits.COLLECTIVE_NAMESPACES
            or str(getattr(target, "__module__", "")).startswith("torch.distributed")
            or any(map(is_traceable_wrapper_subclass, value if isinstance(value, list | tuple) else (value,)))
        ):
            return True
    return False


GLOO_THREADS = 2
"""Threads of a gloo group, each of which works on one collective."""


def seconds_of(node: fx.Node, links: Links, device: str) -> tuple[Interconnect, float] | None:
    """Returns the interconnect of a collective and its seconds there; None for any other node.

    The number of ranks is an argument of the call, else that of the group. The larger of operands and results counts: a gather
    has few bytes before and all of them after, a reduce-scatter the other way round.
    """
    if not op_traits.is_collective(node):
        return None
    ranks = op_traits.named_arguments(node).get("group_size")
    ranks = ranks if isinstance(ranks, int) else process_groups.size_of(group_of(node))
    pattern = Pattern.REDUCE if "all_reduce" in op_traits.schema_name(node) else Pattern.GATHER
    sent = sent_bytes(pattern, max(_sizes(node)), ranks)
    link = links.of(ranks, device)
    return link, link.seconds(sent, steps_of(pattern, ranks))


def workspace_bytes(node: fx.Node, runs_on: str) -> int:
    """Returns the bytes that a collective allocates beside its results until they are complete; 0 on accelerators.

    On CPUs, gloo gathers into one buffer and copies it into the results. It reduces and scatters a copy of the operands.
    Several operands of one call become one buffer first.
    """
    if copies_nothing(group_of(node), runs_on):
        return 0
    name, (read, made) = op_traits.schema_name(node), _sizes(node)
    if "reduce_scatter" in name:
        return read
    joined = read if len(node.all_input_nodes) > 1 else 0
    return joined + (made if "all_gather" in name else 0)


def copies_nothing(group: str, runs_on: str) -> bool:
    """Returns True if the collectives of a process group need no memory beside their results."""
    return runs_on != "cpu" or process_groups.is_fake(group)


def held_bytes(node: fx.Node, runs_on: str) -> int:
    """Returns the bytes that a collective holds for a moment after its wait; 0 on accelerators.

    A thread of gloo reports that it is done before it lets go of the operands, of the results and of its own buffers.
    """
    if not op_traits.is_collective(node) or copies_nothing(group_of(node), runs_on):
        return 0
    return sum(_sizes(node)) + workspace_bytes(node, runs_on)


def group_of(node: fx.Node) -> str:
    """Returns the name of the process group of a collective."""
    return process_groups.name_of(op_traits.named_arguments(node).get("group_name"))


def _sizes(node: fx.Node) -> tuple[int, int]:
    """Returns the bytes of the operands of a collective, and those of its results."""
    read, made = tensors_in([operand.meta.get("val") for operand in node.all_input_nodes]), tensors_in(node.meta.get("val"))
    return sum(map(tensor_bytes, read)), sum(map(tensor_bytes, made))


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
