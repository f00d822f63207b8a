"""The table of facts about ops: fusion, rate of arithmetic, memory behaviour. A new op, or a new fact, is added here.

Facts that torch's schemas and tags declare are not repeated; :mod:`autoremat.ops.op_traits` reads them. Sizes of workspaces
are functions of a device's kernels, not facts about an op: see :mod:`autoremat.workspaces.formulas`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from autoremat.planner.cost.device import Rate
from autoremat.planner.graph.op import Kind
from autoremat.torch_private import compilers as compilers  # registers Inductor's own ops

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class OpFacts:
    """One row of the table."""

    kind: Kind | None = None
    """The way in which Inductor computes the result; None if torch's ``pointwise`` tag decides."""
    rate: Rate | None = None
    """The class of the op's arithmetic, or of its memory accesses if these are indexed."""
    moves: bool = False
    """A pointwise op that reads other positions than it writes."""
    scatters: bool = False
    """Writes into a copy of its first argument."""
    adds: bool = False
    """A scatter for which Inductor calls ATen on CPUs, because several threads would add to the same element."""
    computed_once: bool = False
    """Inductor computes it only once on CPUs if several ops read its result, directly or through other ops."""
    chooses: bool = False
    """The result jumps when the last bit of an input changes."""
    by_strides: bool = False
    """The result depends on the memory layout of the first operand."""
    sorts_on_cpu: bool = False
    """Builds an index or a sorted copy first, of the size of its results, in 32 bits at least."""
    expands: bool = False
    """Elementwise by torch's tag, but allocates intermediate results larger than its own."""
    copies_storage: bool = False
    """Copies the whole storage of a view. A fake result may not show this."""

    @property
    def is_product(self) -> bool:
        """True for matrix products, for which ATen may copy operands."""
        return self.rate is Rate.MATMUL

    @property
    def is_attention(self) -> bool:
        """True for fused attention, forward and backward."""
        return self.rate in (Rate.ATTENTION, Rate.ATTENTION_BACKWARD)

    @property
    def reduces(self) -> bool:
        """True for reductions, False for scatters, which have the same kind."""
        return self.kind is Kind.REDUCTION and not self.scatters


# fmt: off
ROWS: tuple[tuple[OpFacts, tuple[Any, ...]], ...] = (
    # Loops over the elements of their result, without torch's `pointwise` tag or with more to say than it does.
    (OpFacts(kind=Kind.POINTWISE),
     (aten._to_copy, aten.arange, aten.clone, aten.empty, aten.empty_like, aten.fill, aten.full, aten.full_like,
      aten.lift_fresh_copy, aten.masked_fill, aten.native_dropout_backward, aten.new_empty, aten.new_full, aten.new_zeros,
      aten.ones, aten.ones_like, aten.scalar_tensor, aten.sigmoid_backward, aten.tanh_backward, aten.threshold_backward,
      aten.tril, aten.triu, aten.where, aten.zeros, aten.zeros_like, prims._low_memory_max_pool_offsets_to_indices,
      prims.broadcast_in_dim, prims.convert_element_type, prims.device_put, prims.iota)),
    (OpFacts(kind=Kind.POINTWISE, moves=True),
     (aten.cat, aten.constant_pad_nd, aten.flip, aten.repeat, aten.roll, aten.upsample_nearest2d, prims.rev)),
    (OpFacts(kind=Kind.POINTWISE, moves=True, by_strides=True, copies_storage=True),
     (aten.as_strided_scatter,)),
    (OpFacts(kind=Kind.POINTWISE, copies_storage=True),
     (aten.copy, aten.diagonal_scatter, aten.select_scatter, aten.slice_scatter)),
    (OpFacts(kind=Kind.POINTWISE, rate=Rate.GATHER, moves=True),
     (aten._unsafe_index, aten._unsafe_masked_index, aten.embedding)),
    (OpFacts(kind=Kind.POINTWISE, rate=Rate.GATHER, moves=True, sorts_on_cpu=True),
     (aten.gather, aten.index, aten.index_select)),
    (OpFacts(kind=Kind.POINTWISE, rate=Rate.SPECIAL),
     (aten.gelu_backward,)),
    # Reductions.
    (OpFacts(kind=Kind.REDUCTION),
     (aten.all, aten.amax, aten.amin, aten.aminmax, aten.any, aten.linalg_vector_norm, aten.mean, aten.norm, aten.prod,
      aten.sum, prims.amax, prims.amin, prims.sum, prims.var, prims.xor_sum)),
    (OpFacts(kind=Kind.REDUCTION, chooses=True),
     (aten.argmax, aten.argmin)),
    (OpFacts(kind=Kind.REDUCTION, sorts_on_cpu=True),
     (aten.max, aten.min)),
    (OpFacts(kind=Kind.REDUCTION, rate=Rate.EXPONENTIAL),
     (aten._fused_rms_norm, aten._log_softmax, aten._log_softmax_backward_data, aten._softmax,
      aten._softmax_backward_data, aten.logsumexp, aten.std, aten.var, aten.var_mean)),
    (OpFacts(kind=Kind.REDUCTION, rate=Rate.EXPONENTIAL, sorts_on_cpu=True),
     (aten.native_layer_norm,)),
    # Scatters: one loop computes and writes the new elements of a copy of the first argument.
    (OpFacts(kind=Kind.REDUCTION, scatters=True, adds=True, sorts_on_cpu=True),
     (aten.scatter_add,)),
    (OpFacts(kind=Kind.REDUCTION, scatters=True),
     (aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate)),
    (OpFacts(kind=Kind.REDUCTION, scatters=True, sorts_on_cpu=True),
     (aten.index_put, aten.scatter)),
    # All others: the kind follows from torch's tag.
    (OpFacts(by_strides=True),
     (aten.as_strided,)),
    (OpFacts(chooses=True),
     (aten.argsort, aten.bucketize, aten.kthvalue, aten.max.dim, aten.min.dim, aten.searchsorted)),
    (OpFacts(expands=True),
     (aten.mvlgamma,)),
    (OpFacts(rate=Rate.MATMUL),
     (aten._scaled_mm, aten.addmm, aten.baddbmm, aten.bmm, aten.mm)),
    (OpFacts(rate=Rate.ATTENTION),
     (aten._efficient_attention_forward, aten._flash_attention_forward, aten._scaled_dot_product_cudnn_attention,
      aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_flash_attention,
      aten._scaled_dot_product_flash_attention_for_cpu)),
    (OpFacts(rate=Rate.ATTENTION_BACKWARD),
     (aten._efficient_attention_backward, aten._flash_attention_backward,
      aten._scaled_dot_product_cudnn_attention_backward, aten._scaled_dot_product_efficient_attention_backward,
      aten._scaled_dot_product_flash_attention_backward, aten._scaled_dot_product_flash_attention_for_cpu_backward)),
    (OpFacts(rate=Rate.CONVOLUTION),
     (aten._convolution, aten.convolution, aten.convolution_overrideable, aten.cudnn_convolution)),
    (OpFacts(rate=Rate.CONVOLUTION_BACKWARD),
     (aten.convolution_backward,)),
    (OpFacts(rate=Rate.DIVISION),
     (aten.div, aten.fmod, aten.reciprocal, aten.remainder, aten.rsqrt, aten.sqrt)),
    (OpFacts(rate=Rate.EXPONENTIAL),
     (aten._fused_rms_norm_backward, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional, aten.cos,
      aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward, aten.elu, aten.elu_backward, aten.exp2, aten.expm1,
      aten.log_sigmoid_backward, aten.log_sigmoid_forward, aten.logaddexp, aten.mish, aten.native_batch_norm_backward,
      aten.native_group_norm, aten.native_group_norm_backward, aten.silu, aten.silu_backward, aten.sin, aten.softplus,
      aten.softplus_backward)),
    (OpFacts(rate=Rate.EXPONENTIAL, computed_once=True),
     (aten.exp, aten.log, aten.log10, aten.log1p, aten.log2, aten.sigmoid, aten.tanh)),
    (OpFacts(rate=Rate.GATHER),
     (aten.take,)),
    (OpFacts(rate=Rate.EXPONENTIAL, sorts_on_cpu=True),
     (aten.native_batch_norm, aten.native_layer_norm_backward)),
    (OpFacts(adds=True),
     (aten.scatter_reduce,)),
    (OpFacts(sorts_on_cpu=True),
     (aten.cummax, aten.cummin, aten.embedding_dense_backward, aten.index_add)),
    (OpFacts(chooses=True, sorts_on_cpu=True),
     (aten.median, aten.mode, aten.sort, aten.topk)),
    (OpFacts(rate=Rate.SPECIAL),
     (aten._thnn_fused_gru_cell, aten._thnn_fused_gru_cell_backward, aten._thnn_fused_lstm_cell,
      aten._thnn_fused_lstm_cell_backward_impl, aten.acos, aten.asin, aten.atan, aten.atan2, aten.cosh, aten.digamma,
      aten.erf, aten.erfc, aten.erfinv, aten.gelu, aten.lgamma, aten.pow, aten.sinh, aten.tan)),
)
"""The rows of the table: facts, and the ops that have them."""
# fmt: on

_TABLE = {op: facts for facts, ops in ROWS for op in ops}
_UNLISTED = OpFacts()


def facts_of(op: Any) -> OpFacts:
    """Returns the row for exactly ``op``, or the defaults if the table does not list it.

    Most rows list overload packets, a few list single overloads. :func:`autoremat.ops.op_traits.facts` looks up the packet
    of a node.
    """
    return _TABLE.get(op, _UNLISTED)
