"""The root-mean-square norm as CUDA computes it, for graphs that are planned for a CUDA device on a machine without one.

Torch's kernel for CUDA has a backward of its own. The CPU has no kernel, so autograd takes the norm apart there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

aten = torch.ops.aten

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats by number of dimensions."""


class _FusedNorm(torch.autograd.Function):
    """The kernel of CUDA and its backward."""

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


def with_norms_of_cuda(module: fx.GraphModule) -> fx.GraphModule:
    """Returns ``module``, rewritten in place to use the norms of CUDA devices."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for target in (F.rms_norm, torch.rms_norm):
                for node in part.graph.find_nodes(op="call_function", target=target):
                    node.target = norm_on_cuda
            part.recompile()
    return module
