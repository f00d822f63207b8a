"""An "auto" budget and the optimizers that are alive: state that they will allocate is not free."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from measured_optimizers import Model, Sorting, measured_updates

import autoremat
from autoremat.device_memory.live_optimizers import live_optimizers, rows_to_come
from autoremat.device_memory.optimizer_run import optimizer_memory
from autoremat.request.budgets import request_of
from autoremat.request.surroundings import Surroundings


def test_auto_leaves_room_for_state_that_does_not_exist_yet(monkeypatch):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    device = torch.device("cpu")
    assert optimizer in live_optimizers(device)
    monkeypatch.setattr("autoremat.device_memory.live_optimizers.live_optimizers", lambda device: [optimizer])
    around = partial(Surroundings, device, free_bytes_of=lambda device: 2**30)
    options = autoremat.Options(memory_budget="auto", auto_headroom=2**20)
    limits = request_of(options, around()).limits
    to_come = optimizer_memory([optimizer], "cpu").state_bytes
    assert limits.peak_bytes == 2**30 - 2**20 - to_come
    assert limits.ledger is not None
    measured_updates(optimizer, model)
    assert rows_to_come(device) == ()
    assert request_of(options, around()).limits.peak_bytes == 2**30 - 2**20


def test_auto_warns_of_an_optimizer_that_cannot_be_predicted(monkeypatch):
    optimizer = Sorting(Model(1).parameters())
    monkeypatch.setattr("autoremat.device_memory.live_optimizers.live_optimizers", lambda device: [optimizer])
    with pytest.warns(autoremat.BudgetWarning, match=r'device_budget\("auto", model, optimizer\)'):
        assert rows_to_come(torch.device("cpu")) == ()
