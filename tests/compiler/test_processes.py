"""Compiled modules in a process: threads, copies, pickles, resets, several budgets; and torch's cache artifacts between two."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracles import same_bits
from torch import Tensor, nn

import autoremat

UNCOMPILED = {"compiler": "aot_eager"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(32, 32), nn.Tanh())))


def batch() -> Tensor:
    return torch.linspace(-1, 1, 256 * 32).view(256, 32)


def compile_(module: nn.Module, budget: object = 0.75) -> nn.Module:
    return torch.compile(module, backend="autoremat", options={**UNCOMPILED, "memory_budget": budget})


def gradients(compiled: nn.Module) -> list[Tensor]:
    compiled.zero_grad(set_to_none=True)
    compiled(batch()).exp().mean().backward()
    return [p.grad for p in compiled.parameters()]


def all_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(same_bits, some, others))


def test_budgets_of_one_process_do_not_mix():
    before = len(autoremat.reports())
    shares = (0.75, 1.0, 0.85)
    found = [gradients(compile_(model(), share)) for share in shares]
    reports = autoremat.reports()[before:]
    assert [r.budget_bytes for r in reports] == [int(share * reports[0].baseline_peak_bytes) for share in shares]
    assert all(r.fits for r in reports)
    assert all(all_same(one, found[0]) for one in found)


@pytest.mark.slow
def test_threads_that_compile_together_keep_their_own_budgets():
    expected = gradients(compile_(model(), 1.0))
    torch._dynamo.reset()
    barrier = threading.Barrier(3)

    def work(share: float) -> list[Tensor]:
        module = model_of[share]
        barrier.wait()
        return gradients(compile_(module, share))

    before, model_of = len(autoremat.reports()), {share: model() for share in (0.75, 0.85, 1.0)}
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, model_of))
    assert all(all_same(one, expected) for one in found)
    reports = autoremat.reports()[before:]
    assert sorted(r.budget_bytes for r in reports) == [int(s * reports[0].baseline_peak_bytes) for s in sorted(model_of)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_copies_train_alone(duplicate):
    compiled = compile_(model())
    expected = gradients(compiled)
    twin = duplicate(compiled)
    assert all_same(gradients(twin), expected)
    with torch.no_grad():
        next(iter(twin.parameters())).zero_()
    assert all_same(gradients(compiled), expected)
    assert not all_same(gradients(twin), expected)
