"""Workspaces of CUDA kernels, in bytes: one formula for each kernel.

The formulas come from torch's sources and were not checked against an allocator. Matrix products need no workspace of their
own. cuBLAS allocates its workspace (8 MiB, 32 MiB on Hopper) for a stream at its first product and keeps it. Only the first
step of a process allocates it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoremat.torch_private.symbolic_sizes import size_hint

aten = torch.ops.aten

MOST_MULTIPROCESSORS = 192
"""The most multiprocessors of any card. Attention splits its sums to keep all of them busy."""

FLASH_ROWS = 64
"""Queries per block in the forward of flash attention."""


def _padded(count: int, block: int) -> int:
    return -(-count // block) * block


def _columns(width: int) -> int:
    return _padded(width, 32 if width <= 128 else 64)


def _flash(query: torch.Tensor, key: torch.Tensor, _: Any, dropout_p: float = 0.0, *__: Any, **___: Any) -> int:
    """Returns the bytes of partial results, where few queries would leave the card idle and keys are split among blocks.

    Each part has an output in float32 and row sums.
    """
    batch, heads, queries, width = (size_hint(s) for s in query.shape)
    idle = batch * heads * -(-queries // FLASH_ROWS) < 0.8 * 2 * MOST_MULTIPROCESSORS
    parts = min(128, -(-size_hint(key.shape[2]) // (256 if width <= 64 else 128 if width <= 128 else 64)))
    return 4 * batch * heads * queries * (_columns(width) + 1) * parts if idle and parts > 1 and not dropout_p else 0


def _flash_backward(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> int:
    """Returns the bytes of accumulated gradients and of copies in the backward of flash attention.

    - The query's gradient is accumulated in float32, with a row sum per query. Rows and columns are padded to blocks.
    - Deterministic algorithms accumulate it in several parts.
    - If heads share keys, the gradients of keys and values are first computed for each head.
    - The output's gradient is read token by token, with all heads of a token together. It is copied if its layout differs.
    """
    batch, heads, queries, width = (size_hint(s) for s in query.shape)
    parts = -(-MOST_MULTIPROCESSORS // (batch * heads)) if torch.are_deterministic_algorithms_enabled() else 1
    accumulated = 4 * batch * heads * _padded(queries, 128) * (_columns(width) * parts + 1)
    shared = size_hint(key.shape[1]) != heads
    ungrouped = 2 * batch * size_hint(key.shape[2]) * heads * width * key.element_size() if shared else 0
    lies_by_token = gradient.transpose(1, 2).is_contiguous()
    return accumulated + ungrouped + (0 if lies_by_token else batch * heads * queries * width * gradient.element_size())


def _efficient(query: torch.Tensor, _: Any, value: torch.Tensor, *__: Any, **___: Any) -> int:
    """Returns the bytes of the output in float32: wide heads in half precision accumulate it there."""
    batch, heads, queries, _ = (size_hint(s) for s in query.shape)
    width = size_hint(value.shape[3])
    return 4 * batch * heads * queries * width if query.element_size() < 4 and width > 128 else 0


def _efficient_backward(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any) -> int:
    """Returns the bytes of accumulated gradients in the backward of memory-efficient attention.

    - Half precision accumulates the query's gradient in float32, in blocks. Wide heads do the same for keys and values.
    - If few heads would leave the card idle, keys and values have several such parts.
    - Float32 needs only the product of the output and its gradient.
    """
    batch, heads, queries, width = (size_hint(s) for s in query.shape)
    if query.element_size() == 4:
        return 4 * batch * heads * queries * (size_hint(value.shape[3]) + 2)
    columns = _padded(width, 64 if width <= 64 else 128)
    accumulated = _padded(queries, 128) * (columns + 1)
    if width > 128:
        keys = _padded(size_hint(key.shape[2]), 128)
        parts = min(max(MOST_MULTIPROCESSORS // (batch * heads), 1), keys // 64)
        accumulated += parts * keys * (columns + _padded(size_hint(value.shape[3]), 128))
    return 4 * batch * heads * accumulated


FORMULAS: dict[Any, Callable[..., int]] = {
    # cuBLAS has a workspace of its own, and a copy within a device needs no temporary tensor.
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.copy_), lambda *_, **__: 0),
    # The states of all blocks in a scan of one long row. Inductor's own scan has a buffer in its code.
    **dict.fromkeys(
        (aten.cumsum, aten.cumprod, aten.logcumsumexp), lambda operand, *_, **__: size_hint(operand.numel()) // 16 + 4096
    ),
    aten._scaled_dot_product_flash_attention: _flash,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_efficient_attention: _efficient,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}
"""Workspace formulas by kernel. A kernel without one, such as cuDNN's, is measured if a card is present, else unknown."""

ESTIMATES: dict[Any, Callable[..., int]] = {aten._scaled_dot_product_cudnn_attention_backward: _flash_backward}
"""Estimates for kernels whose workspace depends on the library's version: the formula of a similar kernel."""
