"""Hints: each is given with figures, once in a process."""

import logging

import pytest
import torch
from block_models import MeanSquare, Regions
from torch import nn

import autoremat
from autoremat.basics.errors import BudgetInfeasible
from autoremat.compiler import dynamo_backend

X = torch.randn(256, 32)
UNCOMPILED = {"compiler": "aot_eager", "cost_model": "roofline"}


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(dynamo_backend, "_given", set())


def layers(kind: type[MeanSquare] = MeanSquare) -> MeanSquare:
    return kind(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))


def hints_of(model, **options) -> tuple[str, ...]:
    return autoremat.explain(model, X, options=UNCOMPILED | options).hints


def test_checkpoints_left_on_are_told_with_their_time():
    (hint,) = hints_of(layers(Regions), memory_budget=0.9)
    assert "ops for" in hint
    assert "of the budget stay unused" in hint
    assert hints_of(layers(), memory_budget=0.9) == ()


def test_a_step_without_a_budget_is_told_what_it_needs():
    (hint,) = hints_of(layers())
    assert "no memory_budget is set: this plan needs" in hint
    assert hints_of(layers(), max_slowdown=0.03) == ()


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.hidden(x).tanh())
        return logits.square().mean(), logits


def test_outputs_beside_the_loss_are_named_in_hint_and_error():
    (hint,) = hints_of(Cached(), memory_budget=1.0)
    assert "logits (64.00 KiB)" in hint
    with pytest.raises(BudgetInfeasible) as raised:
        autoremat.explain(Cached(), X, options=UNCOMPILED | {"memory_budget": 1000}, advice=False)
    assert hint in raised.value.remedies
    assert "such as the loss without the logits" not in str(raised.value)


def test_each_hint_is_given_once(caplog):
    with caplog.at_level(logging.WARNING, "autoremat"):
        for _ in range(2):
            model = layers()
            torch.compile(model, backend="autoremat", options=UNCOMPILED)(X).backward()
    assert len(caplog.records) == 1
