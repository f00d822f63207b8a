"""Finds the optimizers of this process, whose state ``memory_budget="auto"`` must not hand out before it exists."""

from __future__ import annotations

import gc

import torch
from torch.optim import Optimizer

from autoremat.basics.errors import BudgetWarning, OptimizerUnpredictable
from autoremat.basics.warn import warn_user
from autoremat.device_memory.inventory import Inventory
from autoremat.device_memory.optimizer_run import optimizer_memory, parameters_of, unwrapped
from autoremat.planner.memory.caching_allocator import ROUNDING
from autoremat.planner.multigraph.device_budget import UPDATES, LedgerRow


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
