"""Attention as CUDA computes it, for graphs that are planned for a CUDA device on a machine without one.

``scaled_dot_product_attention`` chooses its kernel by the device, and the kernels differ in the tensors that they save. Fused
kernels save one number per query; the plain product saves the whole matrix of probabilities. The rules here are those of
``sdp_utils.cpp`` in torch 2.13, with the cuDNN of its wheels.
"""

from __future__ import annotations

import os

import torch
from torch import fx
from torch.nn import functional as F

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)

FLASH_WIDTH = 256
"""Maximum head width of flash attention. Any smaller width is accepted and padded to a multiple of eight."""

CUDNN_WIDTH = {(9, 0): 256, (10, 0): 128, (10, 3): 128}
"""Maximum head width of cuDNN's attention, for the architectures on which torch tries it first. ROCm has none."""

SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Architectures on which the backward of flash attention supports fewer head widths above 192."""

Capability = tuple[int, int]


def attention_on_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    capability: Capability = (8, 0),
) -> torch.Tensor:
    """Returns ``scaled_dot_product_attention`` by the kernel that torch chooses on CUDA devices of the ``capability``.

    The first suitable kernel is taken:

    1. cuDNN on the newest server GPUs;
    2. flash attention for half precision without a mask;
    3. memory-efficient attention for other dense cases;
    4. the plain product.

    Shapes and arguments are those of torch's function.
    """
    if _suits_cudnn(query, key, value, attn_mask, dropout_p, capability):
        mask = None if attn_mask is None else _as_numbers(attn_mask, query)
        cudnn = aten._scaled_dot_product_cudnn_attention
        out: torch.Tensor = cudnn(query, key, value, mask, True, dropout_p, is_causal, False, scale=scale)[0]
        return out
    if _suits_flash(query, key, value, attn_mask, dropout_p, is_causal, capability):
        width = query.shape[-1]
        padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value)]
        flash = aten._scaled_dot_product_flash_attention
        out = flash(*padded, dropout_p, is_causal, False, scale=width**-0.5 if scale is None else scale)[0]
        return out[..., :width] if width % 8 else out
    mask = None if attn_mask is None else _as_numbers(attn_mask, query)
    if _suits_efficient(query, key, value, capability) and not enable_gqa:
        # The kernel reads one mask per head.
        bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        out = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
        return out
    plain = aten._scaled_dot_product_attention_math
    out = plain(query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    return out


def _dense(*tensors: torch.Tensor) -> bool:
    """Returns True if all tensors have four dimensions and contiguous columns."""
    return all(t.dim() == 4 and t.stride(-1) == 1 for t in tensors)


def _suits_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    capability: Capability,
) -> bool:
    """Returns True if torch tries cuDNN's attention first and it accepts these operands."""
    widest = CUDNN_WIDTH.get(capability)
    enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    if widest is None or not enabled or "TORCH_CUDNN_SDPA_DEPRIORITIZED" in os.environ:
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if query.dtype not in HALF or not _dense(query, key, value) or (mask is not None and mask.requires_grad):
        return False
    if key.shape[2] == 1 or (query.shape[2] == 1 and dropout_p) or dropout_p * 16 % 1:
        return False
    widths = (query.shape[-1], value.shape[-1])
    return all(width % 8 == 0 for width in widths) and (max(widths) <= widest or (capability[0], *widths) == (10, 192, 128))


def _suits_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    capability: Capability,
) -> bool:
    """Returns True if flash attention is enabled and accepts these operands."""
    width = query.shape[-1]
    if capability < (8, 0) or query.dtype not in HALF or mask is not None or not _dense(query, key, value):
        return False
    if is_causal and query.shape[2] != key.shape[2]:
        return False
    if capability in SMALL_SHARED_MEMORY and (192 < width <= 224 or (width > 224 and dropout_p)):
        return False
    enabled: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return enabled and value.shape[-1] == width <= FLASH_WIDTH


def _suits_efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, capability: Capability) -> bool:
    """Returns True if memory-efficient attention is enabled and accepts these operands."""
    recent = capability >= (8, 0)
    if query.dtype not in (*HALF, torch.float32) or (query.dtype is torch.bfloat16 and not recent):
        return False
    columns = 8 if query.dtype in HALF else 4 if recent else 1
    aligned = all(t.shape[-1] % columns == 0 for t in (query, value))
    enabled: bool = torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
    return enabled and aligned and _dense(query, key, value)


def _as_numbers(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns the mask as numbers to add to the scores."""
    if mask.dtype is not torch.bool:
        return mask
    # As ATen writes it, so that a plan's graph is that of the card.
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=mask.device))


def with_attention_of_cuda(module: fx.GraphModule, capability: Capability) -> fx.GraphModule:
    """Returns ``module``, rewritten in place to use the attention kernels of CUDA devices of the ``capability``.

    The device of its fake tensors no longer decides which kernel is taken.
    """
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
                node.target = attention_on_cuda
                node.kwargs = {**node.kwargs, "capability": capability}
            part.recompile()
    return module
