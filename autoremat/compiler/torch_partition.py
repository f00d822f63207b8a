"""Turns torch's own partitions of a joint graph into plans, so that their simulated peaks and costs can be compared."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.capture.capture import Capture
from autoremat.planner.graph.op import Trait
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.plans.plan import Plan
from autoremat.torch_private import fake_tensors

log = logging.getLogger("autoremat")

RANDOM_STATE = re.compile(r"(?:graphsafe_)?run_(?:and_save|with)_rng_state(?:_(\d+))?")
"""Names that torch gives to recomputed random ops, attention among them. The number counts them in the joint graph's
sequence."""


def schedule_of_partition(captured: Capture, *halves: fx.GraphModule) -> Schedule:
    """Returns the ops that forward and backward execute, in their sequence.

    Nodes keep their names from the joint graph, except for recomputed random ops, which are matched by number.
    """
    number = {node.name: index for index, node in enumerate(captured.op_nodes)}
    # Only calls count: a saved tensor is a placeholder of the backward with its op's name.
    called = [[node.name for node in half.graph.nodes if node.op == "call_function"] for half in halves]
    kept = {name for names in called for name in names}
    repeated = [node.name for node in captured.op_nodes if node.name not in kept
                and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]  # fmt: skip

    def own(name: str) -> str:
        match = RANDOM_STATE.fullmatch(name)
        place = int(match[1] or 0) if match else len(repeated)
        return repeated[place] if place < len(repeated) else name

    forward, backward = (tuple(number[name] for name in map(own, names) if name in number) for names in called)
    return Schedule(forward, backward)


def plan_of_partition(captured: Capture, forward: fx.GraphModule, backward: fx.GraphModule) -> Plan:
    """Returns a partition as a plan.

    Raises ``PlanInvalid`` if the simulator cannot follow the partition. Also raises it if the partition recomputes an op that
    reads an input that the forward overwrites. Autograd refuses such a backward.
    """
    plan = Plan.of(captured.graph, schedule_of_partition(captured, forward, backward), "torch")
    repeated = (captured.graph.ops[op] for op in plan.recomputed)
    if refused := [op.name for op in repeated if Trait.READS_MUTATED_INPUT in op.traits]:
        raise PlanInvalid(f"{refused[0]} reads an input that the forward overwrites, and runs again: its backward would fail")
    return plan


def torchs_plan(captured: Capture, joint_inputs: Sequence[object], keywords: Mapping[str, Any]) -> Plan | None:
    """Returns torch's partition without a budget as a plan, which need not be valid; None if it cannot be determined.

    It may recompute what reads an input that the forward overwrites, such as a batch norm in a checkpointed region.
    """
    try:
        halves = fake_tensors.partition_for(1.0, captured.joint, joint_inputs, keywords)
        return Plan.of(captured.graph, schedule_of_partition(captured, *halves), "torch")
    except Exception as error:  # both are open-ended, and this is only a comparison
        log.info("no partition of torch's to compare with", exc_info=error)
        return None
