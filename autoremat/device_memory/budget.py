"""``autoremat.device_budget``: a memory budget from the memory of a whole device."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoremat.basics.checks import MOST_BYTES, as_int, bytes_given, count_given, flag, refused
from autoremat.basics.errors import OptionsError
from autoremat.basics.units import BYTE_FORMS
from autoremat.device_memory.inventory import Inventory, optimizer_memory, rows_of_models
from autoremat.measure.calibration import checked_device
from autoremat.options.options import HEADROOM_FORMS
from autoremat.planner.cost.datasheets import DATASHEETS, datasheet, device_memory, known_cards
from autoremat.planner.memory.allocations import ROUNDING
from autoremat.planner.multigraph.device_budget import DeviceBudget, LedgerRow, OptimizerMemory, StepPart

CONTEXT = 512 * 2**20
"""Bytes of a CUDA context with the code of libraries, where no device is here to tell."""

RESERVE = 512 * 2**20
"""Bytes that stay free on a CUDA device: fragments, and workspaces of libraries such as cuBLAS."""

CPU_RESERVE = 64 * 2**10
"""Bytes that stay free on a CPU: numbers of eager code, such as a loss that the caller keeps."""

TOTAL_FORMS = (
    f'an int > 0 (bytes); a string such as {BYTE_FORMS}; a CUDA card by name, such as "H100-80GB"; "auto" (the memory of the '
    "CUDA device that holds the model)"
)
OPTIMIZER_FORMS = "an optimizer of torch, a sequence of them, an OptimizerMemory with measured figures, or None"


def device_budget(
    total: int | str,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | OptimizerMemory | None = None,
    *,
    accumulate: int = 1,
    set_to_none: bool = True,
    hooks_free_gradients: bool = False,
    others: Mapping[str, Any] | None = None,
    reserve: int | str | None = None,
    context: int | str | None = None,
    device: str | torch.device | None = None,
) -> DeviceBudget:
    """Returns the budget that a whole device leaves for forward and backward, with the ledger of the other memory.

    The result is accepted as a ``memory_budget``. Every part of training fits then, the optimizer's own steps among them: each
    optimizer's ``step`` runs on fake tensors. Nothing real is allocated or changed. Inputs count when graphs are compiled.

    - ``total``: memory of the device, in bytes or as text such as "24GiB", or a CUDA card by name, such as "H100-80GB". "auto"
      means the whole memory of the CUDA device that holds the model.
    - ``model``: the module that is trained, or several, wrapped by ``DistributedDataParallel`` or ``fully_shard`` as in
      training. Modules may be on the meta device.
    - ``optimizer``: one, several that step one after the other, an ``OptimizerMemory`` with measured figures, or None.
    - ``accumulate``: number of micro-batches in one step of the optimizer.
    - ``set_to_none``: False if ``zero_grad(set_to_none=False)`` keeps gradients from one step to the next.
    - ``hooks_free_gradients``: True if each post-accumulate-grad hook frees its gradient, as the option of this name says.
    - ``others``: further memory by name: modules such as an EMA copy, tensors, or bytes.
    - ``reserve``: bytes to keep free: by default 512 MiB on CUDA and 64 KiB on a CPU.
    - ``context``: bytes outside torch's allocator: by default measured on a CUDA device that is here, 512 MiB on others, and
      none on a CPU.
    - ``device``: the device of ``total``; None means a card named by ``total``, else the device of the model.

    Raises ``OptimizerUnpredictable`` if a step does not run on fake tensors, and ``OptionsError`` for other values. A ledger
    that alone exceeds the device raises ``DeviceTooSmall`` where it is used.
    """
    count = count_given(accumulate, "accumulate", "an int >= 1", most=MOST_BYTES)
    kept = StepPart(0) if flag(set_to_none, "set_to_none") else StepPart.LATER_STEP | StepPart.LATER_MICRO_BATCH
    kept |= StepPart.LATER_MICRO_BATCH if count > 1 else StepPart(0)
    modules = [model] if isinstance(model, nn.Module) else list(model)
    whole = _whole_device(total, modules, device)
    inventory = Inventory(whole.device_type, whole.rounding, whole.moved)
    outside = whole.context_bytes() if context is None else bytes_given(context, "context", HEADROOM_FORMS)
    rows = [LedgerRow("context and libraries", outside)]
    rows += rows_of_models(modules, inventory, kept, flag(hooks_free_gradients, "hooks_free_gradients"))
    memory, advice = _optimizer_memory(optimizer, whole)
    rows += [] if memory is None else memory.rows(advice)
    rows += inventory.rows_of_others(others or {})
    notes = (*whole.notes, *(() if memory is None else memory.notes))
    free = (RESERVE if whole.is_cuda else CPU_RESERVE) if reserve is None else bytes_given(reserve, "reserve", HEADROOM_FORMS)
    return DeviceBudget(whole.total_bytes(total), (), free, whole.name, count, notes).with_rows(*rows)


@dataclass(frozen=True)
class _WholeDevice:
    name: str
    device_type: str
    """Type of the tensors that stand for those of the device: "cpu" for a CUDA device that is not here."""
    is_cuda: bool = False
    index: int | None = None
    """Number of the CUDA device, if it is here."""
    moved: bool = False
    """True if all tensors of the model stand for tensors of the device, although they are elsewhere."""
    is_assumed: bool = False
    """True if nothing names the device and the model is on none."""

    @property
    def stands_for_cuda(self) -> bool:
        """True if tensors of the CPU stand for those of a CUDA device that is not here."""
        return self.is_cuda and self.index is None

    @property
    def rounding(self) -> int:
        return ROUNDING if self.is_cuda else 1

    @property
    def notes(self) -> tuple[str, ...]:
        if self.is_assumed:
            return ('no device is named: this is a CPU without context. Name a card, such as "RTX 4090", or give device=',)
        if not self.stands_for_cuda:
            return ()
        sheet = None if re.search(r"\d ?Gi?B?$", self.name, re.IGNORECASE) else datasheet(self.name)
        size = "" if sheet is None else f"{self.name} counts as {sheet.memory >> 30} GB (another size: as in V100-16GB); "
        return (f"{size}no such device is here: the context is assumed",)

    def total_bytes(self, total: int | str) -> int:
        """Returns the memory of the device in bytes. Raises ``OptionsError`` for a ``total`` that is not accepted."""
        if isinstance(total, str) and total.strip().lower() == "auto":
            if self.index is None:
                raise OptionsError(f'total="auto" needs a model on a CUDA device. Accepted elsewhere: {TOTAL_FORMS}')
            return int(torch.cuda.mem_get_info(self.index)[1])
        if isinstance(total, str) and (memory := device_memory(total)) is not None:
            return memory
        count = int(total) if isinstance(total, str) and total.strip().isdecimal() else as_int(total)
        if count is not None and 0 < count < 1024:
            raise OptionsError(f'total={total!r} is {count} bytes, and no device is that small. Did you mean "{count}GiB"?')
        forms = f"{TOTAL_FORMS}. {known_cards(total)}" if isinstance(total, str) else TOTAL_FORMS
        return bytes_given(total, "total", forms, least=1)

    def context_bytes(self) -> int:
        """Returns the bytes outside torch's allocator: those in use now on a device that is here, else assumed ones."""
        if not self.is_cuda:
            return 0
        if self.index is None:
            return CONTEXT
        free, total = torch.cuda.mem_get_info(self.index)
        return max(0, int(total - free - torch.cuda.memory_reserved(self.index)))


def _whole_device(total: int | str, modules: Sequence[nn.Module], device: str | torch.device | None) -> _WholeDevice:
    named = str(device) if device is not None else total if isinstance(total, str) else ""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    own = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device_memory(named) is not None:
        return _on_cuda(named, own, own.type == "cuda")
    try:
        asked = own if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        forms = f"a device of torch, or a CUDA card by a name that contains one of {', '.join(DATASHEETS)}"
        raise refused("device", device, forms) from error
    if asked.type == "cuda":
        return _on_cuda(str(asked), asked, torch.cuda.is_available(), moved=own.type != "cuda")
    kind = "cpu" if asked.type == "meta" else checked_device(asked).type
    return _WholeDevice(kind, kind, moved=own.type != kind, is_assumed=device is None and own.type == "meta")


def _on_cuda(name: str, device: torch.device, is_here: bool, moved: bool = False) -> _WholeDevice:
    if not is_here:
        return _WholeDevice(name, "cpu", is_cuda=True, moved=True)
    index = torch.cuda.current_device() if device.index is None else device.index
    return _WholeDevice(name, "cuda", is_cuda=True, index=index, moved=moved)


def _optimizer_memory(optimizer: object, whole: _WholeDevice) -> tuple[OptimizerMemory | None, str]:
    """Returns the memory of the optimizers, and what lowers the bytes of their temporary tensors."""
    if optimizer is None or isinstance(optimizer, OptimizerMemory):
        return optimizer, ""
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    several = [one for one in given if isinstance(one, Optimizer)]
    if len(several) < len(given):
        raise refused("optimizer", optimizer, OPTIMIZER_FORMS)
    groups = [group for one in several for group in one.param_groups]
    advice = "foreach=False has those of one parameter at a time" if any("foreach" in group for group in groups) else ""
    if any("fused" in group and not group["fused"] for group in groups):
        advice = "fused=True has none, and foreach=False has those of one parameter at a time"
    to = torch.device(whole.device_type) if whole.moved else None
    return optimizer_memory(several, whole.device_type, whole.rounding, to, whole.stands_for_cuda), advice
