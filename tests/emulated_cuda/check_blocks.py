"""Blocks on the emulated card: the card's own allocations against those that the replay of the code predicts."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from autoremat.basics.errors import BudgetWarning
from autoremat.planner.memory.allocations import FREED, Allocations
from autoremat.planner.memory.caching_allocator import peak_block_bytes
from emulated_cuda import small_models
from emulated_cuda.steps import MeanSquare, on_card, planned_step


def blocks() -> Any:
    """Returns a network whose tensors have 0.5 to 4.5 MiB."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 768 * (1 + n)), nn.GELU(), nn.Linear(768 * (1 + n), 256)) for n in range(3)]
    return MeanSquare(nn.Sequential(*layers)), (torch.randn(512, 256),)


def sequence(step: Allocations) -> list[int]:
    """Returns the bytes of the allocations in sequence, with a negative sign where they are freed; without the last frees.

    Autograd frees the gradient of the loss behind the code.
    """
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
@pytest.mark.parametrize("budget", [13_977_600, 0.55, 0.75])
def test_a_budget_bounds_whole_blocks(budget):
    """The allocator counts a block whole if it does not split off the rest. The plan for 55 % requests 13,977,600 bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        step = planned_step(*on_card(blocks()), cost_model="roofline", memory_budget=budget)
    own = step.result.allocations
    assert own is not None
    found = peak_block_bytes(own.events, is_expandable=False)
    assert found + step.report.code_headroom_bytes == step.report.compiled_peak_bytes <= step.report.budget_bytes
