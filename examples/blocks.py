"""Trains a small language model whose blocks are compiled one by one, under one budget for the whole step."""

import torch
from torch import nn

import autoremat


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 12, width: int = 64, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


model = Model()
optimizer = torch.optim.AdamW(model.parameters())
blocks = autoremat.compile_blocks(model.layers, memory_budget=0.6)
for step, tokens in enumerate(torch.randint(256, (4, 8, 256))):
    optimizer.zero_grad(set_to_none=True)
    loss = model(tokens)  # the first two steps are profiled, the third one compiles
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}, {blocks!r}")
print(blocks)
