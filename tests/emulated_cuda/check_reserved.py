"""Reserved bytes on the emulated card: the card's own allocations against those that the replay of the code predicts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from autoremat.basics.errors import BudgetWarning
from autoremat.planner.memory.allocations import FREED, Allocations
from autoremat.planner.memory.allocator_settings import AllocatorSettings
from autoremat.planner.memory.reserved import reserved_for
from emulated_cuda import small_models
from emulated_cuda.steps import on_card, planned_step

SETTINGS = (AllocatorSettings(), AllocatorSettings(expandable_segments=True))


def blocks() -> Any:
    """Returns a network whose tensors have 0.5 to 4.5 MiB."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 768 * (1 + n)), nn.GELU(), nn.Linear(768 * (1 + n), 256)) for n in range(3)]
    return MeanSquare(nn.Sequential(*layers)), (torch.randn(512, 256),)


class MeanSquare(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def sequence(step: Allocations) -> list[int]:
    """Returns the bytes of the allocations in sequence, with a negative sign where they are freed; without the last frees.

    Autograd frees the gradient of the loss behind the code.
    """
    sizes = {number: size for number, size in step.events if size != FREED}
    found = [size if size != FREED else -sizes[number] for number, size in step.events]
    while found and found[-1] < 0:
        found.pop()
    return found


def check(built: Any, budget: float | None, count: str = "allocated") -> None:
    options = {} if budget is None else {"memory_budget": budget, "count": count, "on_infeasible": "best_effort"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)  # the best effort may exceed the budget
        step = planned_step(*on_card(built), cost_model="roofline", **options)
    own = step.result.allocations
    assert own is not None
    assert sequence(own) == sequence(step.replayed)
    for settings in SETTINGS:
        predicted, found = reserved_for(step.replayed, settings), reserved_for(own, settings)
        assert (found.bytes, found.allocated_bytes) == (predicted.bytes, predicted.allocated_bytes)
    assert step.report.reserved is not None
    assert step.report.reserved.of_code
    if count == "reserved":
        assert step.report.counted_bytes == step.report.reserved.bytes <= step.report.budget_bytes
        assert reserved_for(own, AllocatorSettings()).bytes <= step.report.budget_bytes


@pytest.mark.slow
def test_a_network_reserves_what_its_code_predicts():
    check(blocks(), 0.7, "reserved")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama"])
def test_a_model_allocates_in_the_sequence_that_its_code_predicts(name):
    check(small_models.build(name), 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [13_977_600, 0.55, 0.75])
def test_a_budget_bounds_whole_blocks(budget):
    """The allocator counts a block whole if it does not split off the rest. The plan for 55 % requests 13,977,600 bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        step = planned_step(*on_card(blocks()), cost_model="roofline", memory_budget=budget)
    own = step.result.allocations
    assert own is not None
    found = reserved_for(own, AllocatorSettings()).allocated_bytes
    assert found + step.report.code_headroom_bytes == step.report.compiled_peak_bytes <= step.report.budget_bytes
