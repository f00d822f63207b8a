"""A model, optimizers of several kinds, and the memory of their steps as it is measured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from eight_bit import EightBitAdam
from torch import nn
from torch.nn import functional as F

import autoremat
from autoremat.planner.multigraph.device_budget import LedgerRow

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "AdamW loop": functools.partial(torch.optim.AdamW, foreach=False),
    "Adafactor": torch.optim.Adafactor,
    "8-bit Adam": EightBitAdam,
}


class Model(nn.Module):
    """Residual blocks between an embedding and a loss, with a buffer."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                                    for _ in range(layers))  # fmt: skip
        self.head = nn.Linear(width, 64)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def bytes_of(tensors: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def row(budget: autoremat.DeviceBudget, name: str) -> LedgerRow:
    (found,) = [one for one in budget.rows if one.name == name]
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    leaves = torch.utils._pytree.tree_leaves([list(state.values()) for state in optimizer.state.values()])
    return bytes_of(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def measured_updates(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[int, int]:
    """The peaks of a first and of a second step, in bytes above the memory that is live before the first."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    tracker = autoremat.track_peak("cpu")
    with tracker:
        optimizer.step()
        tracker.mark()
        optimizer.step()
    (end,), timeline = tracker.marks, tracker.timeline
    return max(level for time, level in timeline if time <= end), max(level for time, level in timeline if time >= end)


class Sorting(torch.optim.SGD):
    """Steps only where gradients are not zero: the sizes of its temporaries depend on data."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad[p.grad != 0].sum()
