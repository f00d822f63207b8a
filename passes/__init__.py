"""The FX-to-FX passes in the sequence in which they run: before capture, with the plan. See README.md here."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.capture.capture import Capture
from autoremat.passes.ignore_running_averages import ignore_running_averages
from autoremat.passes.inductor_workarounds.accumulate_gradients import accumulate_into_first as accumulate_into_first
from autoremat.passes.inductor_workarounds.forward_region_operands import forward_region_operands as forward_region_operands
from autoremat.passes.inductor_workarounds.keep_compared import keep_compared as keep_compared
from autoremat.passes.inductor_workarounds.layout_copies import state_layout_copies as state_layout_copies
from autoremat.passes.inductor_workarounds.materialize_shared import materialize_shared as materialize_shared
from autoremat.passes.inductor_workarounds.preserve_strides import preserve_strides as preserve_strides
from autoremat.passes.insert_recompute import insert_recomputation
from autoremat.passes.insert_transfers import insert_stores
from autoremat.passes.pipeline import Pass, run_passes
from autoremat.passes.split import split
from autoremat.planner.graph.schedule import Schedule
from autoremat.torch_private import compilers, joint_graphs


def before_capture(joint: fx.GraphModule, runs_on: str | None) -> None:
    """Rewrites a joint graph in place before its capture.

    ``runs_on`` is the type of the graph's device under Inductor, such as "cuda", and None without Inductor.
    """
    passes: list[Pass] = [forward_region_operands, ignore_running_averages]
    if runs_on is not None:
        passes += [accumulate_into_first, keep_compared]
    if runs_on is not None and compilers.lays_channels_last(runs_on):
        passes.append(state_layout_copies)
    run_passes(joint, *passes)


def apply_plan(capture: Capture, schedule: Schedule, static_inputs: Collection[int]) -> joint_graphs.PartitionedModules:
    """Returns the (forward, backward) modules that run ``schedule``; ``capture.joint`` is consumed."""
    if schedule.stays:
        run_passes(capture.joint, partial(insert_stores, capture=capture, schedule=schedule))
    run_passes(capture.joint, partial(insert_recomputation, capture=capture, schedule=schedule))
    forward, backward = split(capture, schedule, static_inputs)
    forward.graph.lint()
    backward.graph.lint()
    # Torch's extraction silently includes any op whose unsaved result a backward node reads.
    forward_ops = {node.name for node in capture.op_nodes[: capture.graph.num_forward]}
    calls = (node for node in backward.graph.nodes if node.op == "call_function")
    if unplanned := [node.name for node in calls if node.name in forward_ops]:
        raise PlanInvalid(f"the backward runs forward ops that were neither saved nor planned: {unplanned}")
    if capture.graph.machine.fuses:
        run_passes(forward, materialize_shared)
        run_passes(backward, materialize_shared, preserve_strides)
    return forward, backward
