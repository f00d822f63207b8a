"""The tensors in containers, their bytes, and torch's private names that identify storages and subclasses."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autoremat.torch_private.symbolic_sizes import most


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested containers, in sequence."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Returns the device of the first tensor on an accelerator, else the CPU."""
    return next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), torch.device("cpu"))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the tensor's elements, at the largest planned sizes."""
    return most(tensor.numel()) * tensor.element_size()


def storage_bytes(tensor: torch.Tensor, device_type: str) -> int:
    """Returns the bytes of the tensor's storage; 0 if it is on another device type."""
    if tensor.device.type != device_type:
        return 0
    try:
        return most(tensor.untyped_storage().nbytes())
    except NotImplementedError:
        return tensor_bytes(tensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that identifies the storage of a (fake) tensor, or a tensor without one, such as a sparse one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)


def subclass_identity(tensor: torch.Tensor) -> str:
    """Returns text that identifies the way in which a tensor subclass wraps other tensors; empty for a plain tensor."""
    flatten: Callable[[], tuple[list[str], Any]] | None = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return ""
    names, context = flatten()
    return re.sub(r" at 0x[0-9a-fA-F]+", "", f"{names} {context}")
