"""Counts tensors that exist beside a plan, and has the ledger's rows for the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoremat.basics.checks import as_int, refused, text_to_bytes
from autoremat.planner.multigraph.device_budget import LedgerRow
from autoremat.torch_private.fake_optimizers import local
from autoremat.torch_private.live_bytes import rounded
from autoremat.torch_private.tensor_identity import storage_key

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
                size = tensor.numel() * tensor.element_size() if key is None else tensor.untyped_storage().nbytes()
                total += rounded(size, self.rounding)
                if key is not None:
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
