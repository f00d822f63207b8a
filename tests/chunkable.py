"""Models with a projection and a loss that can be chunked, and one step of their training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trained_steps import trained

import autoremat

WORDS, WIDTH, BATCH, LENGTH = 320, 16, 3, 22

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits (batch, length, words) and labels (batch, length)."""


def flat(logits: Tensor, labels: Tensor, **keywords: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1), **keywords)


def shifted_as_transformers_does(logits: Tensor, labels: Tensor) -> Tensor:
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return flat(logits.float(), labels, ignore_index=-100)


def some_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, torch.where(labels % 3 == 0, 7, labels), ignore_index=7)


def sliced(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float()[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(30 * torch.tanh(logits / 30), labels)


def with_penalty(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) + 1e-2 * logits.float().logsumexp(-1).square().mean()


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    losses = flat(logits, labels, reduction="none").view(BATCH, LENGTH)
    mask = (labels % 2).to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    scores = torch.log_softmax(logits, -1)
    return -scores.gather(-1, labels[..., None]).squeeze(-1).mean()


LOSSES: dict[str, Loss] = {
    "mean": flat,
    "sum": lambda logits, labels: flat(logits, labels, reduction="sum") / 100,
    "weighted": lambda logits, labels: flat(logits, labels, weight=torch.linspace(0.5, 2.0, WORDS).to(logits.dtype)),
    "smoothed": lambda logits, labels: flat(logits, labels, label_smoothing=0.1),
    "some_ignored": some_ignored,
    "shifted": shifted_as_transformers_does,
    "sliced": sliced,
    "sliced_twice": lambda logits, labels: F.cross_entropy(logits[1:, 3:].flatten(0, 1), labels[1:, 3:].flatten()),
    "cropped": lambda logits, labels: F.cross_entropy(logits[..., : WORDS - 20].flatten(0, 1), labels.flatten() % 300),
    "capped": capped,
    "with_penalty": with_penalty,
    "masked": masked,
    "by_hand": by_hand,
}


class Model(nn.Module):
    """Embedding, a layer that mixes the tokens, and a projection."""

    def __init__(self, loss: Loss, bias: bool = False, tied: bool = False, words: int = WORDS) -> None:
        super().__init__()
        self.loss = loss
        self.embedding = nn.Embedding(words, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embedding(tokens).cumsum(1)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.head(self.hidden(tokens)), tokens)


def tokens_of(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, tokens: Tensor, **options: Any) -> tuple[list[Tensor], autoremat.Report]:
    """The loss and the gradients of one step, and its report; uncompiled graphs unless ``options`` say otherwise."""
    found = trained(model, model, tokens, steps=1, **options)
    return found.tensors, found.report
