"""The minimum that an error names: it suffices as the budget, or the error says that it is simulated."""

from __future__ import annotations

import random

import pytest
import torch
from random_modules import RandomModule, fresh_inputs
from strategies import STEPS, Program, Step

import autoremat
from autoremat.basics.errors import BudgetInfeasible
from autoremat.compiler import planning


def random_program(seed: int, length: int = 10) -> Program:
    """A program whose statements read the newest tensor more often than not."""
    draw, steps = random.Random(seed), []
    for number in range(length):
        first, second = (number + 2 if draw.random() < 0.6 else draw.randrange(number + 3) for _ in range(2))
        steps.append(Step(draw.choice(STEPS), first, second, draw.randrange(3)))
    return Program(tuple(steps))


def explained(seed: int, budget: int, lower: bool = True) -> autoremat.Report:
    """The report of a random program under Inductor with its code, which is not compiled."""
    torch.manual_seed(seed)
    model = RandomModule(random_program(seed))
    options = {"memory_budget": budget, "cost_model": "roofline"}
    return autoremat.explain(lambda *inputs: model(*inputs)[0], *fresh_inputs(), options=options, lower=lower)


def named_minimum(seed: int, budget: int, lower: bool = True) -> BudgetInfeasible:
    with pytest.raises(BudgetInfeasible) as raised:
        explained(seed, budget, lower)
    return raised.value


@pytest.mark.slow
def test_the_minimum_that_an_error_names_suffices():
    error = named_minimum(0, 1)
    assert not error.is_simulated
    assert explained(0, error.minimum_bytes).compiled_peak_bytes <= error.minimum_bytes


def test_a_minimum_without_code_is_said_to_be_simulated(monkeypatch):
    monkeypatch.setattr(planning, "QUICK_OPS", 0)
    assert named_minimum(0, 1, lower=False).is_simulated
