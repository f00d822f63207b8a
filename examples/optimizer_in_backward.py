"""Trains a small language model with an AdamW in the backward: each gradient is freed as soon as its parameter has stepped."""

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
    def __init__(self, layers: int = 8, width: int = 256, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


model = Model()
optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}


def step_and_free(parameter: torch.Tensor) -> None:
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_and_free)

options = {"memory_budget": "12MiB", "hooks_free_gradients": True}  # all gradients together take 16 MiB
compiled = torch.compile(model, backend="autoremat", options=options)
for step, tokens in enumerate(torch.randint(256, (4, 1, 128))):
    with autoremat.track_peak("cpu") as peak:
        loss = compiled(tokens)
        loss.backward()
    print(f"step {step}: loss {loss.item():.3f}, peak {peak.bytes / 2**20:.1f} MiB")
print(autoremat.reports()[-1].notes[0])
