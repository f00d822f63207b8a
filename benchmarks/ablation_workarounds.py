"""The ablation of workarounds for Inductor: peaks of the code that it generates for one plan, without one of them."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lowering
import model_zoo
import torch
from ablation_shared import Switch, nothing
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat
from autoremat import passes
from autoremat.compiler import lowering as lowering_stage
from autoremat.compiler import peers
from autoremat.compiler.attempts import Accept, Attempt, Rules
from autoremat.torch_private import inductor_lowering


class Masked(nn.Module):
    """Three attentions with one mask, which the backward reads too."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        mask = torch.where(allowed, 0.0, -torch.inf)
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (2, -1)).transpose(1, 2)
            x = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)
        return x.square().mean()


@torch.compiler.nested_compile_region
def region(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.gelu(x @ up) @ down


class Regions(nn.Module):
    """Four calls of a nested compile region."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.ParameterList(torch.randn(width, 4 * width) / 8 for _ in range(4))
        self.down = nn.ParameterList(torch.randn(4 * width, width) / 16 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = region(x, up, down)
        return x.square().mean()


class Strided(nn.Module):
    """Images that are convolved channels last and read by their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x * self.scale).relu()
        rows = hidden.as_strided((4, 8, 16, 16), (2048, 256, 16, 1))
        return self.convolve(hidden).square().mean() + (rows.sin() * torch.arange(16.0)).sum()


CASES: dict[str, Callable[[], model_zoo.Built]] = {
    **lowering.KINDS,
    "masked": lambda: (Masked(), (torch.randn(4, 128, 32), torch.rand(4, 1, 128, 128) > 0.1)),
    "regions": lambda: (Regions(), (torch.randn(512, 64),)),
    "strided": lambda: (Strided(), (torch.randn(4, 8, 16, 16),)),
}
CODE_BETWEEN = (0.05, 0.4, 1.0)


@contextlib.contextmanager
def reading_through_regions() -> Iterator[None]:
    with mock.patch.object(passes, "forward_region_operands", nothing):
        yield


@contextlib.contextmanager
def leaving_layout_copies() -> Iterator[None]:
    """Leaves the copies of images and weights to Inductor, which saves them."""
    unplanned = mock.patch.object(lowering_stage.layouts, "inputs_as_they_are", contextlib.nullcontext)
    with mock.patch.object(passes, "state_layout_copies", nothing), unplanned:
        yield


def reusing_by_estimate() -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which Inductor's own estimate decides on reuse; the kernels stay in order."""
    return mock.patch.object(inductor_lowering, "keeping_peaks", return_value=contextlib.nullcontext())


WORKAROUNDS: dict[str, tuple[Switch, tuple[str, ...]]] = {
    "accumulate": (lambda: mock.patch.object(passes, "accumulate_into_first", nothing), ("gpt2", "t5", "bert")),
    "one_hot_sums": (lambda: mock.patch.object(passes, "simplify_one_hot_sum", nothing), ("gpt2", "llama")),
    "materialize_shared": (lambda: mock.patch.object(passes, "materialize_shared", nothing), ("masked", "t5", "bert")),
    "preserve_strides": (lambda: mock.patch.object(passes, "preserve_strides", nothing), ("strided",)),
    "pass_through": (reading_through_regions, ("regions",)),
    "layout copies": (leaving_layout_copies, ("unet", "densenet", "resnet")),
    "channels last at once": (
        lambda: mock.patch.object(lowering_stage, "before_lowering", nothing), ("unet", "densenet", "resnet"),
    ),
    "pinned kernel order": (
        lambda: mock.patch.object(inductor_lowering, "_pin_order", nothing),
        ("gpt2", "llama", "bert", "t5", "vit", "resnet", "unet", "densenet", "lstm"),
    ),
    "reuse that keeps peaks": (reusing_by_estimate, ("gpt2", "llama", "vit", "unet", "lstm")),
}  # fmt: skip
"""The context that switches each off, and the models for which it may matter."""

EVERYTHING = "-"


@dataclass(frozen=True)
class Coded:
    """The code of one plan, without a workaround."""

    model: str
    place: float
    without: str
    budget_bytes: int
    planned_bytes: int
    """The simulated peak with code headroom."""
    code_bytes: int | None
    cost: float
    """Recomputation and traffic, in steps."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, str(self.place), self.without


def codes(known: dict[tuple[str, ...], Coded]) -> Iterator[Coded]:
    """Yields the codes that are not known yet."""
    for model in CASES:
        mechanisms = [EVERYTHING, *(name for name, (_, models) in WORKAROUNDS.items() if model in models)]
        missing = [(p, m) for p in CODE_BETWEEN for m in mechanisms if (model, str(p), m) not in known]
        if missing:
            whole = explained(model, 1.0, False)
            least = whole.minimum_peak_bytes + whole.code_headroom_bytes
            most = max(whole.baseline_peak_bytes + whole.code_headroom_bytes, least)
        for place, mechanism in missing:
            off = contextlib.nullcontext if mechanism == EVERYTHING else WORKAROUNDS[mechanism][0]
            with off():
                yield coded(model, place, mechanism, int(least + place * (most - least)))


def explained(model: str, budget: int | float, lower: bool) -> autoremat.Report:
    torch._dynamo.reset()
    torch.manual_seed(0)
    built, inputs = CASES[model]()
    options = {"cost_model": "roofline", "memory_budget": budget, "on_infeasible": "best_effort", "time_limit": 60.0}
    return autoremat.explain(built.train(), *inputs, options=options, lower=lower)


def coded(model: str, place: float, without: str, budget: int) -> Coded:
    """Returns the code of the first plan. The loop that plans again is off."""

    def accept(attempts: list[Attempt], rules: Rules) -> Accept | None:
        return Accept() if attempts[-1].is_complete else None

    with mock.patch.object(peers, "next_step", accept):
        report = explained(model, budget, True)
    assert report.plan is not None
    cost = report.plan.cost_seconds / report.step_seconds
    planned_bytes = report.predicted_peak_bytes + report.code_headroom_bytes
    return Coded(model, place, without, budget, planned_bytes, report.compiled_peak_bytes, cost)


def tables_of_workarounds(rows: list[Coded]) -> Iterator[Table]:
    table = Table(title="Peaks of the code that Inductor generates, KiB, with all workarounds and without one")
    for column in (
        "without",
        "model",
        "budget",
        "planned",
        "code with all",
        "code without",
        "more %",
        "cost % with",
        "without",
    ):
        table.add_column(column, justify="left" if column in ("without", "model") else "right")
    summary = Table(title="The same, summed up")
    for column in ("without", "cells", "lower peak", "higher peak", "over the budget with all", "without", "mean %", "worst %"):
        summary.add_column(column, justify="left" if column == "without" else "right")
    whole = {(row.model, row.place): row for row in rows if row.without == EVERYTHING}
    for mechanism in WORKAROUNDS:
        more, over = [], [0, 0]
        for row in (row for row in rows if row.without == mechanism):
            base = whole[row.model, row.place]
            if row.code_bytes is None or base.code_bytes is None:
                continue
            more.append(100 * (row.code_bytes / base.code_bytes - 1))
            over = [over[0] + (base.code_bytes > base.budget_bytes), over[1] + (row.code_bytes > row.budget_bytes)]
            sizes = (row.budget_bytes, row.planned_bytes, base.code_bytes, row.code_bytes)
            costs = (f"{100 * base.cost:.2f}", f"{100 * row.cost:.2f}")
            table.add_row(mechanism, row.model, *(f"{size / 1024:.0f}" for size in sizes), f"{more[-1]:+.1f}", *costs)
        if more:
            counts = (len(more), sum(x < 0 for x in more), sum(x > 0 for x in more), *over)
            summary.add_row(mechanism, *map(str, counts), f"{statistics.fmean(more):+.2f}", f"{max(more):+.1f}")
    yield summary
    yield table
