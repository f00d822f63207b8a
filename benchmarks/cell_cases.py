"""Small training steps for ``cells.py``: each leans on a kernel, a layout or a model family that may need memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)
"""Types of the cases that have no half precision on a CPU."""


@dataclass(frozen=True)
class Case:
    """A model to compile. ``build(dtype)`` returns a module and its input. ``images`` is True if layouts differ."""

    build: Callable[[torch.dtype], tuple[nn.Module, Tensor]]
    dtypes: tuple[torch.dtype, ...] = WIDE
    images: bool = False


class Then(nn.Module):
    """Applies ``function`` to the result of ``inner``."""

    def __init__(self, inner: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


class Scaled(nn.Module):
    """The input times a parameter of its shape."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.factor = nn.Parameter(1 + 0.1 * torch.randn(shape, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class LayerNormOfImages(nn.LayerNorm):
    """Layer normalisation over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """A depthwise convolution, and two products over the channels."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up, self.down = nn.Linear(width, 4 * width, dtype=dtype), nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class Attention(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mix = nn.LayerNorm(width, dtype=dtype), nn.Linear(width, 3 * width, dtype=dtype)
        self.up, self.down = nn.Linear(width, 4 * width, dtype=dtype), nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.mix(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    """An embedding, two blocks, a projection onto the vocabulary and its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, 64, dtype=dtype)
        self.blocks = nn.Sequential(*(Attention(64, 4, dtype) for _ in range(2)))
        self.head = nn.Linear(64, 1024, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.embedding(tokens))).flatten(0, 1).float(), tokens.flatten())


def scaled(function: Callable[..., Tensor], *shape: int) -> Callable[[torch.dtype], tuple[nn.Module, Tensor]]:
    """Returns a case of ``function`` of scaled numbers of ``shape``."""
    return lambda dtype: (Then(Scaled(*shape, dtype=dtype), function), torch.randn(shape, dtype=dtype))


def images(*layers: Callable[[torch.dtype], nn.Module], shape: tuple[int, ...] = (4, 8, 32, 32)) -> Case:
    """Returns a case of layers on images of ``shape``."""
    return Case(lambda dtype: (nn.Sequential(*(make(dtype) for make in layers)), torch.randn(shape, dtype=dtype)), FLOATS, True)


def conv(inputs: int, outputs: int, size: int = 3, **settings: int) -> Callable[[torch.dtype], nn.Module]:
    return lambda dtype: nn.Conv2d(inputs, outputs, size, dtype=dtype, **settings)


def of(module: Callable[..., nn.Module], *arguments: object) -> Callable[[torch.dtype], nn.Module]:
    """Returns the builder of a layer without a type of its own."""
    return lambda dtype: module(*arguments).to(dtype)


def _positive(x: Tensor) -> Tensor:
    return x @ x.mT + 10 * torch.eye(x.shape[-1], dtype=x.dtype)


CASES: dict[str, Case] = {
    "mlp": Case(
        lambda d: (nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 256, dtype=d), nn.GELU(),
                                                                 nn.Linear(256, 64, dtype=d)))), torch.randn(256, 64, dtype=d)),
        FLOATS,
    ),
    "transformer": Case(
        lambda d: (nn.Sequential(*(Attention(64, 4, d) for _ in range(3))), torch.randn(2, 128, 64, dtype=d)), FLOATS
    ),
    "language model": Case(lambda d: (LanguageModel(d), torch.randint(0, 1024, (4, 128))), FLOATS),
    "convolutions": images(conv(8, 16, padding=1), of(nn.Tanh), conv(16, 16, padding=1), of(nn.Tanh), conv(16, 8, padding=1)),
    "strided": images(conv(8, 32, stride=2), of(nn.BatchNorm2d, 32), of(nn.ReLU), conv(32, 16, 1), of(nn.SiLU)),
    "dilated": images(conv(8, 16, padding=2, dilation=2), of(nn.Tanh), conv(16, 8, padding=2, dilation=2)),
    "depthwise": images(conv(8, 8, 7, padding=3, groups=8), of(nn.GELU), conv(8, 32, 1), of(nn.GELU), conv(32, 8, 1)),
    "convnext": images(
        conv(8, 16, 2, stride=2), of(LayerNormOfImages, 16), lambda d: ConvNextBlock(16, d), conv(16, 32, 2, stride=2),
        lambda d: ConvNextBlock(32, d),
    ),
    "transposed": images(of(nn.ConvTranspose2d, 8, 8, 4, 2, 1), of(nn.Tanh), conv(8, 8, padding=1)),
    "pooling": images(conv(8, 16, padding=1), of(nn.GELU), of(nn.MaxPool2d, 2), of(nn.GroupNorm, 4, 16), of(nn.AvgPool2d, 2)),
    "upsampling": images(conv(8, 8, padding=1), of(nn.SiLU), of(nn.Upsample, None, 2, "bilinear"), conv(8, 4, padding=1)),
    "unfold": Case(scaled(lambda x: F.fold(F.unfold(x.sin(), 3).tanh(), (32, 32), 3).tanh(), 4, 8, 32, 32), FLOATS, True),
    "conv1d": Case(lambda d: (nn.Sequential(nn.Conv1d(16, 32, 5, padding=2, dtype=d), nn.Tanh(), nn.Conv1d(32, 16, 5, dtype=d)),
                              torch.randn(4, 16, 256, dtype=d)), FLOATS),
    "conv3d": Case(lambda d: (nn.Sequential(nn.Conv3d(2, 4, 3, padding=1, dtype=d), nn.Tanh(), nn.Conv3d(4, 2, 3, dtype=d)),
                              torch.randn(2, 2, 12, 16, 16, dtype=d))),
    "embedding bag": Case(lambda d: (Then(nn.EmbeddingBag(512, 64, dtype=d), torch.tanh), torch.randint(0, 512, (256, 20)))),
    "kthvalue": Case(scaled(lambda x: x.sin().kthvalue(5).values, 256, 256)),
    "median": Case(scaled(lambda x: x.sin().median(0).values, 256, 256)),
    "sort": Case(scaled(lambda x: x.sin().sort(-1).values.tanh(), 256, 256), FLOATS),
    "topk": Case(scaled(lambda x: x.sin().topk(32).values.tanh(), 256, 256), FLOATS),
    "cumsum": Case(scaled(lambda x: x.sin().cumsum(0).tanh(), 256, 256)),
    "cumprod": Case(scaled(lambda x: x.sin().cumprod(0).tanh(), 64, 256)),
    "logcumsumexp": Case(scaled(lambda x: x.sin().logcumsumexp(0).tanh(), 128, 128)),
    "fft": Case(scaled(lambda x: torch.fft.fft2(x.sin()).abs(), 4, 64, 64)),
    "rfft": Case(scaled(lambda x: torch.fft.irfft(torch.fft.rfft(x.sin()) * 2).tanh(), 64, 512)),
    "matrix_exp": Case(scaled(lambda x: torch.matrix_exp(x.sin() * 0.01).tanh(), 64, 64)),
    "cholesky": Case(scaled(lambda x: torch.linalg.cholesky(_positive(x.sin())).tanh(), 96, 96)),
    "inverse": Case(scaled(lambda x: torch.linalg.inv(_positive(x.sin())).tanh(), 8, 32, 32)),
    "solve": Case(scaled(lambda x: torch.linalg.solve(_positive(x.sin()), x), 96, 96)),
    "svdvals": Case(scaled(lambda x: torch.linalg.svdvals(x.sin()), 96, 64)),
    "eigvalsh": Case(scaled(lambda x: torch.linalg.eigvalsh(_positive(x.sin())), 96, 96)),
    "qr": Case(scaled(lambda x: torch.linalg.qr(x.sin())[1].tanh(), 96, 64)),
    "cdist": Case(scaled(lambda x: torch.cdist(x.sin(), x.cos()), 128, 32)),
    "index_add": Case(scaled(lambda x: torch.zeros(32, 256, dtype=x.dtype).index_add(0, torch.arange(256) % 32, x.sin()),
                             256, 256)),
    "gather": Case(scaled(lambda x: x.sin().gather(0, torch.arange(256)[:, None].expand(256, 256)).tanh(), 256, 256), FLOATS),
    "embedding": Case(lambda d: (Then(nn.Embedding(512, 64, dtype=d), lambda x: x.sin().exp()), torch.randint(0, 512, (2048,))),
                      FLOATS),
    "grid_sample": Case(scaled(lambda x: F.grid_sample(x.sin(), torch.ones(4, 16, 16, 2, dtype=x.dtype) * 0.3,
                                                       align_corners=False), 4, 8, 32, 32)),
    "renorm": Case(scaled(lambda x: x.sin().renorm(2, 0, 1.0).tanh(), 128, 128)),
    "bilinear": Case(lambda d: (nn.Sequential(nn.Linear(32, 32, dtype=d), Then(nn.Identity(), lambda x: F.bilinear(
        x, x.tanh(), torch.ones(16, 32, 32, dtype=x.dtype)))), torch.randn(64, 32, dtype=d))),
    "expanded product": Case(scaled(lambda x: (x.sin().sum(0, keepdim=True).expand(128, 128) @ x).tanh(), 128, 128), FLOATS),
}  # fmt: skip
"""Every case by its name."""
