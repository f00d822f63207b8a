"""The work of an op, in units of the rates that a device is calibrated for: FLOPs, memory traffic, arithmetic.

There is one table per class of arithmetic. An op in none of the tables is charged for its bytes. A fused op has the rate of
sequential access. A kernel of its own has the rate of indexed access, which is slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoremat.ops import op_traits
from autoremat.planner.cost import BATCH, Rate, Task, Work
from autoremat.planner.graph.graph import Kind, Op
from autoremat.torch_private.compat import size_hint

aten = torch.ops.aten
prims = torch.ops.prims

FUSED_SHARE = 3
"""A fused pointwise op is charged 1/``FUSED_SHARE`` of the bytes that it would move alone: its share of the chain's traffic."""

BATCHED = frozenset({aten.bmm, aten.baddbmm})

ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
        aten._flash_attention_forward, aten._efficient_attention_forward,
    }
)  # fmt: skip

ATTENTION_BACKWARD = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu_backward, aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward, aten._scaled_dot_product_cudnn_attention_backward,
        aten._flash_attention_backward, aten._efficient_attention_backward,
    }
)  # fmt: skip

# Arguments are (image, weight, ..., groups). The backward has the result's gradient in front.
CONVOLUTION = frozenset({aten.convolution, aten._convolution, aten.cudnn_convolution, aten.convolution_overrideable})
CONVOLUTION_BACKWARD = frozenset({aten.convolution_backward})

EXPONENTIAL = frozenset(
    {
        aten.exp, aten.exp2, aten.expm1, aten.log, aten.log2, aten.log10, aten.log1p, aten.sigmoid, aten.silu,
        aten.silu_backward, aten.softplus, aten.softplus_backward, aten.sin, aten.cos, aten.elu, aten.elu_backward,
        aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.mish, aten.logaddexp,
    }
)  # fmt: skip

SPECIAL = frozenset(
    {
        aten.tanh, aten.erf, aten.erfc, aten.erfinv, aten.gelu, aten.gelu_backward, aten.pow, aten.tan, aten.sinh, aten.cosh,
        aten.asin, aten.acos, aten.atan, aten.atan2, aten.lgamma, aten.digamma, aten._thnn_fused_lstm_cell,
        aten._thnn_fused_lstm_cell_backward_impl, aten._thnn_fused_gru_cell, aten._thnn_fused_gru_cell_backward,
    }
)  # fmt: skip

NORMALISATION = frozenset(
    {
        aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data, aten.logsumexp,
        aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm, aten.native_group_norm_backward,
        aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional,
        aten.native_batch_norm_backward, aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward, aten._fused_rms_norm,
        aten._fused_rms_norm_backward, aten.var_mean, aten.var, aten.std,
    }
)  # fmt: skip

SORT = frozenset({aten.sort, aten.topk, aten.kthvalue, aten.median, aten.mode, aten.argsort, aten._unique2, aten.unique_dim})

SCAN = frozenset({aten.cumsum, aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp, aten._cummax_helper})

WINDOW = frozenset(
    {
        aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices, aten.avg_pool2d,
        aten.avg_pool2d_backward, aten.avg_pool3d, aten.avg_pool3d_backward, aten._adaptive_avg_pool2d,
        aten._adaptive_avg_pool2d_backward, aten._adaptive_avg_pool3d, aten.adaptive_max_pool2d, aten.upsample_nearest2d,
        aten.upsample_nearest2d_backward, aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward,
        aten.upsample_bicubic2d, aten.upsample_bicubic2d_backward, aten.grid_sampler_2d, aten.grid_sampler_2d_backward,
        aten.im2col, aten.col2im, prims._low_memory_max_pool_with_offsets, prims._low_memory_max_pool_offsets_to_indices,
    }
)  # fmt: skip

GATHER = frozenset(
    {aten.embedding, aten.index, aten._unsafe_index, aten.gather, aten.index_select, aten.take, aten._unsafe_masked_index}
)

SCATTER = frozenset(
    {
        aten.index_put, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate, aten.scatter, aten.scatter_add,
        aten.scatter_reduce, aten.index_add, aten.index_copy, aten.embedding_dense_backward, aten.masked_scatter, aten.put,
    }
)  # fmt: skip


def work_of(node: fx.Node, op: Op) -> Work:
    """Returns the work of ``node``, which the graph knows as ``op``."""
    if op.flops:
        launches, known = True, True
        tasks = [_flops(node, op.flops), Task(Rate.STREAM, op.bytes_moved)]
    else:
        launches = op.kind is Kind.EXTERN and not op_traits.adds_to_product(node)
        traffic, arithmetic = _traffic(node, op, launches), _arithmetic(node, launches)
        known = not launches or arithmetic is not None or op_traits.packet(node) in GATHER | SCATTER
        tasks = [traffic, arithmetic] if arithmetic is not None else [traffic]
    return Work(tuple(task for task in tasks if task.amount > 0), launches, known)


def arithmetic_of(node: fx.Node) -> Work:
    """Returns the arithmetic of a fused ``node``, without memory traffic."""
    arithmetic = _arithmetic(node, launches=False)
    return Work(() if arithmetic is None else (arithmetic,))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _operands(node: fx.Node) -> list[torch.Tensor]:
    return [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))]


def _elements(tensors: list[torch.Tensor]) -> int:
    return max((size_hint(t.numel()) for t in tensors), default=0)


def _dtype(node: fx.Node) -> str:
    """Returns the element type of the computation: that of the first operand that is not an integer tensor."""
    types = [t.dtype for t in _operands(node) if t.dtype.is_floating_point or t.dtype.is_complex]
    return str(types[0]).removeprefix("torch.") if types else "float32"


def _flops(node: fx.Node, flops: int) -> Task:
    name, dtype = op_traits.packet(node), _dtype(node)
    if name in BATCHED:
        batch = max(size_hint(_operands(node)[-1].shape[0]), 1)
        return Task(Rate.BATCHED_MATMUL, flops / batch * BATCH, dtype, batch / BATCH)
    if name in ATTENTION:
        return Task(Rate.ATTENTION, flops, dtype)
    if name in ATTENTION_BACKWARD:
        return Task(Rate.ATTENTION_BACKWARD, flops, dtype)
    if name in CONVOLUTION or name in CONVOLUTION_BACKWARD:
        return Task(_convolution_rate(node), flops, dtype)
    return Task(Rate.MATMUL, flops, dtype)


def _convolution_rate(node: fx.Node) -> Rate:
    """Returns the rate of a convolution by its kernel (pointwise, depthwise, other), forward or backward."""
    backward = op_traits.packet(node) in CONVOLUTION_BACKWARD
    weight = _operands(node)[2 if backward else 1]
    if size_hint(weight.shape[1]) == 1 and size_hint(weight.shape[0]) > 1:
        return Rate.DEPTHWISE_CONVOLUTION_BACKWARD if backward else Rate.DEPTHWISE_CONVOLUTION
    if all(size_hint(side) == 1 for side in weight.shape[2:]):
        return Rate.POINT_CONVOLUTION_BACKWARD if backward else Rate.POINT_CONVOLUTION
    return Rate.CONVOLUTION_BACKWARD if backward else Rate.CONVOLUTION


def _traffic(node: fx.Node, op: Op, launches: bool) -> Task:
    name = op_traits.packet(node)
    if name in GATHER:
        # The op reads only the selected rows of the table. The indices themselves are few bytes in comparison.
        picked = 2 * sum(size_hint(t.numel()) * t.element_size() for t in _tensors(node.meta.get("val")))
        return Task(Rate.GATHER, picked)
    if name in SCATTER:
        return Task(Rate.SCATTER, op.bytes_moved)
    if launches:
        return Task(Rate.STREAM if _arithmetic(node, launches) else Rate.GATHER, op.bytes_moved)
    return Task(Rate.STREAM, op.bytes_moved / FUSED_SHARE if op.kind is not Kind.REDUCTION else op.bytes_moved)


def _arithmetic(node: fx.Node, launches: bool) -> Task | None:
    name, read = op_traits.packet(node), _elements(_operands(node))
    made = _elements(_tensors(node.meta.get("val")))
    for rate, members in _BY_ELEMENT.items():
        if name in members:
            return Task(rate, max(read, made))
    if op_traits.is_random(node) or getattr(name, "__name__", "") in op_traits.DRAWS:
        return Task(Rate.RANDOM, made)
    if name in op_traits.REDUCTION:
        return Task(Rate.REDUCTION, read)
    return None if launches else Task(Rate.CHEAP, made)


_BY_ELEMENT = {
    Rate.EXPONENTIAL: EXPONENTIAL,
    Rate.SPECIAL: SPECIAL,
    Rate.NORMALISATION: NORMALISATION,
    Rate.SORT: SORT,
    Rate.SCAN: SCAN,
    Rate.WINDOW: WINDOW,
}
