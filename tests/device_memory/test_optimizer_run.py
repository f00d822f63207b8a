"""The predicted memory of optimizers, those that a process has, and the measured one."""

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
from measured_optimizers import OPTIMIZERS, Model, Sorting, bytes_of, measured_updates, row, state_bytes
from processes import group_of
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

import autoremat
from autoremat.device_memory.inventory import live_optimizers, optimizer_memory, rows_to_come
from autoremat.request.budgets import request_of
from autoremat.request.surroundings import Surroundings

OF_TORCH = {
    f"{kind.__name__} {foreach=}": partial(kind, foreach=foreach)
    for kind in (torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.RAdam, torch.optim.ASGD)
    for foreach in (False, True)
}


@pytest.mark.parametrize("name", OPTIMIZERS | OF_TORCH)
def test_the_predicted_memory_of_an_optimizer_is_the_measured_one(name):
    model, rel = (Model(), 0.01) if name in OPTIMIZERS else (nn.Linear(64, 64), 0.02)
    optimizer = (OPTIMIZERS | OF_TORCH)[name](model.parameters())
    predicted = optimizer_memory([optimizer], "cpu")
    assert predicted.existing_bytes == state_bytes(optimizer)
    first, later = (peak + predicted.existing_bytes for peak in measured_updates(optimizer, model))
    assert predicted.state_bytes == pytest.approx(state_bytes(optimizer), rel=rel)
    assert predicted.first_step_bytes == pytest.approx(first, rel=rel)
    assert predicted.later_step_bytes == pytest.approx(later, rel=rel)
    assert predicted.later_step_bytes >= later or name in OPTIMIZERS  # with the tensors of Python's numbers


@pytest.mark.parametrize("shape", [(64, 64), (96, 160)])
def test_workspaces_of_an_optimizers_products_count(shape):
    model = nn.Linear(*shape, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-3)
    predicted = optimizer_memory([optimizer], "cpu")
    first, later = measured_updates(optimizer, model)
    assert first <= predicted.first_step_bytes <= 1.1 * first
    assert later <= predicted.later_step_bytes <= 1.1 * later


def test_a_prediction_changes_nothing_of_the_optimizer():
    model = Model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)  # replaces the method `step` of the instance
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    measured_updates(optimizer, model)
    before, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    calls.clear()
    predicted = optimizer_memory([optimizer], "cpu")
    assert predicted.existing_bytes == predicted.state_bytes == state_bytes(optimizer)
    assert not calls
    assert scheduler.last_epoch == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    after = optimizer.state_dict()
    assert json.dumps(before["param_groups"]) == json.dumps(after["param_groups"])
    for old, new in zip(before["state"].values(), after["state"].values(), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)


def test_a_sharded_optimizer_has_the_state_of_its_rank_and_is_not_stepped():
    model = Model(2)
    with group_of(2, rank=1):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        weights = [p.detach().clone() for p in model.parameters()]
        predicted = optimizer_memory([optimizer], "cpu")
        beside_its_shard = optimizer_memory([optimizer, optimizer.optim], "cpu")
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert not optimizer.optim.state
        optimizer.step()
    assert 0 < predicted.state_bytes == state_bytes(optimizer.optim) < 1.5 * bytes_of(model.parameters())
    assert beside_its_shard.state_bytes == predicted.state_bytes


def test_local_sgd_counts_the_copy_that_replicas_average_and_averages_nothing():
    model = Model(2)
    copied = bytes_of(model.parameters())
    with group_of():
        averager = PeriodicModelAverager(period=2, warmup_steps=1)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        predicted = optimizer_memory([optimizer], "cpu")
        assert averager.step == 0
        alone, averaged = measured_updates(optimizer, model)
    assert predicted.later_step_bytes == pytest.approx(averaged, rel=0.01)
    assert averaged >= copied > alone


def test_an_optimizer_that_cannot_be_predicted_says_so_and_takes_figures():
    model = Model(1)
    with pytest.raises(autoremat.OptimizerUnpredictable, match=r"step of Sorting does not run .*OptimizerMemory\(state_bytes"):
        autoremat.device_budget("1GiB", model, Sorting(model.parameters()))
    figures = autoremat.OptimizerMemory(state_bytes=1000, later_step_bytes=1500)
    budget = autoremat.device_budget("1GiB", model, figures)
    assert row(budget, "optimizer state after the first step").bytes == 1000
    assert row(budget, "temporaries of the optimizer's first step").bytes == 500


def test_several_optimizers_add_up_and_wrappers_are_looked_through():
    model = Model(2)
    halves = [torch.optim.AdamW(part.parameters()) for part in (model.blocks, model.head)]
    together = optimizer_memory(halves, "cpu")
    assert together.state_bytes == sum(optimizer_memory([one], "cpu").state_bytes for one in halves)

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner

    assert optimizer_memory([Wrapper(halves[0])], "cpu") == optimizer_memory([halves[0]], "cpu")


def test_a_wrapper_of_tensors_counts_its_inner_ones():
    from torch.testing._internal.two_tensor import TwoTensor

    class Doubling(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["pair"] = TwoTensor(torch.zeros_like(p), torch.zeros_like(p))
                state["pair"].add_(1.0)

    model = nn.Linear(64, 64, bias=False)
    assert optimizer_memory([Doubling(model.parameters(), lr=1.0)], "cpu").state_bytes == 2 * bytes_of(model.parameters())


def test_auto_leaves_room_for_state_that_does_not_exist_yet(monkeypatch):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    device = torch.device("cpu")
    assert optimizer in live_optimizers(device)
    monkeypatch.setattr("autoremat.device_memory.inventory.live_optimizers", lambda device: [optimizer])
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
    monkeypatch.setattr("autoremat.device_memory.inventory.live_optimizers", lambda device: [optimizer])
    with pytest.warns(autoremat.BudgetWarning, match=r'device_budget\("auto", model, optimizer\)'):
        assert rows_to_come(torch.device("cpu")) == ()
