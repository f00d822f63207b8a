"""Compiled modules in a process: threads, copies, pickles, resets, several budgets."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracles import same_bits
from torch import Tensor, nn

import autoremat
from autoremat import dynamo_backend

UNCOMPILED = {"inner": "aot_eager"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(32, 32), nn.Tanh())))


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


def test_threads_compile_one_after_the_other():
    """Each under its own budget; what one thread patches is not seen by another."""
    expected = gradients(compile_(model(), 1.0))
    torch._dynamo.reset()
    inside, most = [], []
    original = dynamo_backend._compile

    def watched(*arguments):
        inside.append(threading.get_ident())
        most.append(len(inside))
        try:
            return original(*arguments)
        finally:
            inside.remove(threading.get_ident())

    barrier = threading.Barrier(3)

    def work(share: float) -> list[Tensor]:
        module = model_of[share]
        barrier.wait()
        return gradients(compile_(module, share))

    before, model_of = len(autoremat.reports()), {share: model() for share in (0.75, 0.85, 1.0)}
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(dynamo_backend, "_compile", watched)
        found = list(pool.map(work, model_of))
    assert max(most) == 1
    assert all(all_same(one, expected) for one in found)
    reports = autoremat.reports()[before:]
    assert sorted(r.budget_bytes for r in reports) == [int(s * reports[0].baseline_peak_bytes) for s in sorted(model_of)]


def test_a_reset_plans_again():
    compiled, before = compile_(model()), len(autoremat.reports())
    first = gradients(compiled)
    torch.compiler.reset()
    assert all_same(gradients(compiled), first)
    reports = autoremat.reports()[before:]
    assert len(reports) == 2
    assert reports[0].predicted_peak_bytes == reports[1].predicted_peak_bytes


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("used", [False, True])
def test_copies_train_alone(duplicate, used):
    compiled = compile_(model())
    expected = gradients(compile_(model()))
    if used:
        gradients(compiled)
    twin = duplicate(compiled)
    assert all_same(gradients(twin), expected)
    with torch.no_grad():
        next(iter(twin.parameters())).zero_()
    assert all_same(gradients(compiled), expected)
    assert not all_same(gradients(twin), expected)


def test_weights_go_to_a_file_and_to_an_uncompiled_model():
    compiled, file = compile_(model()), io.BytesIO()
    gradients(compiled)
    torch.save(compiled.state_dict(), file)
    file.seek(0)
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in torch.load(file).items()}
    other = nn.Sequential(*copy.deepcopy(list(model())))
    with torch.no_grad():
        other[0].weight.zero_()
    other.load_state_dict(weights)
    other.compile(backend="autoremat", options={**UNCOMPILED, "memory_budget": 0.75})  # in place: no prefix
    assert all_same(gradients(other), gradients(compiled))
    assert other.state_dict().keys() == weights.keys()
