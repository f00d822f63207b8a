"""The fused attention kernels of CUDA as arithmetic on the host, in the shapes and layouts of torch's own meta kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, _decomp

aten = torch.ops.aten


@dataclass(frozen=True)
class Arguments:
    """The operands of an attention, on the host in 32 bits, with the keys and values of all heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    dropout: float
    causal: bool
    scale: float
    groups: int
    """Query heads for each head of the keys."""

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float | None
    ) -> "Arguments":
        refuse_strided_rows(query=query, key=key, value=value)
        groups = query.shape[1] // key.shape[1]
        wide = [tensor.cpu().float().repeat_interleave(groups, 1) for tensor in (key, value)]
        on_host = None if bias is None else bias.cpu().float()
        return cls(
            query.cpu().float(), *wide, on_host, dropout, causal, query.shape[-1] ** -0.5 if scale is None else scale, groups
        )

    def scores(self) -> Tensor:
        scores = self.query @ self.key.transpose(-1, -2) * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        if self.causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return scores

    def kept(self, shape: torch.Size, seed: int) -> Tensor | float:
        """Returns the mask of the dropout, scaled."""
        if not self.dropout:
            return 1.0
        generator = torch.Generator().manual_seed(seed)
        return (torch.rand(shape, generator=generator) >= self.dropout).float() / (1 - self.dropout)


def refuse_strided_rows(**operands: Tensor | None) -> None:
    """Raises a RuntimeError if the last dimension of an operand is not dense in memory."""
    for name, tensor in operands.items():
        if tensor is not None and tensor.stride(-1) != 1:
            raise RuntimeError(f"the last dimension of {name} has the stride {tensor.stride(-1)}, and attention reads stride 1")


def forward(arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result, the logarithms of the sums of exponentials, and the seed of the dropout."""
    seed = torch.randint(0, 2**31 - 1, ()) if arguments.dropout else torch.zeros((), dtype=torch.int64)
    scores = arguments.scores()
    weights = scores.softmax(-1)
    return (weights * arguments.kept(weights.shape, int(seed))) @ arguments.value, scores.logsumexp(-1), seed


def backward(arguments: Arguments, gradient: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value."""
    gradient = gradient.cpu().float()
    weights = arguments.scores().softmax(-1)
    kept = arguments.kept(weights.shape, int(seed.cpu().flatten()[0].to(torch.int64)))
    of_value = (weights * kept).transpose(-1, -2) @ gradient
    of_weights = gradient @ arguments.value.transpose(-1, -2) * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * arguments.scale
    of_query, of_key = of_scores @ arguments.key, of_scores.transpose(-1, -2) @ arguments.query
    if arguments.groups > 1:
        of_key, of_value = (t.unflatten(1, (-1, arguments.groups)).sum(2) for t in (of_key, of_value))
    return of_query, of_key, of_value


def promised(op: Any, *arguments: Any, **options: Any) -> Any:
    """Returns the results that torch's meta kernel promises for the call."""

    def meta(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x

    return op(*map(meta, arguments), **options)


def laid_out(promise: Tensor, values: Tensor) -> Tensor:
    """Returns ``values`` on the card, in the layout and data type of ``promise``."""
    result = torch.empty_strided(promise.shape, promise.stride(), dtype=promise.dtype, device="cuda")
    return result.copy_(values.to(promise.dtype).reshape(promise.shape))


def on_card(values: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return values.to(dtype).cuda()


def flash(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, debug: bool = False, *, scale: Any = None) -> Any:
    result, logarithms, seed = forward(Arguments.of(q, k, v, None, dropout, causal, scale))
    promise = promised(aten._scaled_dot_product_flash_attention.default, q, k, v, dropout, causal, debug, scale=scale)
    state, unused = torch.stack([seed, torch.zeros_like(seed)]), torch.zeros((), dtype=torch.int64)
    tensors = laid_out(promise[0], result), laid_out(promise[1], logarithms)
    states = on_card(state, torch.uint64), on_card(unused, torch.uint64)
    return *tensors, None, None, promise[4], promise[5], *states, torch.empty(0, dtype=q.dtype, device="cuda")


def flash_backward(gradient: Any, q: Any, k: Any, v: Any, *given: Any, scale: Any = None) -> Any:
    promise = promised(aten._scaled_dot_product_flash_attention_backward.default, gradient, q, k, v, *given, scale=scale)
    dropout, causal, state = given[6:9]
    return tuple(map(laid_out, promise, backward(Arguments.of(q, k, v, None, dropout, causal, scale), gradient, state)))


def efficient(
    q: Any, k: Any, v: Any, bias: Any, wants_logarithms: bool, dropout: float = 0.0, causal: bool = False, *, scale: Any = None
) -> Any:
    refuse_strided_rows(bias=bias)
    result, logarithms, seed = forward(Arguments.of(q, k, v, bias, dropout, causal, scale))
    promise = promised(
        aten._scaled_dot_product_efficient_attention.default, q, k, v, bias, wants_logarithms, dropout, causal, scale=scale
    )
    padded = torch.full(promise[1].shape, torch.inf)
    length = min(logarithms.shape[-1], padded.shape[-1])
    padded[..., :length] = logarithms[..., :length]
    return laid_out(promise[0], result), laid_out(promise[1], padded), on_card(seed), on_card(torch.zeros_like(seed))


def efficient_backward(
    gradient: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, logarithms: Any, seed: Any, offset: Any, dropout: float,
    wanted: Any, causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    refuse_strided_rows(bias=bias, result=out)
    promise = promised(
        aten._scaled_dot_product_efficient_attention_backward.default, gradient, q, k, v, bias, out, logarithms, seed, offset,
        dropout, wanted, causal, scale=scale,
    )  # fmt: skip
    gradients = backward(Arguments.of(q, k, v, bias, dropout, causal, scale), gradient, seed)
    return *map(laid_out, promise[:3], gradients), None


def cudnn(
    q: Any, k: Any, v: Any, bias: Any, wants_logarithms: bool, dropout: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    result, logarithms, seed = forward(Arguments.of(q, k, v, bias, dropout, causal, scale))
    promise = promised(
        aten._scaled_dot_product_cudnn_attention.default, q, k, v, bias, wants_logarithms, dropout, causal, debug, scale=scale
    )
    tensors = laid_out(promise[0], result), laid_out(promise[1], logarithms)
    return *tensors, None, None, promise[4], promise[5], on_card(seed), on_card(torch.zeros_like(seed)), None


def cudnn_backward(gradient: Any, q: Any, k: Any, v: Any, *given: Any, scale: Any = None) -> Any:
    (out, _, seed, _, bias), (dropout, causal) = given[:5], given[9:11]
    refuse_strided_rows(result=out)
    promise = promised(aten._scaled_dot_product_cudnn_attention_backward.default, gradient, q, k, v, *given, scale=scale)
    return tuple(map(laid_out, promise, backward(Arguments.of(q, k, v, bias, dropout, causal, scale), gradient, seed)))


def by_host(op: Any) -> Callable[..., Any]:
    """Returns a kernel that calls ``op`` on copies on the host, with contiguous results as fake tensors promise."""

    def to_host(x: Any) -> Any:
        return x.cpu() if isinstance(x, Tensor) else x

    def to_card(x: Any) -> Any:
        return x.contiguous().cuda() if isinstance(x, Tensor) else x

    def call(*arguments: Any, **options: Any) -> Any:
        there = torch.utils._pytree.tree_map(to_host, (arguments, options))
        return torch.utils._pytree.tree_map(to_card, op(*there[0], **there[1]))

    return call


KERNELS = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    # For tensors of CUDA, ATen chooses convolutions that only CUDA has.
    "convolution": by_host(aten.convolution.default),
    "convolution_backward": by_host(aten.convolution_backward.default),
    # Where CUDA has no kernel of its own, autograd would take these apart before Inductor does.
    "silu_backward": by_host(aten.silu_backward.default),
    "mish_backward": by_host(aten.mish_backward.default),
    "_fused_rms_norm": by_host(aten._fused_rms_norm.default),
    "_fused_rms_norm_backward": by_host(_decomp.decompositions._fused_rms_norm_backward),
}

libraries: list[torch.library.Library] = []


def install() -> None:
    """Registers the kernels for CUDA, for the rest of the process."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel)
    libraries.append(library)
