"""The tensors in arguments and results of ops, and their bytes."""

from __future__ import annotations

from typing import Any

import torch

from autoremat.torch_private.symbolic_sizes import most


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested containers, in sequence."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the tensor's elements, at the largest planned sizes."""
    return most(tensor.numel()) * tensor.element_size()
