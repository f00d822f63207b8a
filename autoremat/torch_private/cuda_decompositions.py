"""Inductor's decompositions as for CUDA tensors, for tensors of the CPU that stand for a card that is not here.

Torch writes some ops as other ops on CUDA than on the CPU. A plan that is made without the card fits the graph on the card only
if both graphs have the same ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

BATCH_NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
)


def as_on_cuda() -> dict[Any, Callable[..., Any]]:
    """Returns Inductor's decompositions, with those of CUDA where they differ.

    Not covered: products of matrices with one row and one column, ``log_sigmoid``, and upsampling of few channels.
    """
    from torch._inductor.decomposition import select_decomp_table

    table: dict[Any, Callable[..., Any]] = select_decomp_table()
    batch_norms = {op: _batch_norm_of(table[op]) for op in BATCH_NORMS if op in table}
    return {
        **table,
        **batch_norms,
        aten.convolution_backward.default: convolution_backward,
        aten.native_layer_norm.default: _layer_norm_of(table[aten.native_layer_norm.default]),
        aten.native_group_norm.default: _group_norm_of(table[aten.native_group_norm.default]),
    }


def convolution_backward(gradient: Tensor, image: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any) -> Any:
    """Returns the gradients of a convolution. That of the bias is a sum of its own, as on GPUs."""
    *others, (of_image, of_weight, of_bias) = rest
    if not of_bias:
        return NotImplemented
    summed = gradient.sum([0, *range(2, gradient.dim())])
    mask = [of_image, of_weight, False]
    image_gradient, weight_gradient, _ = aten.convolution_backward(gradient, image, weight, bias_sizes, *others, mask)
    return image_gradient, weight_gradient, summed


def _layer_norm_of(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the layer norm with statistics in 32 bits for 16-bit inputs, as on CUDA."""

    def native_layer_norm(image: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        out, mean, inverse_deviation = reference(_widened(image), shape, None, None, eps)
        return _scaled(out, weight, bias).to(image.dtype), mean, inverse_deviation

    return native_layer_norm


def _batch_norm_of(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the batch norm with statistics in 32 bits for 16-bit inputs, as on CUDA."""

    def native_batch_norm(image: Tensor, *rest: Any) -> Any:
        out, *statistics = reference(_widened(image), *rest)
        return out.to(image.dtype), *statistics

    return native_batch_norm


def _group_norm_of(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the group norm that is scaled after it is centred, as on CUDA."""

    def native_group_norm(image: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> Any:
        out, mean, inverse_deviation = reference(_widened(image), None, None, *sizes)
        channels = (1, -1, *(1 for _ in image.shape[2:]))
        scale, shift = (None if tensor is None else tensor.reshape(channels) for tensor in (weight, bias))
        return tuple(tensor.to(image.dtype) for tensor in (_scaled(out, scale, shift), mean, inverse_deviation))

    return native_group_norm


def _widened(tensor: Tensor) -> Tensor:
    """Returns a 16-bit tensor in 32 bits; any other as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _scaled(tensor: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    tensor = tensor if scale is None else tensor * scale
    return tensor if shift is None else tensor + shift
