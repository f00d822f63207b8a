"""Splits a rewritten joint graph into the forward and the backward module that AOTAutograd runs.

Saved values cross to the backward as *bases*, from which the backward derives views again. Symbolic numbers that the forward
computes cross beside the tensors. Torch's own extraction finds the values that the backward reads, and puts them into the
sequence that AOTAutograd expects.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from autoremat.capture import communication
from autoremat.capture.capture import Capture
from autoremat.passes.insert_transfers import stored_values
from autoremat.planner.graph.op import Trait
from autoremat.planner.graph.schedule import Schedule
from autoremat.torch_private import joint_graphs


def saved_nodes(capture: Capture, schedule: Schedule) -> list[fx.Node]:
    """Returns the tensors that cross to the backward: saved values, each in its form, and inputs that it reads.

    A stored value crosses beside its form if the backward frees it.
    """
    stored = stored_values(capture.joint)
    holders = [stored.get(v) or capture.value_nodes[v] for v in schedule.saved(capture.graph)]
    holders += [capture.value_nodes[stay.value] for stay in schedule.stays if stay.free >= len(schedule.forward)]
    inputs = [
        n
        for n in capture.joint.graph.find_nodes(op="placeholder")
        if joint_graphs.is_forward_input(n) and isinstance(n.meta.get("val"), torch.Tensor)
    ]
    saved = [*inputs, *(h for h in holders if h is not None)]
    without_check = "saved_tensor_with_no_vc_check"
    for node in saved:
        if any(user.meta.get(without_check) and capture.aliases.get(user) == capture.aliases.get(node) for user in node.users):
            node.meta[without_check] = True
    return saved


def split(capture: Capture, schedule: Schedule, static_inputs: Collection[int]) -> joint_graphs.PartitionedModules:
    """Returns the (forward, backward) modules of ``capture.joint``, which :func:`insert_recomputation` has rewritten.

    ``static_inputs`` are the positions of forward inputs with the same address in every step (parameters and buffers).
    """
    forward_ops, must_run = capture.graph.ops[: capture.graph.num_forward], frozenset(capture.graph.must_run)
    for index, (op, call) in enumerate(zip(forward_ops, capture.op_nodes, strict=False)):
        # The extraction would also run an effect or a random draw in the backward if its operands are there, for example the
        # sizes that an assertion compares. Torch calls an op impure that could draw, even where this call draws nothing.
        if not (index in must_run or Trait.RANDOM in op.traits or call.is_impure()):
            continue
        for node in (call, *communication.waits_for(call)):
            node.meta["partitioner_tag"] = "must_be_in_forward"
    forward_nodes = set(capture.op_nodes[: capture.graph.num_forward])
    symbols, opaque = [], []
    tainted: set[fx.Node] = set()
    for node in capture.joint.graph.nodes:
        if node.op == "call_function" and (
            any(n in tainted for n in node.all_input_nodes) or joint_graphs.is_traced_in_backward(node)
        ):
            tainted.add(node)
        elif node.op == "placeholder" and joint_graphs.is_tangent(node):
            tainted.add(node)
        elif joint_graphs.is_sym_node(node):
            symbols.append(node)
        elif joint_graphs.is_opaque(node) and (node.op == "placeholder" or node in forward_nodes):
            opaque.append(node)
    inputs = [n for n in capture.joint.graph.find_nodes(op="placeholder") if joint_graphs.is_forward_input(n)]
    static = [n for i, n in enumerate(inputs) if i in set(static_inputs)]
    forward, backward = joint_graphs.extract_modules(
        capture.joint, saved_nodes(capture, schedule), symbols, opaque, capture.num_fwd_outputs, static
    )
    return joint_graphs.finish_module(forward, False), joint_graphs.finish_module(backward, True)
