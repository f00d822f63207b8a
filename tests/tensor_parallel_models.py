"""A small tensor-parallel decoder without sequence parallelism: its residual stream is the same on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TOKENS = 16
"""Number of different tokens."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """A decoder without attention. ``scale`` multiplies the embedded tokens."""

    def __init__(self, layers: int, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.head, self.scale = nn.Embedding(TOKENS, width), nn.Linear(width, TOKENS, bias=False), scale
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def tensor_parallel_decoder(layers: int, width: int, scale: float = 1.0) -> Decoder:
    """Returns a decoder that is split over all ranks of the default group."""
    torch.manual_seed(0)
    decoder, mesh = Decoder(layers, width, scale), init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(decoder, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    for layer in decoder.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return decoder
