"""The communication of a collective: its process group and ranks, the bytes that each rank sends, and the memory it takes."""

from __future__ import annotations

from typing import Any

from torch import fx

from autoremat.ops import op_traits
from autoremat.planner.cost.links import Interconnect, Links, Pattern, sent_bytes, steps_of
from autoremat.torch_private import process_groups
from autoremat.torch_private.tensors import tensor_bytes, tensors_in

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
    read = sum(_bytes(operand.meta.get("val")) for operand in node.all_input_nodes)
    sent = sent_bytes(pattern, max(read, _bytes(node.meta.get("val"))), ranks)
    link = links.of(ranks, device)
    return link, link.seconds(sent, steps_of(pattern, ranks))


def workspace_bytes(node: fx.Node, runs_on: str) -> int:
    """Returns the bytes that a collective allocates beside its results until they are complete; 0 on accelerators.

    On CPUs, gloo gathers into one buffer and copies it into the results. It reduces and scatters a copy of the operands.
    Several operands of one call become one buffer first.
    """
    if copies_nothing(group_of(node), runs_on):
        return 0
    name, made = op_traits.schema_name(node), _bytes(node.meta.get("val"))
    read = sum(_bytes(operand.meta.get("val")) for operand in node.all_input_nodes)
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
    read = sum(_bytes(operand.meta.get("val")) for operand in node.all_input_nodes)
    return read + _bytes(node.meta.get("val")) + workspace_bytes(node, runs_on)


def group_of(node: fx.Node) -> str:
    """Returns the name of the process group of a collective."""
    return process_groups.name_of(op_traits.named_arguments(node).get("group_name"))


def _bytes(value: Any) -> int:
    return sum(map(tensor_bytes, tensors_in(value)))
