"""Torch's private names for running code on fake tensors while the bytes of its tensors are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from autoremat.torch_private.untraced import when_dropped

READS_DATA = torch.ops.aten._local_scalar_dense.default
"""The op behind ``tensor.item()``."""

NUMBER_BYTES = 8
"""Bytes of the tensor on the CPU that an op makes of a number of Python. It makes another one in the type of its result."""

Workspace = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], int]
"""Returns bytes for an op, its arguments by position and by name, and its result, with fake tensors."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses
    """Runs ops on fake tensors while active, and counts the bytes of the storages that they make.

    Single numbers on the CPU are real, such as a count of steps, so that code can read them. Asked for the number in a fake
    tensor, the mode assumes 1 and counts it in ``assumed_numbers``.
    """

    def __init__(
        self, mode: FakeTensorMode, device_type: str, rounding: int, counts_numbers: bool, workspace_of: Workspace
    ) -> None:
        """Makes the mode. Storages of ``device_type`` count, each rounded up to a multiple of ``rounding`` bytes.

        ``counts_numbers`` is True if the tensors that ops make of numbers of Python count, because they are on that device.
        ``workspace_of`` returns the bytes that a call takes beside its results while it runs.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.workspace_of = workspace_of
        self.mode, self.device_type, self.rounding, self.counts_numbers = mode, device_type, rounding, counts_numbers
        self.live = self.peak = self.assumed_numbers = 0
        self._sizes: dict[int, int] = {}

    def count(self, tensor: torch.Tensor, size: int | None = None) -> None:
        """Counts the storage of ``tensor``, unless it is counted already, until it is freed. ``size`` replaces its bytes."""
        if is_wrapper(tensor):
            for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # such tensors have it
                self.count(getattr(tensor, name), size)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        known = tensor.device.type == self.device_type
        self._sizes[key] = rounded(storage.nbytes() if size is None else size, self.rounding) if known else 0
        self.live += self._sizes[key]
        self.peak = max(self.peak, self.live)
        when_dropped(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(map(is_wrapper, _tensors((args, kwargs or {})))):
            return NotImplemented  # the subclass runs ops on its inner tensors, which come here
        made = self._run(func, args, kwargs or {})
        for tensor in _tensors(made):
            self.count(tensor)
        self.peak = max(self.peak, self.live + self.workspace_of(func, args, kwargs or {}, made))
        if self.counts_numbers and any(isinstance(leaf, (int, float)) for leaf in tree_leaves((args, kwargs))):
            results = [*_tensors(made)] or [*_tensors((args, kwargs))]  # ops in place on lists of tensors return nothing
            converted = max((tensor.element_size() for tensor in results), default=0)
            self.peak = max(self.peak, self.live + NUMBER_BYTES + converted)
        return made

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = list(_tensors((args, kwargs)))
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            if func is READS_DATA:
                self.assumed_numbers += 1
                return True if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
            with self.mode:
                return func(*args, **kwargs)
        if given:
            return func(*args, **kwargs)
        with self.mode:
            made = func(*args, **kwargs)
        return func(*args, **kwargs) if isinstance(made, torch.Tensor) and is_number(made) else made


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def is_wrapper(tensor: Any) -> bool:
    """Returns True for a tensor that consists of others, such as optimizer state of 8 bits with its scales."""
    return is_traceable_wrapper_subclass(tensor)


def is_number(tensor: torch.Tensor) -> bool:
    """Returns True for a single number on the CPU."""
    return tensor.numel() <= 1 and tensor.device.type == "cpu"


def rounded(size: int, rounding: int) -> int:
    """Returns ``size`` rounded up to a multiple of ``rounding``."""
    return -(-size // rounding) * rounding
