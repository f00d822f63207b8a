"""Attention and norms as CUDA computes them, for graphs that are planned for a CUDA device on a machine without one.

``scaled_dot_product_attention`` chooses its kernel by the device, and the kernels differ in the tensors that they save. Fused
kernels save one number per query; the plain product saves the whole matrix of probabilities. The root-mean-square norm of CUDA
has a backward of its own. The CPU has no kernel for it, so autograd takes the norm apart there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from autoremat.tools.attention_rules import Attention, Capability

aten = torch.ops.aten

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats by number of dimensions."""

BIAS_ALIGNMENT = 8
"""Memory-efficient attention reads masks whose rows begin at a multiple of so many elements."""


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

    Shapes and arguments are those of torch's function.
    """
    attention = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability)
    kernel, needs_gradients = attention.kernel, attention.needs_gradients
    if kernel == "flash":
        width = query.shape[-1]
        padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value)]
        flash = aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(*padded, dropout_p, is_causal, False, scale=width**-0.5 if scale is None else scale)[0]
        return out[..., :width] if width % 8 else out
    mask = None if attn_mask is None else _as_numbers(attn_mask, query)
    if kernel == "cudnn":
        cudnn = aten._scaled_dot_product_cudnn_attention
        out = cudnn(query, key, value, mask, needs_gradients, dropout_p, is_causal, False, scale=scale)[0]
        return out
    if kernel == "efficient":
        # The kernel reads one mask per head.
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        out = efficient(query, key, value, bias, needs_gradients, dropout_p, is_causal, scale=scale)[0]
        return out
    plain = aten._scaled_dot_product_attention_math
    out = plain(query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    return out


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Returns the mask with rows that memory-efficient attention can read, as ATen pads it."""
    if mask.stride(-1) == 1 and all(stride % BIAS_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    keys = mask.shape[-1]
    return F.pad(mask, (0, BIAS_ALIGNMENT - keys % BIAS_ALIGNMENT))[..., :keys]


def _as_numbers(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask
    # As ATen writes it, so that a plan's graph is that of the card.
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=mask.device))


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
        out: Tensor
        out, inverse_deviation = aten._fused_rms_norm(image, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(image, weight, inverse_deviation)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        image, weight, inverse_deviation = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_image, of_weight = aten._fused_rms_norm_backward(gradient, image, ctx.shape, inverse_deviation, weight, wanted)
        return of_image, None, of_weight, None


def norm_on_cuda(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Returns ``rms_norm`` with the backward that it has on CUDA.

    Torch has no kernel for images with the channels last, for complex numbers, and for a weight of another type.
    """
    last = CHANNELS_LAST.get(input.dim())
    is_last = last is not None and input.is_contiguous(memory_format=last) and not input.is_contiguous()
    if is_last or input.is_complex() or (weight is not None and weight.dtype is not input.dtype):
        return F.rms_norm(input, list(normalized_shape), weight, eps)
    out: Tensor = _FusedNorm.apply(input, normalized_shape, weight, eps)  # type: ignore[no-untyped-call]
    return out


def use_kernels_of_cuda(graph: fx.Graph, capability: Capability) -> None:
    """Has ``graph`` use the attention kernels of CUDA devices of the ``capability``, and the norms of CUDA, in place.

    The device of its fake tensors no longer decides which kernel is taken.
    """
    for node in graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        node.target = attention_on_cuda
        node.kwargs = {**node.kwargs, "capability": capability}
    for target in (F.rms_norm, torch.rms_norm):
        for node in graph.find_nodes(op="call_function", target=target):
            node.target = norm_on_cuda
