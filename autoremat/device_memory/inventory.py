"""Counts tensors that exist beside a plan, and has the ledger's rows for them.

A way to distribute a step has one function here, which looks for it in the models and returns what it holds. ``STRATEGIES``
has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoremat.basics.checks import as_int, refused, text_to_bytes
from autoremat.basics.units import rounded
from autoremat.planner.multigraph.device_budget import COMPILED, EARLIER_GRADIENTS, UPDATES, LedgerRow, StepPart
from autoremat.torch_private.autograd import hooks_after_gradients
from autoremat.torch_private.fake_optimizers import local
from autoremat.torch_private.process_groups import gathered_groups
from autoremat.torch_private.tensors import storage_bytes, storage_key

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
            elif isinstance(value, str):
                size = text_to_bytes(value, f"others[{name!r}]", OTHER_FORMS)
            elif not isinstance(value, torch.Tensor) and (count := as_int(value)) is not None and count >= 0:
                size = count
            else:
                leaves = torch.utils._pytree.tree_leaves(value)
                if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                    raise refused(f"others[{name!r}]", value, OTHER_FORMS)
                size = self.bytes_of(leaves)
            yield LedgerRow(str(name), size)


FEWER_PARAMETERS = "hold parameters in fewer bits, or shard them (FSDP2's fully_shard)"
FEWER_GRADIENTS = "train fewer parameters (LoRA, frozen layers), or run the optimizer in the backward, which frees each early"


Held = tuple[LedgerRow, frozenset[int]]
"""What a way to distribute a step holds on a device, a row of no bytes for nothing, and the identities of the parameters whose
gradients are part of that memory."""


def data_parallel(models: Sequence[nn.Module], inventory: Inventory) -> Held:
    """Returns what ``DistributedDataParallel`` holds: buckets of all gradients, which may be views of them."""
    parallel = [model for model in models if isinstance(model, DistributedDataParallel)]
    views = frozenset(id(p) for model in parallel if model.gradient_as_bucket_view for p in model.parameters())
    size = inventory.gradient_bytes(p for model in parallel for p in model.parameters())
    advice = "" if views else "gradient_as_bucket_view=True makes gradients views of the buckets"
    return LedgerRow("buckets of DistributedDataParallel", size, remedy=advice), views


def fully_sharded(models: Sequence[nn.Module], inventory: Inventory) -> Held:
    """Returns what ``fully_shard`` holds at most: groups that stay, the running, the next and the reduced one."""
    size = 0
    for model in models:
        groups = list(gathered_groups(model))
        freed = sorted((size for size, is_freed in groups if is_freed), reverse=True)
        size += sum(size for size, is_freed in groups if not is_freed) + sum(freed[:2])
        size += max((size for size, _ in groups), default=0)
    return LedgerRow("gathered parameters of fully_shard", size, COMPILED, "shard smaller modules"), frozenset()


STRATEGIES: Sequence[Callable[[Sequence[nn.Module], Inventory], Held]] = (data_parallel, fully_sharded)
"""The ways to distribute a step that hold memory of their own. Local SGD holds its own in the optimizer's step."""


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
    held = [strategy(models, inventory) for strategy in STRATEGIES]
    yield from (row for row, _ in held)
    counted = {key for _, gradients in held for key in gradients}
    counted |= {id(p) for p in parameters.values() if hooks_free and hooks_after_gradients(p)}
    size = inventory.gradient_bytes(p for p in parameters.values() if id(p) not in counted)
    yield LedgerRow("gradients", size, UPDATES, FEWER_GRADIENTS)
    advice = "accumulate=1 and zero_grad(set_to_none=True) free them before the forward"
    yield LedgerRow(EARLIER_GRADIENTS, size if kept_in else 0, kept_in, advice)
