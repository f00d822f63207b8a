"""Attention as CUDA computes it, for graphs that are planned for a CUDA device where there is none.

``scaled_dot_product_attention`` asks the device which kernel to take, and kernels differ in what they save: flash attention
a number per query, the plain product the whole matrix of probabilities.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

aten = torch.ops.aten

FLASH_WIDTH = 256
"""The widest heads that flash attention takes."""


def attention_on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` by the kernel that torch takes on recent CUDA devices: flash attention for half
    precision
    without a mask, memory-efficient attention for other dense cases, else the plain product. Shapes as there."""
    if _suits_flash(query, key, value, attn_mask):
        flash = aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out
    mask = None if attn_mask is None else _as_numbers(attn_mask, query)
    if _suits_efficient(query, key, value) and not enable_gqa:
        # For every head, which is what the kernel reads.
        bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        out = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
        return out
    plain = aten._scaled_dot_product_attention_math
    out = plain(query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    return out


def _dense(*tensors: torch.Tensor) -> bool:
    return all(t.dim() == 4 and t.stride(-1) == 1 for t in tensors)


def _suits_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    width, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    same = value.shape[-1] == width and width % 8 == 0
    return half and mask is None and same and width <= FLASH_WIDTH and _dense(query, key, value)


def _suits_efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    aligned = all(t.shape[-1] % (8 if half else 4) == 0 for t in (query, value))
    return (half or query.dtype is torch.float32) and aligned and _dense(query, key, value)


def _as_numbers(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The mask as numbers to add."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))


def with_attention_of_cuda(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, in place, with the attention of CUDA instead of that of the device that its tensors are said to be on."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
                node.target = attention_on_cuda
            part.recompile()
    return module
