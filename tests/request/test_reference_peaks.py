"""The reference peak of a share, against the peak that is measured without autoremat."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from block_models import Gelu, block
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoremat
from autoremat.compiler import reference


class Tied(nn.Module):
    """A projection that shares its weight with the embedding. Inductor keeps the gradient of the logits until the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(500, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(F.gelu(self.up(self.embedding(tokens))))
        return F.cross_entropy(hidden @ self.embedding.weight.T, tokens)


def regions(layer: Callable[[], nn.Module]) -> nn.Module:
    """Returns layers in checkpointed regions."""

    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self.layers:
                x = checkpoint(one, x, use_reentrant=False)
            return x.square().mean()

    return Regions()


def normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


STEPS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "gelu": lambda: (Gelu(), torch.randn(512, 64)),
    "tied": lambda: (Tied(), torch.randint(500, (512,))),
    "regions": lambda: (regions(block), torch.randn(512, 64)),
    "batch norm in regions": lambda: (regions(normalized), torch.randn(32, 8, 32, 32)),
}


def measured_alone(step: str, backend: str) -> tuple[int, nn.Module, torch.Tensor]:
    """Returns the measured peak of a step without this package, and the step."""
    model, x = STEPS[step]()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with autoremat.track_peak("cpu") as peak:
            compiled(x).backward()
    return peak.bytes, model, x


@pytest.mark.parametrize("step", STEPS)
def test_the_reference_of_uncompiled_code_is_what_aot_eager_needs(step):
    """Torch's partition recomputes checkpointed regions there too."""
    alone, model, x = measured_alone(step, "aot_eager")
    report = autoremat.explain(model, x, options={"compiler": "aot_eager"} | {"memory_budget": 1.0})
    assert report.reference_source in (reference.TORCH, reference.SMALLEST)
    assert report.reference_bytes == pytest.approx(alone, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_the_reference_is_what_plain_inductor_needs(step):
    alone, model, x = measured_alone(step, "inductor")
    report = autoremat.explain(model, x, options={"memory_budget": 0.95, "cost_model": "roofline"})
    assert report.reference_source == reference.CODE
    assert report.reference_bytes - report.code_headroom_bytes == pytest.approx(alone, rel=0.03)


class Images(nn.Module):
    """Convolutions, whose images and weights Inductor copies to channels last on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(before, 16, 3, padding=1) for before in (3, 16, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


@pytest.mark.slow
def test_measured_peaks_keep_to_the_share_of_plain_inductors():
    model, x = Images(), torch.randn(8, 3, 48, 48)
    peaks = []
    for backend, options in (("inductor", None), ("autoremat", {"memory_budget": 0.8, "cost_model": "roofline"})):
        step = torch.compile(model, backend=backend, options=options)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with autoremat.track_peak("cpu") as peak:
                step(x).backward()
        peaks.append(peak.bytes)
    report = autoremat.reports()[-1]
    plain, ours = peaks
    assert report.reference_source == reference.CODE
    assert report.reference_bytes - report.code_headroom_bytes <= plain <= report.reference_bytes
    assert ours <= min(report.budget_bytes, 0.82 * plain)
