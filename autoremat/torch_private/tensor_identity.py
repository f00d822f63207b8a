"""Torch's private names that identify a tensor's storage, and the tensors in a subclass."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch


def storage_key(tensor: torch.Tensor) -> int | None:
    """Returns a number that identifies the storage of a (fake) tensor; None for sparse tensors and some subclasses."""
    with contextlib.suppress(NotImplementedError):
        return int(tensor.untyped_storage()._cdata)
    return None


def subclass_identity(tensor: torch.Tensor) -> str:
    """Returns text that identifies the way in which a tensor subclass wraps other tensors; empty for a plain tensor."""
    flatten: Callable[[], tuple[list[str], Any]] | None = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return ""
    names, context = flatten()
    return re.sub(r" at 0x[0-9a-fA-F]+", "", f"{names} {context}")
