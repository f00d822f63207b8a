"""A small decoder whose blocks are a list, and the process group of the examples."""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed, nn

ROWS, LENGTH, WIDTH, VOCABULARY = 8, 64, 64, 256


def join() -> tuple[int, int]:
    """Forms the gloo group that torchrun has prepared, and returns this process's rank and the number of ranks."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // distributed.get_world_size()))
    return distributed.get_rank(), distributed.get_world_size()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # A rank of a tensor-parallel job has some of the heads, so their number follows from the width of the projection.
        parts = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, 4)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and the tokens that follow them."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
