"""Training steps under budgets on the emulated card: measured peaks and allocations, replayed ones, and gradients."""

import functools
import math
import warnings
from typing import Any

import pytest
import torch
from block_models import MeanSquare
from torch import Tensor, nn
from torch.nn import functional as F

from autoremat.basics.errors import BudgetWarning
from autoremat.planner.memory.allocations import FREED, Allocations, peak_block_bytes
from emulated_cuda import small_models
from emulated_cuda.steps import checked, checked_model, has_equal_bits, on_card, planned_step


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
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()]
    return MeanSquare(*layers, nn.Dropout(dropout), nn.Linear(256, 16)), (torch.randn(128, 64),)


def images(_: float = 0.0) -> Any:
    torch.manual_seed(0)
    return Images(), (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)))


@pytest.mark.parametrize(
    ("built", "dtype", "dropout"),
    [
        (block, torch.float32, 0.0),
        pytest.param(block, torch.bfloat16, 0.0, marks=pytest.mark.slow),
        pytest.param(block, torch.float32, 0.3, marks=pytest.mark.slow),
        pytest.param(images, torch.float32, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_network(built, dtype, dropout):
    checked(built(dropout), dtype, (None, 0.8, 1), has_dropout=dropout > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "budget"), [("llama", torch.float16, 0.7), ("resnet", torch.float16, 1), ("experts", torch.bfloat16, 1)]
)
def test_a_model(name, dtype, budget):
    checked_model(name, dtype, (None, budget))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("resnet", torch.float16), ("experts", torch.bfloat16)])
def test_recomputed_values_have_the_bits_of_the_first_where_each_op_rounds(name, dtype):
    """Fused kernels omit the rounding between ops, and recomputation fuses others: nothing else differs."""
    with torch._inductor.config.patch(emulate_precision_casts=True):
        whole, least = checked_model(name, dtype, (None, 1), rounding=math.inf)
    assert least.report.recomputed_ops > whole.report.recomputed_ops
    assert has_equal_bits(least, whole)


def blocks() -> Any:
    """Returns a network whose tensors have 0.5 to 4.5 MiB."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 768 * (1 + n)), nn.GELU(), nn.Linear(768 * (1 + n), 256)) for n in range(3)]
    return MeanSquare(*layers), (torch.randn(512, 256),)


def sequence(step: Allocations) -> list[int]:
    """Returns the bytes of the allocations in sequence, negative where they are freed; without the last frees, by autograd."""
    sizes = {number: size for number, size in step.events if size != FREED}
    found = [size if size != FREED else -sizes[number] for number, size in step.events]
    while found and found[-1] < 0:
        found.pop()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("built", [blocks, functools.partial(small_models.build, "llama")], ids=["blocks", "llama"])
def test_a_model_allocates_in_the_sequence_that_its_code_predicts(built):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)  # the best effort may exceed the budget
        step = planned_step(*on_card(built()), cost_model="roofline", memory_budget=0.7, on_infeasible="best_effort")
    assert step.result.allocations is not None
    assert sequence(step.result.allocations) == sequence(step.replayed)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [13_977_600, 0.65, 0.75])
def test_a_budget_bounds_whole_blocks(budget):
    """The allocator counts a block whole if it does not split off the rest. Those of the least plan take 13,971,456 bytes."""
    step = planned_step(*on_card(blocks()), cost_model="roofline", memory_budget=budget)  # a warning would be an error
    own = step.result.allocations
    assert own is not None
    found = peak_block_bytes(own.events, is_expandable=False)
    assert found + step.report.code_headroom_bytes == step.report.compiled_peak_bytes <= step.report.budget_bytes
