"""Small steps whose graphs depend on the type of the device: products, norms, layouts, attention with all forms of masks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = tuple[Callable[..., Any], tuple[Tensor, ...]]


class Products(nn.Module):
    """Products of a batch of one, of one row, of one column, and of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.row = nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        scores = torch.bmm(y, y.transpose(1, 2)).sum()
        outer = torch.bmm(y[:, :, :1], y[:, :1, :]).sum()
        inner = torch.mm(y[0, :1], y[0, :1].T).sum() + self.row(y[0, :1]).sum()
        columns = torch.mm(y[0, :, :1], y[0, :1]).sum() + F.linear(y[0, :, :1], y[0, :, :1]).sum()
        return scores + outer + inner + columns + torch.bmm(y[:, :1], y[:, :1].transpose(1, 2)).sum()


class Norms(nn.Module):
    """Norms, a gate and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.of_groups, self.of_layers, self.of_batches = nn.GroupNorm(2, 4), nn.LayerNorm(8), nn.BatchNorm2d(4)
        self.of_squares = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.of_batches(self.convolution(x))
        y = F.logsigmoid(self.of_groups(y)) + F.gelu(self.of_layers(y)) + F.rms_norm(self.of_squares(y), [8])
        return F.dropout(y, 0.3).square().sum()


class Layouts(nn.Module):
    """Operations whose results have another layout on the card, and a scatter into constants."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(self.convolution(x), (1, 1, 1, 1), mode="reflect").contiguous(memory_format=torch.channels_last)
        places = torch.arange(y.shape[-1], device=x.device)
        picked = torch.zeros(*y.shape, device=x.device, dtype=y.dtype).scatter(3, places.expand(*y.shape[:3], -1)[..., :1], 1.0)
        return (y[..., places] * picked).square().sum() + F.cross_entropy(y.flatten(2).mean(1), y.new_zeros(len(y)).long())


@dataclass(frozen=True)
class Masked:
    """An attention with a mask of one form."""

    form: str
    dropout: float = 0.0

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = x.view(batch, length, 4, 16).transpose(1, 2)
        masks: dict[str, Callable[[], Tensor | None]] = {
            "none": lambda: None, "bool": lambda: (scores > 0)[:, None], "number": lambda: scores[:, None],
            "of all": lambda: (scores > 0)[0], "number of all": lambda: scores[0],
            "of heads": lambda: scores[:, None].expand(-1, 4, -1, -1), "three": lambda: scores[:1].expand(4, -1, -1),
            "of keys": lambda: (scores > 0)[:, None, :1],
            "of queries": lambda: (scores > 0)[:, None, :, :1].expand(-1, -1, -1, length),
            "learned": lambda: x.sum() * scores[:, None], "across": lambda: scores.transpose(1, 2)[:, None],
        }  # fmt: skip
        out = F.scaled_dot_product_attention(
            heads, heads, heads, masks[self.form](), self.dropout, is_causal=self.form == "none"
        )
        return out.square().mean()


FORMS = (
    "none", "bool", "number", "of all", "number of all", "of heads", "three", "of keys", "of queries", "learned", "across",
)  # fmt: skip


class Grouped(nn.Module):
    """An attention whose heads share keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        query, key = x.unflatten(-1, (4, 16)).transpose(1, 2), x[..., :32].unflatten(-1, (2, 16)).transpose(1, 2)
        single = key[:, :1]
        grouped = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        return grouped.square().mean() + F.scaled_dot_product_attention(query, single.expand(-1, 4, -1, -1), single).mean()


def steps() -> dict[str, Callable[[], Step]]:
    """Returns the steps by name, each as a function that builds a step and its inputs."""

    def learned(step: Callable[..., Any], dtype: torch.dtype, *shape: int) -> Step:
        step = step.to(dtype) if isinstance(step, nn.Module) else step
        return step, (torch.randn(shape, dtype=dtype, requires_grad=True),)

    def masked(step: Masked, dtype: torch.dtype, length: int) -> Step:
        step, inputs = learned(step, dtype, 2, length, 64)
        return step, (*inputs, torch.randn(2, length, length, dtype=dtype))

    found: dict[str, Callable[[], Step]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        found[f"products {kind}"] = lambda dtype=dtype: learned(Products(), dtype, 1, 8, 32)
        found[f"norms {kind}"] = lambda dtype=dtype: learned(Norms(), dtype, 2, 4, 8, 8)
        found[f"layouts {kind}"] = lambda dtype=dtype: learned(Layouts(), dtype, 2, 3, 8, 8)
        found[f"grouped {kind}"] = lambda dtype=dtype: learned(Grouped(), dtype, 2, 32, 64)
        for form, (length, dropout) in itertools.product(FORMS, [(32, 0.0), (32, 0.1), (36, 0.0)]):
            build = functools.partial(masked, Masked(form, dropout), dtype, length)
            found[f"{form} {length} {dropout} {kind}"] = build
    return found
