"""Tracing a model, as explain does, leaves it as it was."""

from __future__ import annotations

import collections
import types

import pytest
import torch
from torch import nn

import autoremat


class Remembering(nn.Module):
    """Keeps what it computes in containers of every sort, and replaces a buffer."""

    def __init__(self, log: list) -> None:
        super().__init__()
        self.linear, self.log, self.losses = nn.Linear(8, 8), log, [1.5]
        self.cache = types.SimpleNamespace(layers={"keys": [torch.ones(1)]})
        self.seen, self.recent, self.counts = {1}, collections.deque([1, 2]), collections.defaultdict(int, a=1)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        self.remember(y)
        return y.exp().sum()

    @torch.compiler.disable
    def remember(self, y: torch.Tensor) -> None:
        self.total = self.total + y.sum(0)
        self.losses.append(y.mean())
        self.log.append(y)
        self.cache.layers["keys"].append(y)
        self.cache.layers["values"] = [y]
        self.cache.newest = y
        self.seen.add(2)
        self.recent.popleft()
        self.counts["b"] += 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")  # torch 2.11 breaks at the append
def test_explaining_leaves_containers_and_buffers_as_they_were():
    log: list = []
    model, outer = Remembering(log), [3.0]
    total, keys = model.total, list(model.cache.layers["keys"])

    def step(x: torch.Tensor) -> torch.Tensor:
        outer.append(model(x))
        return outer[-1]

    autoremat.explain(step, torch.ones(4, 8), options={"compiler": "aot_eager"})
    assert model.total is total
    assert log == []
    assert outer == [3.0]
    assert model.losses == [1.5]
    assert list(model.cache.layers) == ["keys"]
    assert model.cache.layers["keys"] == keys
    assert not hasattr(model.cache, "newest")
    assert (model.seen, list(model.recent), dict(model.counts)) == ({1}, [1, 2], {"a": 1})
    step(torch.ones(4, 8)).backward()
    assert model.linear.weight.grad is not None
