"""Statements of random programs: each maps rows of numbers (ROWS x WIDTH) to rows of the same shape.

Many run kernels whose memory could depend on integer data, keep buffers, or draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 64
SIDE = 16
"""Side of the images that rows are read as, one row of pixels for each row of numbers, and WIDTH columns."""

VOCABULARY = 100


@dataclass(frozen=True)
class Data:
    """Parameters, and integers for all rows. ``words`` has several per row."""

    weight: Tensor
    table: Tensor
    positions: Tensor
    words: Tensor

    def within(self, size: int, rows: int) -> Tensor:
        """Returns an index below ``size`` for each of ``rows``."""
        return self.positions[:rows] % size


Statement = Callable[[Tensor, Data], Tensor]


def images(x: Tensor) -> Tensor:
    return x.view(1, -1, SIDE, WIDTH)


def bag(mode: str, columns: int = WIDTH) -> Statement:
    return lambda x, d: x + F.embedding_bag(d.words[: x.shape[0]], d.table[:, :columns], mode=mode)


def add_by_index(x: Tensor, d: Data) -> Tensor:
    index = d.within(48, x.shape[0])
    return x + x.new_zeros(48, WIDTH).index_add(0, index, x.sin())[index]


def scatter_sums(x: Tensor, d: Data) -> Tensor:
    index = d.within(WIDTH, x.shape[0])[:, None].expand(-1, WIDTH)
    return torch.zeros_like(x).scatter_add(1, index, x) + x.cos()


def scatter_maxima(x: Tensor, d: Data) -> Tensor:
    index = d.within(40, x.shape[0])[:, None].expand(-1, WIDTH)
    return x * x.new_zeros(40, WIDTH).scatter_reduce(0, index, x, "amax").gather(0, index)


def put_by_index(x: Tensor, d: Data) -> Tensor:
    index = d.within(32, x.shape[0])
    return x + x.new_zeros(32, WIDTH).index_put((index,), x.tanh(), accumulate=True)[index]


def one_hot(x: Tensor, d: Data) -> Tensor:
    return x * (1 + F.one_hot(d.within(WIDTH, x.shape[0]), WIDTH).to(x.dtype))


def buckets(x: Tensor, d: Data) -> Tensor:
    bounds = torch.linspace(-1, 1, VOCABULARY - 1)
    return x * d.table[:, 0][torch.bucketize(x.detach(), bounds)]


def segments(x: Tensor, d: Data) -> Tensor:
    lengths = torch.tensor([2, 6] * (x.shape[0] // 8))
    means = torch.segment_reduce(x, "mean", lengths=lengths, unsafe=True)
    return x - means.repeat_interleave(4, 0)


def embeddings(x: Tensor, d: Data) -> Tensor:
    return x + F.embedding(d.within(VOCABULARY, x.shape[0]), d.table, scale_grad_by_freq=True)


def cross_entropy(x: Tensor, d: Data) -> Tensor:
    return x * F.cross_entropy(x, d.within(WIDTH, x.shape[0]))


def fold_of_unfold(x: Tensor, d: Data) -> Tensor:
    return F.fold(F.unfold(images(x), 3, padding=1), (SIDE, WIDTH), 3, padding=1).reshape_as(x) / 9


def held_fold(x: Tensor, d: Data) -> Tensor:
    image = F.fold(x.view(1, -1, SIDE * WIDTH // 16).repeat(1, 1, 16)[:, : x.shape[0] // SIDE], (SIDE, WIDTH), 1)
    return (image * image.sin()).reshape_as(x)


def pool_and_unpool(x: Tensor, d: Data) -> Tensor:
    pooled, positions = F.max_pool2d(images(x), 2, return_indices=True)
    return F.max_unpool2d(pooled.sin(), positions, 2).reshape_as(x) + x


def adaptive_maxima(x: Tensor, d: Data) -> Tensor:
    pooled = F.adaptive_max_pool2d(images(x), (5, 7))
    return F.interpolate(pooled, (SIDE, WIDTH), mode="bilinear").reshape_as(x) * x


def average_pool(x: Tensor, d: Data) -> Tensor:
    return F.interpolate(F.avg_pool2d(images(x), 2), scale_factor=2.0).reshape_as(x)


def fractional_pool(x: Tensor, d: Data) -> Tensor:
    return F.interpolate(F.fractional_max_pool2d(images(x), 2, output_size=(8, 32)), (SIDE, WIDTH)).reshape_as(x)


def bernoulli(probability: float) -> Statement:
    return lambda x, d: x + x * torch.bernoulli(x.detach(), p=probability)


def attention(x: Tensor, d: Data) -> Tensor:
    heads = x.view(-1, SIDE, 4, 16).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads.sin(), heads).transpose(1, 2).reshape_as(x)


def convolution(x: Tensor, d: Data) -> Tensor:
    return F.conv1d(x.view(-1, SIDE, WIDTH).mT, d.weight[:, :, None].expand(-1, -1, 3), padding=1).mT.reshape_as(x)


def scan(x: Tensor, d: Data) -> Tensor:
    from torch._higher_order_ops.scan import scan as torch_scan

    steps = x.view(4, -1, WIDTH)
    return torch_scan(lambda c, row: ((c + row).tanh(), (c * row).sin()), torch.zeros_like(steps[0]), steps)[1].reshape_as(x)


def mapped(x: Tensor, d: Data) -> Tensor:
    from torch._higher_order_ops.map import map as torch_map

    return torch_map(lambda row, weight: (row @ weight).tanh().exp() * row, x.view(4, -1, WIDTH), d.weight).reshape_as(x)


def prefix_sums(x: Tensor, d: Data) -> Tensor:
    from torch._higher_order_ops.associative_scan import associative_scan

    return associative_scan(lambda a, b: a + b, x.view(8, -1, WIDTH), 0, combine_mode="generic").reshape_as(x) / 8


def branch(x: Tensor, d: Data) -> Tensor:
    return torch.cond(x.detach().sum() > 0, lambda a, w: (a @ w).tanh().exp(), lambda a, w: a.sin() @ w, (x, d.weight))


@torch.compiler.nested_compile_region
def region(x: Tensor, weight: Tensor) -> Tensor:
    return x + F.gelu(x @ weight).sin() @ weight


def checkpointed(x: Tensor, d: Data) -> Tensor:
    return checkpoint(lambda a: (a @ d.weight).sin() * a, x, use_reentrant=False)


STATEMENTS: dict[str, Statement] = {
    "linear": lambda x, d: x @ d.weight,
    "chain": lambda x, d: F.gelu(x).sin().exp() * x,
    "layer norm": lambda x, d: F.layer_norm(x, (WIDTH,)),
    "softmax": lambda x, d: x.softmax(-1) * x,
    "bag of maxima": bag("max"),
    "bag of maxima, one column": bag("max", 1),
    "bag of means": bag("mean"),
    "bag of sums": bag("sum"),
    "index_add": add_by_index,
    "scatter_add": scatter_sums,
    "scatter_reduce": scatter_maxima,
    "index_put": put_by_index,
    "one_hot": one_hot,
    "bucketize": buckets,
    "segment_reduce": segments,
    "embedding": embeddings,
    "cross entropy": cross_entropy,
    "mean squared error": lambda x, d: x * F.mse_loss(x.sin(), x),
    "smooth loss": lambda x, d: x + F.smooth_l1_loss(x, x.cos()),
    "fold of unfold": fold_of_unfold,
    "fold": held_fold,
    "max pool, unpool": pool_and_unpool,
    "adaptive maximum": adaptive_maxima,
    "average pool": average_pool,
    "fractional pool": fractional_pool,
    "dropout": lambda x, d: F.dropout(x, 0.3),
    "dropout 0": lambda x, d: F.dropout(x.sin(), 0.0),
    "bernoulli 0": bernoulli(0.0),
    "bernoulli": bernoulli(0.4),
    "random leak": lambda x, d: F.rrelu(x, training=True),
    "noise": lambda x, d: x + torch.randn_like(x) * x.sin(),
    "sort": lambda x, d: x.sort(-1).values.tanh(),
    "kthvalue": lambda x, d: x * x.kthvalue(5, -1, keepdim=True).values,
    "topk": lambda x, d: x + x.topk(3).values.sum(-1, keepdim=True),
    "cumsum": lambda x, d: x.cumsum(0) / x.shape[0],
    "cummax": lambda x, d: x.cummax(0).values.sin(),
    "roll": lambda x, d: x.roll((3, 5), (0, 1)) * x,
    "attention": attention,
    "convolution": convolution,
    "fft": lambda x, d: torch.fft.fft(x).abs() / 8,
    "scan": scan,
    "map": mapped,
    "associative_scan": prefix_sums,
    "cond": branch,
    "nested region": lambda x, d: region(x, d.weight),
    "checkpoint": checkpointed,
}

EAGER_ONLY = ("scan", "map", "associative_scan")
"""Statements that Inductor cannot compile on CPUs, or only without gradients."""
