"""Dead code of a captured graph: what no result and no effect needs is gone before the graph is cut into parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoremat

F = nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
Dead = Callable[["Net", Tensor, Tensor], Any]


class Net(nn.Module):
    def __init__(self, dead: Dead) -> None:
        super().__init__()
        self.layers, self.norm, self.dead = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.BatchNorm1d(16), dead
        self.embedding = nn.Embedding(8, 16, max_norm=0.1)
        self.register_buffer("kept", torch.zeros(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        h = F.dropout(self.layers[1](self.layers[0](x).relu()), 0.5)
        h = F.dropout(self.layers[2](h), 0.5)
        self.dead(self, noise, h)
        return self.layers[3](h).square().mean()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


square = Square.apply
DEAD: dict[str, Dead] = {
    "product": lambda net, noise, h: net.layers[3](h) * noise,
    "changes a dead tensor": lambda net, noise, h: F.relu(h.sin().add_(noise), inplace=True).__setitem__(0, noise[0]),
    "checkpoint": lambda net, noise, h: checkpoint(lambda a, b: F.dropout(a * b).sin(), h, noise, use_reentrant=False),
    "function": lambda net, noise, h: square(h * noise),
}  # fmt: skip
EFFECTS: dict[str, Dead] = {
    "running statistics": lambda net, noise, h: net.norm(h * noise),
    "running statistics in a checkpoint": lambda net, noise, h: checkpoint(net.norm, h * noise, use_reentrant=False),
    "changes a view of a buffer": lambda net, noise, h: net.kept[2:4].mul_(2).add_(noise[:2]),
    "changes a parameter": lambda net, noise, h: net.embedding(torch.arange(8)) * noise,
}


def trained(dead: Dead, backend: str, **options: Any) -> list[Tensor]:
    """One step: gradients, state and the next random number."""
    torch.compiler.reset()
    torch.manual_seed(0)
    net = Net(dead)
    given = {"backend": backend} | ({"options": options} if options else {})
    torch.compile(net, **given)(torch.ones(8, 16)).backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [*gradients, *net.buffers(), net.embedding.weight.detach(), torch.rand(1)]


@pytest.mark.parametrize("name", DEAD | EFFECTS)
def test_parts_draw_and_change_what_the_whole_graph_does(name):
    dead = (DEAD | EFFECTS)[name]
    before = len(autoremat.reports())
    parts = trained(dead, "autoremat", compiler="aot_eager", cost_model="roofline", early_gradients=3)
    assert len(autoremat.reports()) - before > 1
    whole = trained(dead, "aot_eager")
    assert len(parts) == len(whole)
    assert all(map(same_bits, parts, whole))
