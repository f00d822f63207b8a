"""Buffers that the code keeps for later ones of their size: some are kept for long, and none raises the peak."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoremat
from autoremat.torch_private.buffer_reuse import LiveBytes

ROWS, WIDTH = 256, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def peak_of_code() -> int:
    """Returns the peak of the generated code in bytes. Without a memory budget, that peak does not change the plan."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    options = {"max_slowdown": 0.1, "cost_model": "roofline"}
    explanation = autoremat.explain(lambda x: model(x).square().mean(), torch.randn(ROWS, WIDTH), lower=True, options=options)
    assert explanation.compiled_peak_bytes is not None
    return explanation.compiled_peak_bytes


@pytest.mark.slow
def test_a_kept_buffer_does_not_raise_the_peak(monkeypatch):
    kept = []
    takes = LiveBytes.takes

    def recorded(self: LiveBytes, first: int, last: int, size: int) -> bool:
        is_kept = takes(self, first, last, size)
        kept.append((is_kept, last - first))
        return is_kept

    monkeypatch.setattr(LiveBytes, "takes", recorded)
    peak = peak_of_code()
    assert {is_kept for is_kept, nodes in kept if nodes > 0} == {True, False}
    monkeypatch.setattr(LiveBytes, "takes", lambda *arguments: False)
    assert peak_of_code() == peak
    monkeypatch.setattr(LiveBytes, "takes", lambda *arguments: True)
    assert peak_of_code() > peak
