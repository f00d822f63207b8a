"""Predicts the memory of an optimizer by running its own ``step`` on fake tensors.

``memory_budget="auto"`` must not hand out the state of the optimizers of this process before it exists.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autoremat.basics.errors import BudgetWarning, OptimizerUnpredictable
from autoremat.basics.warn import warn_user
from autoremat.device_memory.inventory import Inventory
from autoremat.measure.signatures import node_of_call
from autoremat.ops.op_table import facts_of
from autoremat.planner.memory.allocations import ROUNDING
from autoremat.planner.multigraph.device_budget import UPDATES, LedgerRow, OptimizerMemory
from autoremat.torch_private.fake_optimizers import FakeCopies, LiveBytes, as_in_training, fake_copy, step_of
from autoremat.torch_private.fake_tensors import new_mode
from autoremat.workspaces.formulas import workspace_bytes
from autoremat.workspaces.measurement import one_graph

LATER_STEPS = 2
"""Steps that are run after the first one. The largest peak counts."""


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer of torch inside of wrappers such as Accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, Optimizer) else optimizer


def parameters_of(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Returns the parameters of the optimizers, each once."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return list({id(p): p for group in groups for p in group["params"]}.values())


def optimizer_memory(
    optimizers: Sequence[Optimizer],
    device_type: str,
    rounding: int = 1,
    to: torch.device | None = None,
    stands_for_cuda: bool = False,
) -> OptimizerMemory:
    """Returns the memory of the optimizers on ``device_type``: their real steps run on fake tensors, in sequence.

    Every parameter that requires a gradient has a dense one. Tensors count in multiples of ``rounding`` bytes, and
    as if they were on the device ``to``, unless it is None. With ``stands_for_cuda``, the CPU stands for a CUDA device that is
    not here. An optimizer without a choice of the user then takes the default of CUDA devices, foreach. Nothing of the real
    optimizers changes.

    Raises ``OptimizerUnpredictable`` if a step does not run on fake tensors.
    """
    runs_on = "cuda" if stands_for_cuda else device_type
    workspace_of = functools.partial(_workspace_of_product, runs_on)
    live = LiveBytes(new_mode(), device_type, rounding, counts_numbers=runs_on == "cpu", workspace_of=workspace_of)
    with as_in_training(), one_graph():
        return _run(optimizers, live, to, stands_for_cuda)


def _run(optimizers: Sequence[Optimizer], live: LiveBytes, to: torch.device | None, stands_for_cuda: bool) -> OptimizerMemory:
    copies = FakeCopies(live.mode, to)
    copied = [fake_copy(unwrapped(optimizer), copies) for optimizer in optimizers]
    for parameter in parameters_of(copied):
        live.count(parameter, 0)
        if parameter.requires_grad:
            with live.mode, torch.no_grad():
                parameter.grad = torch.empty_like(parameter)
            live.count(parameter.grad, 0)
    for _, tensor in copies.made.values():
        live.count(tensor)
    if stands_for_cuda:
        _choose_as_on_cuda(one for one in copies.holders.values() if isinstance(one, Optimizer))
    existing, peaks, states = live.live, [], []
    for _ in range(1 + LATER_STEPS):
        live.peak = live.live
        for original, optimizer in zip(optimizers, copied, strict=True):
            _step(optimizer, type(unwrapped(original)).__name__, live)
        peaks.append(live.peak)
        states.append(live.live)
    note = "the optimizer reads numbers of tensors, which its run on fake tensors takes as 1"
    return OptimizerMemory(max(states), peaks[0], max(peaks[1:]), existing, (note,) if live.assumed_numbers else ())


def _workspace_of_product(runs_on: str, op: Any, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes of the workspace of a matrix product, as Muon's steps have them; 0 for other ops, or if unknown."""
    if not facts_of(getattr(op, "overloadpacket", op)).is_product:
        return 0
    node = node_of_call(op, args, named)
    found = workspace_bytes(node, tuple(args), dict(named), result, runs_on)
    for one in node.graph.nodes:
        one.meta.clear()  # a graph is a cycle, which would keep the operands
    return found or 0


def _step(optimizer: Optimizer, name: str, live: LiveBytes) -> None:
    try:
        with live:
            step_of(optimizer)()
    except Exception as error:  # the code of optimizers is open-ended
        raise OptimizerUnpredictable(
            f"a step of {name} does not run on fake tensors ({type(error).__name__}: {str(error).partition(chr(10))[0]}), so "
            "its memory is unknown. Run one step, measure state and peak above parameters and gradients, and give them "
            "in place of the optimizer: optimizer=autoremat.OptimizerMemory(state_bytes=..., later_step_bytes=...)"
        ) from error


def _choose_as_on_cuda(optimizers: Iterable[Optimizer]) -> None:
    """Gives the optimizers the settings that they would choose on a CUDA device, for which their CPU tensors stand."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if group.get("foreach", True) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True
        if group.get("capturable"):  # keeps only the counts of steps on the device
            group["capturable"] = False


def live_optimizers(device: torch.device) -> list[Optimizer]:
    """Returns the optimizers of this process with parameters on ``device`` that require gradients, of whatever model."""
    # By their own types: proxies and lazy objects are not asked.
    every = (thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer) and hasattr(thing, "param_groups"))
    found = {id(optimizer): optimizer for optimizer in map(unwrapped, every)}
    return [o for o in found.values() if any(p.device == device and p.requires_grad for p in parameters_of([o]))]


def rows_to_come(device: torch.device) -> tuple[LedgerRow, ...]:
    """Returns the ledger's rows for the memory that live optimizers will allocate on ``device``; empty if there is none.

    Those of other models count too, for their state takes the same free memory. Warns with ``BudgetWarning`` if the memory of
    an optimizer cannot be predicted.
    """
    optimizers = live_optimizers(device)
    if not optimizers:
        return ()
    rounding = ROUNDING if device.type == "cuda" else 1
    try:
        memory = optimizer_memory(optimizers, device.type, rounding)
    except OptimizerUnpredictable as error:
        warn_user(
            f'memory_budget="auto" hands out all free memory, because the optimizer\'s state is unknown: {error}. Pass '
            'memory_budget=autoremat.device_budget("auto", model, optimizer)',
            BudgetWarning,
        )
        return ()
    if memory.state_bytes <= memory.existing_bytes:
        return ()
    gradients = Inventory(device.type, rounding).gradient_bytes(parameters_of(optimizers))
    rows = [row for row in memory.rows() if row.name != "optimizer state"]  # it is not free memory any more
    return tuple(row for row in (*rows, LedgerRow("gradients", gradients, UPDATES)) if row.bytes)
