"""An "auto" budget and the optimizers that are alive: state that they will allocate is not free."""

from __future__ import annotations

import pytest
import torch
from measured_optimizers import Model, Sorting, measured_updates

import autoremat
from autoremat.compiler.compile_loop import with_bytes
from autoremat.device_memory.live_optimizers import live_optimizers, rows_to_come
from autoremat.device_memory.optimizer_run import optimizer_memory


def test_auto_leaves_room_for_state_that_does_not_exist_yet(monkeypatch):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    device = torch.device("cpu")
    assert optimizer in live_optimizers(device)
    monkeypatch.setattr("autoremat.device_memory.live_optimizers.live_optimizers", lambda device: [optimizer])
    monkeypatch.setattr("autoremat.compiler.compile_loop.free_device_bytes", lambda device: 2**30)
    options = with_bytes(autoremat.Options(memory_budget="auto", auto_headroom=2**20), device)
    to_come = optimizer_memory([optimizer], "cpu").state_bytes
    assert options.memory_budget == 2**30 - 2**20 - to_come
    assert options.device_ledger is not None
    measured_updates(optimizer, model)
    assert rows_to_come(device) == ()
    assert with_bytes(autoremat.Options(memory_budget="auto", auto_headroom=2**20), device).memory_budget == 2**30 - 2**20


def test_auto_warns_of_an_optimizer_that_cannot_be_predicted(monkeypatch):
    optimizer = Sorting(Model(1).parameters())
    monkeypatch.setattr("autoremat.device_memory.live_optimizers.live_optimizers", lambda device: [optimizer])
    with pytest.warns(autoremat.BudgetWarning, match=r'device_budget\("auto", model, optimizer\)'):
        assert rows_to_come(torch.device("cpu")) == ()
