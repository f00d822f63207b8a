"""Memory that CUDA kernels allocate for the time of one call, beside their results, in bytes: one formula for each kernel.

They are read off torch's sources and not held against an allocator. Matrix products need nothing: the workspace of cuBLAS
(8 MiB, 32 MiB on Hopper) is made for a stream at its first product and stays, so only the first step of a process makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoremat.torch_private.compat import size_hint

aten = torch.ops.aten

MOST_MULTIPROCESSORS = 192
"""Of any card's: so many attention keeps busy by dividing sums."""

FLASH_ROWS = 64
"""Queries of a block of flash attention's forward."""


def _padded(count: int, block: int) -> int:
    return -(-count // block) * block


def _columns(width: int) -> int:
    """Columns that flash attention computes for heads of that width."""
    return _padded(width, 32 if width <= 128 else 64)


def _flash(query: torch.Tensor, key: torch.Tensor, _: Any, dropout_p: float = 0.0, *__: Any, **___: Any) -> int:
    """Where few queries leave the card idle, keys are divided among blocks, each with an output in float32 and sums of rows."""
    batch, heads, queries, width = (size_hint(s) for s in query.shape)
    idle = batch * heads * -(-queries // FLASH_ROWS) < 0.8 * 2 * MOST_MULTIPROCESSORS
    parts = min(128, -(-size_hint(key.shape[2]) // (256 if width <= 64 else 128 if width <= 128 else 64)))
    return 4 * batch * heads * queries * (_columns(width) + 1) * parts if idle and parts > 1 and not dropout_p else 0


def _flash_backward(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> int:
    """The query's gradient is accumulated in float32, with a row sum per query, rows and columns padded to blocks; several
    times where the order of sums is to be fixed. Where heads share keys, gradients of keys and values are made for each. The
    output's gradient is read token by token, all heads of one together, and copied if it does not lie so."""
    batch, heads, queries, width = (size_hint(s) for s in query.shape)
    parts = -(-MOST_MULTIPROCESSORS // (batch * heads)) if torch.are_deterministic_algorithms_enabled() else 1
    accumulated = 4 * batch * heads * _padded(queries, 128) * (_columns(width) * parts + 1)
    shared = size_hint(key.shape[1]) != heads
    ungrouped = 2 * batch * size_hint(key.shape[2]) * heads * width * key.element_size() if shared else 0
    lies_by_token = gradient.transpose(1, 2).is_contiguous()
    return accumulated + ungrouped + (0 if lies_by_token else batch * heads * queries * width * gradient.element_size())


def _efficient(query: torch.Tensor, _: Any, value: torch.Tensor, *__: Any, **___: Any) -> int:
    """In half precision the output of wide heads is accumulated in float32."""
    batch, heads, queries, _ = (size_hint(s) for s in query.shape)
    width = size_hint(value.shape[3])
    return 4 * batch * heads * queries * width if query.element_size() < 4 and width > 128 else 0


def _efficient_backward(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any) -> int:
    """In half precision the query's gradient is accumulated in float32, in blocks, and with wide heads those of keys and
    values, several times where few heads leave the card idle. In float32 the product of the output and its gradient is made
    instead."""
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


def _scan(operand: torch.Tensor, *_: Any, **__: Any) -> int:
    """Each block of the scan of one long row leaves its state; Inductor's own scan does so in a buffer of the code."""
    return size_hint(operand.numel()) // 16 + 4096


def _none(*_: Any, **__: Any) -> int:
    return 0


FORMULAS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _none),
    **dict.fromkeys((aten.cumsum, aten.cumprod, aten.logcumsumexp), _scan),
    aten._scaled_dot_product_flash_attention: _flash,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_efficient_attention: _efficient,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}
"""Kernels without one, such as those of cuDNN, are measured where there is a card, and else unknown."""

ESTIMATES: dict[Any, Callable[..., int]] = {aten._scaled_dot_product_cudnn_attention_backward: _flash_backward}
"""For kernels that ask for what they like, by version: what the like of them needs."""
