"""The FX-to-FX passes in the sequence in which they run: before capture, with the plan. README.md here has their contract.

    run_passes(backward, materialize_shared, preserve_strides)

Each pass is linted and timed. The logger ``autoremat.passes`` has the seconds and the graph after each pass, at level DEBUG.
All tests also compare what a pass must preserve.

Torch's ``PassManager`` is not used: it replaces the error of a pass by a bare ``Exception``, and callers tell ``PlanInvalid``
and ``ChunkingUnsupported`` apart.
"""

import logging
import time
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.capture import communication
from autoremat.capture.capture import Capture
from autoremat.passes.inductor_workarounds.accumulate_gradients import accumulate_into_first as accumulate_into_first
from autoremat.passes.inductor_workarounds.accumulate_gradients import forward_region_operands as forward_region_operands
from autoremat.passes.inductor_workarounds.accumulate_gradients import ignore_running_averages
from autoremat.passes.inductor_workarounds.keep_compared import keep_compared as keep_compared
from autoremat.passes.inductor_workarounds.layouts import materialize_shared as materialize_shared
from autoremat.passes.inductor_workarounds.layouts import preserve_strides as preserve_strides
from autoremat.passes.inductor_workarounds.layouts import state_layout_copies as state_layout_copies
from autoremat.passes.insert_recompute import insert_recomputation
from autoremat.passes.insert_transfers import insert_stores, stored_values
from autoremat.planner.graph.op import Trait
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.simulator import simulate
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
    return rewrites


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
    """Returns the (forward, backward) modules that run ``schedule``; ``capture.joint`` is consumed.

    Raises ``PlanInvalid`` if it is no schedule of the graph.
    """
    timeline = simulate(capture.graph, schedule)
    if schedule.stays:
        run_passes(capture.joint, partial(insert_stores, capture=capture, schedule=schedule))
    run_passes(capture.joint, partial(insert_recomputation, capture=capture, timeline=timeline))
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


def split(capture: Capture, schedule: Schedule, static_inputs: Collection[int]) -> joint_graphs.PartitionedModules:
    """Returns the (forward, backward) modules of ``capture.joint``, which :func:`insert_recomputation` has rewritten.

    Saved values cross to the backward as *bases*, each in its form, from which the backward derives views again. A stored value
    crosses beside its form if the backward frees it. Symbolic numbers that the forward computes cross beside the tensors.
    Torch's own extraction finds what the backward reads, in AOTAutograd's sequence.
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
    stored, nodes = stored_values(capture.joint), capture.value_nodes
    holders = [stored.get(v) or nodes[v] for v in schedule.saved(capture.graph)]
    holders += [nodes[stay.value] for stay in schedule.stays if stay.free >= len(schedule.forward)]
    saved = [n for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)] + [h for h in holders if h is not None]
    without_check = "saved_tensor_with_no_vc_check"
    for node in saved:
        if any(user.meta.get(without_check) and capture.aliases.get(user) == capture.aliases.get(node) for user in node.users):
            node.meta[without_check] = True
    static = [n for i, n in enumerate(inputs) if i in set(static_inputs)]
    forward, backward = joint_graphs.extract_modules(capture.joint, saved, symbols, opaque, capture.num_fwd_outputs, static)
    return joint_graphs.finish_module(forward, False), joint_graphs.finish_module(backward, True)
