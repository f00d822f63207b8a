"""The FX-to-FX passes in the sequence in which they run: before capture, with the plan. README.md here has their contract.

    run_passes(backward, materialize_shared, preserve_strides)

Each pass is linted and timed. The logger ``autoremat.passes`` has the seconds and the graph after each pass, at level DEBUG.
With ``AUTOREMAT_VERIFY_PASSES=1``, as in all tests, what a pass must preserve is compared too.

Torch's ``PassManager`` is not used: it replaces the error of a pass by a bare ``Exception``, and callers tell ``PlanInvalid``
and ``ChunkingUnsupported`` apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autoremat.basics import environment
from autoremat.basics.errors import PlanInvalid
from autoremat.capture.capture import Capture
from autoremat.ops.op_traits import traits_of
from autoremat.passes.inductor_workarounds.accumulate_gradients import accumulate_into_first as accumulate_into_first
from autoremat.passes.inductor_workarounds.dropped_reads import forward_region_operands as forward_region_operands
from autoremat.passes.inductor_workarounds.dropped_reads import ignore_running_averages
from autoremat.passes.inductor_workarounds.keep_compared import keep_compared as keep_compared
from autoremat.passes.inductor_workarounds.layouts import materialize_shared as materialize_shared
from autoremat.passes.inductor_workarounds.layouts import preserve_strides as preserve_strides
from autoremat.passes.inductor_workarounds.layouts import state_layout_copies as state_layout_copies
from autoremat.passes.insert_recompute import insert_recomputation
from autoremat.passes.insert_transfers import insert_stores
from autoremat.passes.split import split
from autoremat.planner.graph.op import SEQUENTIAL
from autoremat.planner.graph.schedule import Schedule
from autoremat.torch_private import compilers, joint_graphs

log = logging.getLogger("autoremat.passes")

Pass = Callable[[fx.GraphModule], int]
"""Rewrites the graph of a module in place. Returns the number of its rewrites; after 0 the graph is as before."""


def run_passes(module: fx.GraphModule, *passes: Pass) -> list[int]:
    """Runs ``passes`` on ``module`` in place, in this sequence, and returns the number of rewrites of each.

    Raises ``RuntimeError``, with the name of the pass, if a pass breaks the graph.
    """
    rewrites = [_run(module, one) for one in passes]
    if any(rewrites):
        module.recompile()
    return rewrites


def _run(module: fx.GraphModule, one: Pass) -> int:
    name = (one.func if isinstance(one, partial) else one).__name__
    before = _interface(module.graph) if environment.said(environment.VERIFY_PASSES) == "1" else {}
    begin = time.perf_counter()
    rewrites = one(module)
    log.debug("%s: %d rewrites in %.2f ms", name, rewrites, 1e3 * (time.perf_counter() - begin))
    if rewrites:
        try:
            module.graph.lint()
        except (RuntimeError, AssertionError) as error:
            raise RuntimeError(f"the pass {name} leaves a malformed graph: {error}") from error
        if log.isEnabledFor(logging.DEBUG):
            log.debug("the graph after %s:\n%s", name, module.print_readable(print_output=False))
    after = _interface(module.graph) if before else {}
    for part, expected in before.items():
        if after[part] != expected:
            pairs = zip((*expected, "nothing"), (*after[part], "nothing"), strict=False)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
            raise RuntimeError(f"the pass {name} changes the {part} of the graph: {new} in place of {old}")
    return rewrites


def _interface(graph: fx.Graph) -> dict[str, list[str]]:
    """Returns what a pass must preserve: the form of inputs and outputs, and the sequence of all effects."""
    return {
        "inputs": [f"{node.name}: {_described(node)}" for node in graph.find_nodes(op="placeholder")],
        "outputs": [_described(leaf) for leaf in tree_leaves(graph.output_node().args)],
        "effects": [f"{node.name}: {node.target}" for node in graph.nodes if traits_of(node) & SEQUENTIAL],
    }


def _described(leaf: Any) -> str:
    value = leaf.meta.get("val", "unknown") if isinstance(leaf, fx.Node) else leaf
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes, strides = (", ".join(map(str, numbers)) for numbers in (value.shape, value.stride()))
    return f"{value.dtype} on {value.device} of sizes ({sizes}) and strides ({strides})"


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
