"""Attention, norms and autocast of CUDA, for graphs that are planned for a CUDA device on a machine without one.

``scaled_dot_product_attention`` chooses its kernel by the device, and the kernels differ in the tensors that they save. Fused
kernels save one number per query; the plain product saves the whole matrix of probabilities. The rules are those of torch 2.11
to 2.15 (``sdp_utils.cpp`` and ``sdp_utils_cpp.h``), with the cuDNN of their wheels.

The root-mean-square norm of CUDA has a backward of its own. The CPU has no kernel for it, so autograd takes the norm apart.

``torch.autocast("cuda")`` has no effect on tensors of the CPU, which stand for those of the card. The casts are therefore
written into the graph that Dynamo captured. The lists of ops are those of torch's page "Automatic Mixed Precision package".
"""

import functools
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from autoremat.torch_private import MINOR

HALF = (torch.float16, torch.bfloat16)

FLASH_WIDTH = 256
"""Maximum head width of flash attention. Any smaller width is accepted and padded to a multiple of eight."""

CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))
"""Architectures on which torch tries cuDNN's attention first. ROCm has none."""

CUDNN_MOST = 65_535
"""Most batches, and most heads, of cuDNN's attention."""

SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Architectures on which the backward of flash attention supports fewer head widths above 192."""

Capability = tuple[int, int]


@dataclass(frozen=True)
class Attention:
    """The arguments of an attention on a device of the ``capability``, under torch 2.``minor``."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    capability: Capability
    minor: int = MINOR

    @property
    def kernel(self) -> str:
        """The first suitable kernel: "cudnn" on the newest servers, "flash" for half precision without a mask, "efficient" for
        other dense cases, "math", the plain product."""
        suits = {"cudnn": self._suits_cudnn, "flash": self._suits_flash, "efficient": self._suits_efficient}
        return next((kernel for kernel, is_suitable in suits.items() if is_suitable()), "math")

    @property
    def needs_gradients(self) -> bool:
        """True if the backward of the kernel will run."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._operands)

    @property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def _widths(self) -> tuple[int, int]:
        return self.query.shape[-1], self.value.shape[-1]

    def _is_dense(self, dtypes: tuple[torch.dtype, ...], any_stride_of_one: bool) -> bool:
        """Returns True if the operands have four dimensions, one of the types, and contiguous columns, as has the mask."""
        if any(tensor.dim() != 4 or tensor.dtype is not self.query.dtype for tensor in self._operands):
            return False
        if self.query.dtype not in dtypes or 0 in (self.query.shape[2], self.key.shape[2]):
            return False
        has_columns = all(tensor.stride(-1) == 1 for tensor in self._operands)
        is_single = any_stride_of_one and self.query.shape[-1] == 1
        return (has_columns or is_single) and (self.mask is None or self.mask.stride(-1) == 1)

    def _has_heads(self, takes_groups: bool, together: bool) -> bool:
        """Several heads share one under ``enable_gqa`` if the kernel ``takes_groups``; from torch 2.14, all may share one."""
        if len({tensor.shape[0] for tensor in self._operands}) > 1:
            return False
        queries, keys, values = (tensor.shape[1] for tensor in self._operands)
        if self.enable_gqa and takes_groups:
            return queries % keys == 0 and (values == keys if together else queries % values == 0)
        return queries == keys == values or (self.minor >= 14 and keys == values == 1)

    def _suits_cudnn(self) -> bool:
        enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        if self.capability not in CUDNN_FIRST or not enabled or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
            return False
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            return False
        if not self._is_dense(HALF, any_stride_of_one=True) or not self._has_heads(takes_groups=True, together=False):
            return False
        if self.minor >= 12 and self.dropout_p * 16 % 1:
            return False
        if self.minor >= 13 and max(self.query.shape[:2]) > CUDNN_MOST:
            return False
        if self.key.shape[2] == 1 or (self.query.shape[2] == 1 and self.dropout_p):
            return False
        if self.mask is not None:
            wanted = (*self.query.shape[:3], self.key.shape[2])[-self.mask.dim() :]
            fits = self.mask.dim() in (2, 4) and all(
                size in (1, most) for size, most in zip(self.mask.shape, wanted, strict=True)
            )
            if self.mask.requires_grad or not fits:
                return False
        widths = self._widths
        if any(width % 8 for width in widths):
            return False
        if self.minor >= 14:  # with cuDNN 9.22
            return max(widths) <= (128 if self.needs_gradients else 256) or widths in ((192, 128), (256, 256))
        return max(widths) <= (256 if self.capability[0] == 9 else 128) or (self.capability[0] == 10 and widths == (192, 128))

    def _suits_flash(self) -> bool:
        enabled: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        width, is_square = self.query.shape[-1], self.query.shape[2] == self.key.shape[2]
        if not enabled or self.capability < (8, 0) or self.mask is not None or (self.is_causal and not is_square):
            return False
        if not self._is_dense(HALF, any_stride_of_one=True) or not self._has_heads(takes_groups=True, together=True):
            return False
        if self.capability in SMALL_SHARED_MEMORY and self.needs_gradients:
            if 192 < width <= 224 or (width > 224 and self.dropout_p):
                return False
        return self.key.shape[-1] == self.value.shape[-1] == width <= FLASH_WIDTH

    def _suits_efficient(self) -> bool:
        enabled: bool = torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        is_recent, has_groups = self.capability >= (8, 0), self.minor >= 14
        dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if is_recent else ()))
        if not enabled or not self._is_dense(dtypes, any_stride_of_one=False) or not self._has_heads(has_groups, together=True):
            return False
        columns = 8 if self.query.dtype in HALF else 4 if is_recent else 1
        sizes = (*self._widths, *((t.storage_offset() for t in self._operands) if is_recent and self.minor >= 13 else ()))
        return self.key.shape[-1] == self.query.shape[-1] and all(size % columns == 0 for size in sizes)


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
        flash, step = aten._scaled_dot_product_flash_attention, width**-0.5 if scale is None else scale
        out: torch.Tensor = flash(*padded, dropout_p, is_causal, False, scale=step)[0]
        return out[..., :width] if width % 8 else out
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:  # as ATen writes it, so that a plan's graph is that of the card
        mask = torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=mask.device))
    if kernel == "cudnn":
        cudnn = aten._scaled_dot_product_cudnn_attention
        out = cudnn(query, key, value, mask, needs_gradients, dropout_p, is_causal, False, scale=scale)[0]
    elif kernel == "efficient":
        if mask is not None:  # the kernel reads one per head, with rows that ATen pads so
            keys, is_aligned = mask.shape[-1], all(stride % BIAS_ALIGNMENT == 0 for stride in mask.stride()[:-1])
            if mask.stride(-1) != 1 or not is_aligned:
                mask = F.pad(mask, (0, BIAS_ALIGNMENT - keys % BIAS_ALIGNMENT))[..., :keys]
            mask = mask.expand(*query.shape[:3], key.shape[2])
        efficient = aten._scaled_dot_product_efficient_attention
        out = efficient(query, key, value, mask, needs_gradients, dropout_p, is_causal, scale=scale)[0]
    else:
        plain = aten._scaled_dot_product_attention_math
        out = plain(query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    return out


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


SIXTEEN_BITS = frozenset(
    """
    addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d gru_cell linear lstm_cell matmul mm mv prelu rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention
""".split()
)
"""Ops that autocast runs in the 16-bit type."""

THIRTY_TWO_BITS = frozenset(
    """
    acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist cosine_similarity cumprod cumsum
    dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log_softmax log1p log2
    margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss nll_loss norm normalize pdist poisson_nll_loss pow
    prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum renorm tan triplet_margin_loss
""".split()
)
"""Ops that autocast runs in float32."""

WIDEST = frozenset(
    ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sample", "index_put", "scatter_add", "tensordot"]
)
"""Ops that autocast runs in the widest type among their arguments."""

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast

CROSS_ENTROPY = inspect.signature(F.cross_entropy)

CAST_TYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Types that autocast casts. Double precision stays as it is."""


def write_casts(graph: fx.Graph) -> None:
    """Makes the casts of the autocast regions on CUDA ops of their own, in place."""
    regions: dict[fx.Node, torch.dtype | None] = {}  # None where autocast is off
    for node in list(graph.nodes):
        if node.target is ENTER and node.args[0] == "cuda":
            regions[node] = (node.args[1] or torch.float16) if node.args[2] else None
        elif node.target is EXIT and node.args[0] in regions:
            entered = node.args[0]
            del regions[entered]
            graph.erase_node(node)
            graph.erase_node(entered)
        elif regions and (dtype := [*regions.values()][-1]) is not None:
            _cast_in(node, dtype)


def _cast_in(node: fx.Node, half: torch.dtype) -> None:
    if node.op not in ("call_function", "call_method"):
        return
    if node.target is F.cross_entropy:
        node.target = cross_entropy
        return
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.strip("_")
    read = node.all_input_nodes[::-1]  # torch casts the last argument first
    with node.graph.inserting_before(node):
        if name in SIXTEEN_BITS or name in THIRTY_TWO_BITS:
            dtype = half if name in SIXTEEN_BITS else torch.float32
            cast = {argument: node.graph.call_function(to_type, (argument, dtype)) for argument in read}
        elif name in WIDEST:
            cast = {argument: node.graph.call_function(to_widest, (argument, *read)) for argument in read}
        else:
            return
    for argument, replacement in cast.items():
        node.replace_input_with(argument, replacement)


def cross_entropy(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns ``F.cross_entropy`` as autocast runs it: the logarithms in the type of the input, their mean in float32."""
    bound = CROSS_ENTROPY.bind(input, target, *args, **kwargs)
    if bound.arguments.get("label_smoothing") or target.is_floating_point():
        return F.cross_entropy(input.float(), target, *args, **kwargs)
    logarithms = F.log_softmax(input, 0 if input.dim() == 1 else 1)
    shared = {name: value for name, value in bound.arguments.items() if name not in ("input", "target", "label_smoothing")}
    return F.nll_loss(logarithms.float(), target, **shared)


def to_type(value: Any, dtype: torch.dtype) -> Any:
    """Returns a tensor that autocast casts in ``dtype``; anything else as it is."""
    return value.to(dtype) if _is_cast(value) else value


def to_widest(value: Any, *values: Any) -> Any:
    """Returns ``value`` in the widest type among ``values``."""
    types = [other.dtype for other in values if _is_cast(other)]
    return to_type(value, functools.reduce(torch.promote_types, types)) if types else value


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in CAST_TYPES
