"""Steps of small models with dropout, whose saved tensors may wait in other forms: what is planned, and what is measured."""

import copy
from collections.abc import Callable
from typing import Any

import stays
import torch
from block_models import MeanSquare
from oracles import Outcome, differences, train_step
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat
from autoremat import Report, track_peak
from autoremat.report.decisions import Decision

AMPLE, SCARCE = 2**30, 2**18
TANGENT_BYTES = 512
"""Bytes that a plan counts for the gradient of the loss, which is gone at most peaks."""

STORES = {"host": ("device", "host"), "bits": ("device", "bits"), "both": ("device", "host", "bits")}
BUDGETS = ("least", "middle", "loose")


def perceptron() -> nn.Module:
    return MeanSquare(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(5)))


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
    return MeanSquare(*(copy.deepcopy(layer) for _ in range(3) for layer in layers))


class Encoder(nn.Module):
    """Attention and a feed-forward part, each with a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.projection, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.feed_forward = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.projection(self.norms[0](x)).chunk(3, -1)
        weights = F.dropout((queries @ keys.transpose(1, 2) / 6).softmax(-1), 0.1)
        x = x + F.dropout(self.out(weights @ values), 0.1)
        return (x + self.feed_forward(self.norms[1](x))).square().mean()


class Gated(nn.Module):
    """Gated feed-forward parts with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(32, 128) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            value, gate = up(x).chunk(2, -1)
            x = x + F.dropout(down(value * F.silu(gate)), 0.2)
        return x.square().mean()


class Language(nn.Module):
    """An embedding, two layers, and a loss over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 32)) for _ in "ab")
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(F.dropout(self.embedding(tokens), 0.1))
        return F.cross_entropy(self.head(hidden), tokens)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "perceptron": lambda: (perceptron(), torch.randn(512, 32)),
    "encoder": lambda: (Encoder(), torch.randn(8, 48, 32)),
    "convolutions": lambda: (convolutions(), torch.randn(4, 8, 20, 20)),
    "gated": lambda: (Gated(), torch.randn(384, 32)),
    "language": lambda: (Language(), torch.randint(0, 64, (512,))),
}


class Cells:
    """Steps of one model by one compiler. Their reference is the step whose saved tensors stay as they are."""

    def __init__(self, model: str, compiler: str) -> None:
        torch.manual_seed(0)
        self.module, self.x = MODELS[model]()
        self.options: dict[str, Any] = {"compiler": compiler, "cost_model": "roofline"}
        self.reference = self._trained(self.options)[1]

    def _trained(self, options: dict[str, Any]) -> tuple[Any, Outcome]:
        """The compiled model after a step, and the outcome of a second one."""
        torch._dynamo.reset()
        module = copy.deepcopy(self.module)  # steps change the statistics of norms
        compiled = torch.compile(module, backend="autoremat", options=options)
        train_step(compiled, module, (self.x,), 0)
        return compiled, train_step(compiled, module, (self.x,), 1)

    def check(self, store: str, budget: str) -> Report:
        """Checks a step by a ``store`` under a ``budget``, of which the middle one has little memory on the host."""
        host = SCARCE if budget == "middle" else AMPLE
        allowed = {**self.options, "store": STORES[store]} | ({"host_memory": host} if "host" in STORES[store] else {})
        ends = autoremat.explain(self.module, self.x, options=allowed)
        least, most = ends.minimum_peak_bytes + ends.code_headroom_bytes, ends.baseline_peak_bytes + ends.code_headroom_bytes
        bytes_ = {"least": least, "middle": (least + most) // 2, "loose": (least + 4 * most) // 5}[budget]
        compiled, outcome = self._trained({**allowed, "memory_budget": bytes_})
        report, before = autoremat.reports()[-1], stays.statistics("cpu")
        compiled.zero_grad(set_to_none=True)
        with track_peak("cpu") as peak:
            compiled(self.x).backward()
        done = stays.statistics("cpu")
        if self.options["compiler"] == "aot_eager":
            assert not differences(outcome, self.reference)
        else:
            torch.testing.assert_close(outcome, self.reference, rtol=1e-4, atol=1e-6)
        assert -TANGENT_BYTES <= peak.bytes - (report.peak_bytes - report.code_headroom_bytes) <= report.code_headroom_bytes
        assert report.peak_bytes <= bytes_
        moved = (done.to_host_bytes - before.to_host_bytes, done.from_host_bytes - before.from_host_bytes)
        assert moved == (done.held_bytes, report.host_peak_bytes) == (report.host_peak_bytes, done.held_bytes)
        assert done.held_bytes <= host
        assert done.used_bytes == 0
        offloaded = [value.bytes for value in report.values if value.decision is Decision.OFFLOADED]
        assert sum(offloaded) == report.moved_bytes == moved[0]
        return report
