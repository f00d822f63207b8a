"""Policies and orders under Inductor: in the code that it generates, and in the keys of its caches."""

from __future__ import annotations

import pytest
import torch
from captured import Seen, planned
from torch import nn
from torch.nn import functional as F

import autoremat

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.up, self.down = name, nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(autoremat.name(F.gelu(self.up(x)), self.name)), 0.1)


@pytest.fixture(autouse=True)
def no_records(tmp_path, monkeypatch):
    """Nothing that an earlier test or run left behind answers."""
    monkeypatch.setenv("AUTOREMAT_CACHE_DIR", str(tmp_path))


def stack(name: str = "hidden") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(name), Block(name))


def loss_of(model: nn.Module):
    return lambda x: model(x).square().mean()


def compiled(model: nn.Module, x: torch.Tensor, **options: object) -> tuple[Seen, autoremat.Report]:
    seen, function = planned(loss_of(model), x, compiler="inductor", **options)
    function(x).backward()
    return seen, autoremat.reports()[-1]


def test_two_policies_never_share_a_cache():
    x = torch.randn(32, 16)
    kept, kept_report = compiled(stack(), x, save=["*"])
    full, full_report = compiled(stack(), x, policy="full")
    assert not kept.plan.recomputed
    assert {module.partition(".")[2] for module, _ in full.recomputed()} >= {"up"}
    again, again_report = compiled(stack(), x, save=["*"])  # from the caches: nothing is planned
    assert not again.plans
    assert (kept_report.saved_bytes, again_report.saved_bytes) == (kept_report.saved_bytes,) * 2
    assert full_report.saved_bytes < kept_report.saved_bytes


def test_a_name_is_part_of_the_key():
    x = torch.randn(32, 16)
    first, _ = compiled(stack(), x, recompute=["hidden"], memory_budget="1GiB")
    assert first.recomputed()
    with pytest.warns(autoremat.ConstraintWarning, match="'hidden' matches nothing"):
        second, _ = compiled(stack("other"), x, recompute=["hidden"], memory_budget="1GiB")
    assert second.plans  # planned anew


def test_recomputed_dropout_is_the_same_under_inductor():
    x = torch.randn(32, 16)
    gradients = {}
    for policy in (None, "full"):
        model = stack()
        seen, function = planned(loss_of(model), x, compiler="inductor", policy=policy)
        torch.manual_seed(1)
        function(x).backward()
        gradients[policy] = [p.grad for p in model.parameters()]
    assert seen.plan.recomputed
    for plain, recomputed in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(plain, recomputed)
