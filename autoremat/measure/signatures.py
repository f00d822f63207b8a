"""Signatures of calls, and real arguments for them: each distinct kernel is measured once, by itself, on made-up tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoremat.torch_private.compat import size_hint

LONGEST_WAIT = 10.0
"""Seconds to wait for another process that writes its measurements."""

REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)
"""Errors that ops raise on arguments that they do not take; running out of memory is a ``RuntimeError`` too."""


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape, strides = ([size_hint(x) for x in sizes] for sizes in (value.shape, value.stride()))
        bits = f"{'~' * value.is_conj()}{'-' * value.is_neg()}"  # views whose numbers an op conjugates or negates as it reads
        return f"{bits}{str(value.dtype).removeprefix('torch.')}{shape}{strides}@{value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return str(size_hint(value)) if isinstance(value, torch.SymInt) else str(value)


def arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the node's arguments, with (fake) values for nodes."""
    args, kwargs = torch.utils._pytree.tree_map(
        lambda x: x.meta.get("val") if isinstance(x, fx.Node) else x, (node.args, node.kwargs)
    )
    return tuple(args), dict(kwargs)


def signature(node: fx.Node) -> str:
    """Returns text that is equal for equal calls: op, shapes, strides, types, other arguments."""
    args, kwargs = arguments(node)
    named = (f"{name}={_described(value)}" for name, value in sorted(kwargs.items()))
    return f"{node.target}({', '.join([*map(_described, args), *named])})"


def real(value: Any) -> Any:
    """Returns a real value for a fake one, in the same layout: random floats, or zeros where they could be indices.

    Raises ``ValueError`` for a value that has no known number.
    """
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise ValueError(f"{value} has no known value")
        return value
    shape, strides = ([size_hint(x) for x in sizes] for sizes in (value.shape, value.stride()))
    # The storage is filled, not the tensor: two of its elements may lie in one place.
    length = 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if value.dtype.is_floating_point or value.dtype.is_complex:
        # From 0 to 1, as probabilities are: CUDA kernels that refuse others leave the process without its device.
        storage = torch.rand(length, device=value.device).to(value.dtype)
    else:
        storage = torch.zeros(length, dtype=value.dtype, device=value.device)
    made = storage.as_strided(shape, strides)
    made = made.conj() if value.is_conj() else made
    return torch.ops.aten._neg_view(made) if value.is_neg() else made
