"""Counts tensors that exist beside a plan, and predicts those of optimizers; has the ledger's rows for both.

What a way to distribute a step holds has a row in :func:`rows_of_models`. An optimizer's memory is predicted by running its own
``step`` on fake tensors: ``memory_budget="auto"`` must not hand out their state before it exists.
"""

import functools
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autoremat.basics.checks import as_int, bytes_given, refused
from autoremat.basics.errors import BudgetWarning, OptimizerUnpredictable
from autoremat.basics.units import rounded
from autoremat.basics.warn import warn_user
from autoremat.ops.op_table import facts_of
from autoremat.planner.memory.allocations import ROUNDING
from autoremat.planner.multigraph.device_budget import (
    COMPILED,
    EARLIER_GRADIENTS,
    UPDATES,
    LedgerRow,
    OptimizerMemory,
    StepPart,
)
from autoremat.torch_private.autograd import hooks_after_gradients
from autoremat.torch_private.fake_tensors import FakeCopies, LiveBytes, as_in_training, fake_copy, local, new_mode, step_of
from autoremat.torch_private.process_groups import gathered_groups
from autoremat.torch_private.tensors import storage_bytes, storage_key
from autoremat.workspaces.formulas import workspace_bytes
from autoremat.workspaces.measurement import node_of_call, one_graph

OTHER_FORMS = 'a dict of names to modules, tensors or bytes, such as {"EMA": ema_model, "cache": "1GiB"}'


@dataclass
class Inventory:
    """Sums the bytes of storages on one device, each storage once."""

    device_type: str
    rounding: int = 1
    moved: bool = False
    """True if all tensors count, because those of another device stand for ones on the device."""

    def __post_init__(self) -> None:
        self.seen: set[int] = set()

    def counts(self, tensor: torch.Tensor) -> bool:
        """Returns True for tensors on the device."""
        return self.moved or tensor.device.type == self.device_type

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Returns the bytes of the storages of ``tensors`` that were not counted before; of a distributed tensor its shard."""
        total = 0
        for tensor in map(local, tensors):
            key = storage_key(tensor)
            if self.counts(tensor) and key not in self.seen:
                total += rounded(storage_bytes(tensor, tensor.device.type), self.rounding)
                self.seen.add(key)
        return total

    def gradient_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Returns the bytes of dense gradients, one for each parameter that requires one."""
        found = {id(p): local(p) for p in parameters if p.requires_grad}.values()
        return sum(rounded(p.numel() * p.element_size(), self.rounding) for p in found if self.counts(p))

    def rows_of_others(self, others: Mapping[str, Any]) -> Iterator[LedgerRow]:
        """Yields a row for each of the user's own: a module, tensors, or bytes. Raises ``OptionsError`` for other values."""
        if not isinstance(others, Mapping):
            raise refused("others", others, OTHER_FORMS)
        for name, value in others.items():
            if isinstance(value, nn.Module):
                size = self.bytes_of((*value.parameters(), *value.buffers()))
            elif isinstance(value, str) or (not isinstance(value, torch.Tensor) and as_int(value) is not None):
                size = bytes_given(value, f"others[{name!r}]", OTHER_FORMS)
            else:
                leaves = torch.utils._pytree.tree_leaves(value)
                if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                    raise refused(f"others[{name!r}]", value, OTHER_FORMS)
                size = self.bytes_of(leaves)
            yield LedgerRow(str(name), size)


FEWER_PARAMETERS = "hold parameters in fewer bits, or shard them (FSDP2's fully_shard)"
FEWER_GRADIENTS = "train fewer parameters (LoRA, frozen layers), or run the optimizer in the backward, which frees each early"


def _gathered_bytes(models: Sequence[nn.Module]) -> int:
    """Returns what ``fully_shard`` holds at most: groups that stay, the running, the next and the reduced one."""
    total = 0
    for model in models:
        groups = list(gathered_groups(model))
        freed = sorted((size for size, is_freed in groups if is_freed), reverse=True)
        total += sum(size for size, is_freed in groups if not is_freed) + sum(freed[:2])
        total += max((size for size, _ in groups), default=0)
    return total


def rows_of_models(
    models: Sequence[nn.Module], inventory: Inventory, kept_in: StepPart, hooks_free: bool
) -> Iterator[LedgerRow]:
    """Yields the rows of models: parameters, buffers, what strategies hold, and gradients.

    ``kept_in`` are the parts of forward and backward in which earlier gradients are live. With ``hooks_free``, gradients
    with post-accumulate-grad hooks are live in the backward alone, where the plans count them.
    """
    parameters = {id(p): p for model in models for p in model.parameters()}
    yield LedgerRow("parameters", inventory.bytes_of(parameters.values()), remedy=FEWER_PARAMETERS)
    yield LedgerRow("buffers", inventory.bytes_of(buffer for model in models for buffer in model.buffers()))
    parallel = [model for model in models if isinstance(model, DistributedDataParallel)]
    counted = {id(p) for model in parallel if model.gradient_as_bucket_view for p in model.parameters()}  # views of the buckets
    size = inventory.gradient_bytes(p for model in parallel for p in model.parameters())
    advice = "" if counted else "gradient_as_bucket_view=True makes gradients views of the buckets"
    yield LedgerRow("buckets of DistributedDataParallel", size, remedy=advice)
    yield LedgerRow("gathered parameters of fully_shard", _gathered_bytes(models), COMPILED, "shard smaller modules")
    counted |= {id(p) for p in parameters.values() if hooks_free and hooks_after_gradients(p)}
    size = inventory.gradient_bytes(p for p in parameters.values() if id(p) not in counted)
    yield LedgerRow("gradients", size, UPDATES, FEWER_GRADIENTS)
    advice = "accumulate=1 and zero_grad(set_to_none=True) free them before the forward"
    yield LedgerRow(EARLIER_GRADIENTS, size if kept_in else 0, kept_in, advice)


# -- the memory of optimizers ------------------------------------------------------------------------------------------------


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
