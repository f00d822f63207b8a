"""Autocast as CUDA does it, for graphs that are planned for a CUDA device on a machine without one.

``torch.autocast("cuda")`` has no effect on tensors of the CPU, which stand for those of the card. The casts are therefore
written into the graph that Dynamo captured. The lists of ops are those of torch's page "Automatic Mixed Precision package".
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

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


@dataclass(frozen=True)
class Region:
    """A region of autocast on CUDA."""

    dtype: torch.dtype
    is_enabled: bool


def write_casts(graph: fx.Graph) -> None:
    """Makes the casts of the autocast regions on CUDA ops of their own, in place."""
    regions: dict[fx.Node, Region] = {}
    for node in list(graph.nodes):
        if node.target is ENTER and node.args[0] == "cuda":
            regions[node] = Region(node.args[1] or torch.float16, bool(node.args[2]))
        elif node.target is EXIT and node.args[0] in regions:
            entered = node.args[0]
            del regions[entered]
            graph.erase_node(node)
            graph.erase_node(entered)
        elif regions:
            _cast_in(node, [*regions.values()][-1])


def _cast_in(node: fx.Node, region: Region) -> None:
    if not region.is_enabled or node.op not in ("call_function", "call_method"):
        return
    if node.target is F.cross_entropy:
        node.target = cross_entropy
        return
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    name = name.strip("_")
    read = node.all_input_nodes[::-1]  # torch casts the last argument first
    with node.graph.inserting_before(node):
        if name in SIXTEEN_BITS or name in THIRTY_TWO_BITS:
            dtype = region.dtype if name in SIXTEEN_BITS else torch.float32
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
