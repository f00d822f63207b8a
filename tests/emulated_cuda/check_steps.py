"""Training steps under budgets on the emulated card: measured peaks, replayed peaks and gradients."""

from __future__ import annotations

import warnings
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoremat.basics.errors import BudgetWarning
from emulated_cuda.steps import on_card, planned_step, relative_error, run_step

ROUNDING = {torch.float32: 1e-5, torch.float16: 3e-2, torch.bfloat16: 6e-2}
"""Largest relative error of a gradient against another order of the same arithmetic, by data type."""

FLIP = 5e-3
"""The same for networks with ReLU: one activation of a million that rounds to the other side of zero."""

BETWEEN_PLANS = 1e-5
"""The same between two plans in 32 bits, which differ only in the sequence of sums."""

BUDGETS = (None, 0.8, 1)
"""No budget, a share, and the smallest plan there is."""


class Block(nn.Module):
    """A linear network with layer norm, GELU and two dropouts."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(),
            nn.Dropout(dropout), nn.Linear(256, 16),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean()


class Images(nn.Module):
    """Two convolutions with batch norm and a classifier."""

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


def check(built: Any, dtype: torch.dtype, has_dropout: bool, budgets: tuple[Any, ...] = BUDGETS, flips: bool = False) -> None:
    """Runs the step under each budget and compares gradients and peaks."""
    module, inputs = on_card(built, dtype)
    reference = None if has_dropout else run_step(module, module, inputs).gradients
    first: tuple[Tensor, ...] | None = None
    for budget in budgets:
        chosen = {} if budget is None else {"memory_budget": budget, "on_infeasible": "best_effort"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)  # the best effort may exceed the budget
            step = planned_step(module, inputs, **chosen)
        measured, report = step.result.peak_bytes, step.report
        assert measured == step.replayed_bytes, (budget, measured, step.replayed_bytes)
        assert report.compiled_peak_bytes is not None
        assert measured <= report.compiled_peak_bytes
        if report.within_budget and report.budget_bytes is not None:
            assert measured <= report.budget_bytes
        assert budget != 1 or report.recomputed_ops > 0
        if reference is not None:
            assert relative_error(step.result.gradients, reference) <= max(ROUNDING[dtype], FLIP * flips), budget
        first = first or step.result.gradients
        allowed = BETWEEN_PLANS if dtype is torch.float32 else ROUNDING[dtype]
        assert relative_error(step.result.gradients, first) <= allowed, budget


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_linear_network(dtype):
    check(block(0.0), dtype, has_dropout=False)


@pytest.mark.slow
def test_recomputed_dropout_draws_the_same_numbers():
    check(block(0.3), torch.float32, has_dropout=True)


@pytest.mark.slow
def test_convolutions_and_batch_norm():
    check(images(), torch.float32, has_dropout=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.float16),
        ("llama", torch.bfloat16),
        ("gpt2", torch.float32),
        ("gpt2", torch.bfloat16),
        ("resnet", torch.float32),
    ],
)
def test_a_model(name, dtype):
    module, inputs = models.build(name, **({} if name == "resnet" else {"layers": 2}))
    few = tuple(tensor[:2] for tensor in inputs)  # the interpreter takes its time
    check((module, few), dtype, has_dropout=name == "gpt2", budgets=(None, 0.7, 1), flips=name == "resnet")
