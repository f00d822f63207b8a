"""Small models for the emulated card: Triton's interpreter takes its time. Each returns a scalar loss."""

from collections.abc import Callable, Mapping

import models
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, tuple[Tensor, ...]]


class Transformer(nn.Module):
    """An encoder layer with pre-norm: attention and a feed-forward part."""

    def __init__(self, width: int, heads: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.projection(self.first_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.second_norm(x))


class Experts(nn.Module):
    """A mixture of experts: each token takes the two of most weight. All shapes are static."""

    def __init__(self, width: int, number: int = 4, taken: int = 2) -> None:
        super().__init__()
        self.router, self.taken = nn.Linear(width, number, bias=False), taken
        self.up = nn.Parameter(torch.randn(number, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(number, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.taken)
        shares = torch.zeros(len(tokens), len(self.up), device=x.device).scatter(1, chosen, weights).to(x.dtype)
        hidden = F.silu(torch.einsum("td,edh->eth", tokens, self.up))
        return torch.einsum("eth,ehd,te->td", hidden, self.down, shares).view_as(x)


class TokenClassifier(nn.Module):
    """Layers over a sequence, and a classification of each element."""

    def __init__(self, first: nn.Module, layers: list[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.first, self.layers, self.head = first, nn.ModuleList(layers), nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def experts() -> Built:
    layers: list[nn.Module] = [Transformer(64, 4, Experts(64)) for _ in range(2)]
    tokens = torch.randint(128, (2, 32))
    return TokenClassifier(nn.Embedding(128, 64), layers, 64, 128), (tokens, tokens.roll(-1, 1))


def shortened(name: str, **sizes: int) -> Built:
    """Returns a model of `tests/models.py` with a batch of two."""
    module, inputs = models.build(name, **sizes)
    return module, tuple(tensor[:2, :64] if tensor.dim() == 2 else tensor[:2] for tensor in inputs)


MODELS: Mapping[str, Callable[..., Built]] = {
    "llama": lambda layers=2: shortened("llama", layers=layers),
    "gpt2": lambda layers=2: shortened("gpt2", layers=layers),
    "resnet": lambda blocks=2: shortened("resnet", blocks=blocks),
    "experts": experts,
}
HAVE_DROPOUT = frozenset({"gpt2"})
"""Models whose gradients eager code does not repeat: it draws other numbers."""


def build(name: str, **sizes: int) -> Built:
    """Returns the named model and its inputs, with weights that depend on the arguments alone."""
    torch.manual_seed(0)
    return MODELS[name](**sizes)
