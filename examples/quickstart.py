"""Trains a residual network with half of the peak memory that it needs without autoremat."""

import torch
from torch import nn

import autoremat


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


model = nn.Sequential(*(Block(128) for _ in range(6)))
compiled = torch.compile(model, backend="autoremat", options={"memory_budget": 0.5})
x = torch.randn(8192, 128)
for _ in range(2):  # the first step compiles
    model.zero_grad()
    with autoremat.track_peak() as peak:
        compiled(x).square().mean().backward()

report = autoremat.reports()[-1]
print(report)
print(f"budget {report.budget_bytes / 2**20:.1f} MiB, measured {peak.bytes / 2**20:.1f} MiB")
