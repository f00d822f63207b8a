"""The ablation of workarounds for Inductor that save time or keep gradients right: steps that run, without one of them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lowering
import model_zoo
import torch
from ablation_workarounds import CASES, EVERYTHING, WORKAROUNDS
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F


class Head(nn.Module):
    """A projection onto a vocabulary and the cross entropy."""

    def __init__(self, width: int = 64, vocabulary: int = 8192) -> None:
        super().__init__()
        self.project = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.project(x), targets)


RUNS: dict[str, tuple[Callable[[], model_zoo.Built], str, dict[str, Any]]] = {
    "head": (lambda: (Head(), (torch.randn(1024, 64), torch.randint(0, 8192, (1024,)))), "one_hot_sums", {}),
    "strided": (CASES["strided"], "preserve_strides", {"recompute": ("aten.relu", "aten.mul")}),
}
STEPS = 21


@dataclass(frozen=True)
class Ran:
    """Steps of one model, without a workaround."""

    model: str
    without: str
    step_seconds: float
    """The median."""
    error: float
    """The largest difference of a gradient from that of eager mode, in its largest entries."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.without


def runs(known: dict[tuple[str, ...], Ran]) -> Iterator[Ran]:
    """Yields the runs that are not known yet."""
    for model, (build, mechanism, options) in RUNS.items():
        for without in (EVERYTHING, mechanism):
            if (model, without) not in known:
                off = contextlib.nullcontext if without == EVERYTHING else WORKAROUNDS[without][0]
                torch._dynamo.reset()
                torch.manual_seed(0)
                built, inputs = build()
                expected = gradients(built, built, inputs)
                compiled = torch.compile(built, backend="autoremat", options={"cost_model": "roofline", **options})
                with off(), lowering.uncached():
                    found = gradients(built, compiled, inputs)
                error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
                yield Ran(model, without, statistics.median(timed(built, compiled, inputs) for _ in range(STEPS)), error)


def gradients(model: nn.Module, called: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    called(*inputs).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def timed(model: nn.Module, called: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    begun = time.perf_counter()
    gradients(model, called, inputs)
    return time.perf_counter() - begun


def tables_of_runs(rows: list[Ran]) -> Iterator[Table]:
    table = Table(title="Steps that run, with all workarounds and without one")
    for column in ("without", "model", "step with all, ms", "without, ms", "largest error of a gradient with all", "without"):
        table.add_column(column, justify="left" if column in ("without", "model") else "right")
    whole = {row.model: row for row in rows if row.without == EVERYTHING}
    for row in (row for row in rows if row.without != EVERYTHING):
        base = whole[row.model]
        seconds = (f"{1e3 * x:.2f}" for x in (base.step_seconds, row.step_seconds))
        table.add_row(row.without, row.model, *seconds, f"{base.error:.1e}", f"{row.error:.1e}")
    yield table
