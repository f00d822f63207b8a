"""Small models of equal blocks, whole, with graph breaks, or compiled block by block."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 32, 96
Function = Callable[[torch.Tensor], torch.Tensor]


def curved(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).sin()


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


class MeanSquare(nn.Module):
    """The mean of squares of what ``layers`` compute."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).float().square().mean()


class Regions(MeanSquare):
    """The same, with each layer in a checkpoint region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


class Tied(nn.Module):
    """Layers, and a projection onto words that shares its weight with the embedding."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(words, width), nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.cross_entropy(hidden @ self.embedding.weight.t(), tokens)


class Chain(nn.Module):
    """Linear layers with an activation behind each, and a loss."""

    def __init__(
        self, layers: int, width: int, bias: bool = True, activation: Function = curved, loss: Function = mean_square
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(layers))
        self.activation, self.loss = activation, loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.loss(x)


class FeedForward(nn.Module):
    """A norm and two products with a residual."""

    def __init__(self, width: int, activation: Function = F.gelu) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Block(nn.Module):
    """A residual block: two products, a norm, dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Broken(nn.Module):
    """Six blocks and a loss; the first ``breaks`` blocks end in a graph break."""

    def __init__(self, breaks: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.breaks = breaks
        self.a, self.b, self.c, self.d, self.e, self.f = (Block(dropout) for _ in range(6))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.a(x))
        if self.breaks > 0:
            torch._dynamo.graph_break()
        x = self.b(x)
        if self.breaks > 1:
            torch._dynamo.graph_break()
        x = self.c(x)
        if self.breaks > 2:
            torch._dynamo.graph_break()
        x = self.d(x)
        if self.breaks > 3:
            torch._dynamo.graph_break()
        x = self.e(x)
        if self.breaks > 4:
            torch._dynamo.graph_break()
        return self.f(x).square().mean()


class Layered(nn.Module):
    """An embedding and a head that stay eager around layers that are compiled one by one."""

    def __init__(self, layers: int = 12, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden), tokens)

    def compile_layers(self, **arguments) -> "Layered":
        for layer in self.layers:
            layer.compile(**arguments)
        return self


class Gelu(nn.Module):
    """Blocks whose activations torch's own partition recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.layer_norm(x + block(x), (64,)).tanh()
        return x.square().mean()


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
