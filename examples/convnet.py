"""A small residual network with batch normalisation, trained on random images under two budgets."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn import functional

import autoremat
from autoremat.basics.units import format_bytes

STEPS = 4


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions; halves the image and sets the channels where `stride` is 2."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(out_channels)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out_channels)
        same = stride == 1 and channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def build_network() -> nn.Sequential:
    torch.manual_seed(0)
    shapes = [(16, 16, 1)] * 4 + [(16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    blocks = [ResidualBlock(channels, out_channels, stride) for channels, out_channels, stride in shapes]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(memory_budget: float) -> None:
    """Trains for some steps under `memory_budget`, a share of the peak without autoremat; prints the outcome."""
    torch._dynamo.reset()
    network = build_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    compiled = torch.compile(network, backend="autoremat", options={"memory_budget": memory_budget})
    images, labels = torch.randn(32, 3, 64, 64), torch.randint(10, (32,))
    peak = autoremat.track_peak("cpu")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = None  # frees the last step's
        with peak if step else contextlib.nullcontext():  # the first step compiles
            loss = functional.cross_entropy(compiled(images), labels)
            loss.backward()
        optimizer.step()
    report = autoremat.reports()[-1]
    print(
        f"budget {memory_budget:.0%} = {format_bytes(report.budget_bytes)}: measured {format_bytes(peak.bytes)}, "
        f"{report.recomputed_ops} operations recomputed, loss {loss.item():.5f}"
    )


if __name__ == "__main__":
    for share in (0.8, 0.5):
        train(share)
