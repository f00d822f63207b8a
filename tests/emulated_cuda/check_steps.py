"""Training steps under budgets on the emulated card: measured peaks, replayed peaks and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from emulated_cuda.cells import ROUNDING, cells_of, cells_of_model, check

BUDGETS = (None, 0.8, 1)

CELLS = [("llama", torch.float16, 0.7), ("resnet", torch.float16, 1), ("experts", torch.bfloat16, 1)]
"""The data type and the budget of some models. ``write_cells`` runs every model in all types under all budgets."""


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(),
            nn.Dropout(dropout), nn.Linear(256, 16),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(image)))
        hidden = F.relu(self.second_norm(self.second(hidden)))
        return F.cross_entropy(self.head(hidden.mean((2, 3))).float(), label)


def block(dropout: float) -> Any:
    torch.manual_seed(0)
    return Block(dropout), (torch.randn(128, 64),)


def images() -> Any:
    torch.manual_seed(0)
    return Images(), (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)))


def check_all(built: Any, dtype: torch.dtype, has_dropout: bool = False) -> None:
    for cell in cells_of("", built, dtype, BUDGETS, has_dropout=has_dropout):
        check(cell, ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_linear_network(dtype):
    check_all(block(0.0), dtype)


@pytest.mark.slow
def test_recomputed_dropout_draws_the_same_numbers():
    check_all(block(0.3), torch.float32, has_dropout=True)


@pytest.mark.slow
def test_convolutions_and_batch_norm():
    check_all(images(), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "budget"), CELLS)
def test_a_model(name, dtype, budget):
    for cell in cells_of_model(name, dtype, (None, budget)):
        check(cell, ROUNDING[dtype], flips=name == "resnet")
