"""Budgets for a step of several compiled graphs, predicted and measured.

    python benchmarks/steps.py

Twelve blocks of a language model on a CPU, the planned graphs uncompiled: with five graph breaks, and compiled one by one. For
each budget the peak that the step profile predicts, the measured peak, and the measured peak if every graph has the budget
for itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import measured_peak, mebibytes, parser, run, table
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import autoremat

EAGER = {"compiler": "aot_eager"}
WIDTH, VOCABULARY = 64, 256
SHARES = (1.0, 0.8, 0.6, 0.4)


class Block(nn.Module):
    """Attention and a gated product, each around a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inwards, self.outwards = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.inwards(self.first(x)).chunk(3, -1))
        x = x + self.outwards(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        gate, value = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    """Embedding, twelve blocks, head and loss; with a graph break after each second block if it is compiled whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(12))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        b = self.blocks
        x = b[1](b[0](x))
        torch._dynamo.graph_break()
        x = b[3](b[2](x))
        torch._dynamo.graph_break()
        x = b[5](b[4](x))
        torch._dynamo.graph_break()
        x = b[7](b[6](x))
        torch._dynamo.graph_break()
        x = b[9](b[8](x))
        torch._dynamo.graph_break()
        x = b[11](b[10](x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def broken(model: Model, budget: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the model compiled whole."""
    return torch.compile(model, backend="autoremat", options={**EAGER, "memory_budget": budget})


def regional(model: Model, budget: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the model with its blocks compiled one by one."""
    for block in model.blocks:
        block.compile(backend="autoremat", options={**EAGER, "memory_budget": budget})
    return model


def measured(model: Model, build: Callable[..., Any], tokens: torch.Tensor, budget: Any) -> int | None:
    """Returns the peak of the second step in bytes; None if a graph does not fit."""
    torch.compiler.reset()
    step = build(model, budget)
    try:
        step(tokens).backward()
    except torch._dynamo.exc.BackendCompilerFailed:
        return None
    peak = measured_peak(lambda: step(tokens).backward(), model)
    model.zero_grad(set_to_none=True)
    return peak


BUILDERS = {"5 breaks": broken, "12 blocks": regional}


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Yields a row for each budget: shares of the step's peak without recomputation, and the least."""
    torch.manual_seed(0)
    build, model, tokens = BUILDERS[name], Model(), torch.randint(0, VOCABULARY, (4, 128))
    build(model, None)
    found = autoremat.profile_step(model, tokens, memory_budget=None, options=EAGER)
    for share in (*SHARES, found.minimum_peak_bytes / found.baseline_peak_bytes):
        profile = found.within(max(int(share * found.baseline_peak_bytes), found.minimum_peak_bytes))
        peaks = {
            "budget": profile.budget_bytes,
            "predicted": profile.peak_bytes,
            "measured": measured(model, build, tokens, profile),
            "each for itself": measured(model, build, tokens, profile.budget_bytes),
        }
        yield {"graphs": name, "share": share} | peaks | {"added_seconds": profile.added_seconds}


def shown(rows: list[dict[str, Any]]) -> list[Table]:
    columns = ("budget", "predicted", "measured", "each for itself")
    lines = [
        {"graphs": row["graphs"], "share": f"{row['share']:.0%}"} | {column: mebibytes(row[column]) for column in columns}
        for row in rows
    ]
    return [table("Peaks of the step, MiB", lines)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rows = run("steps", parser(__doc__, BUILDERS).parse_args(), dict, measure, shown)
    if any(row["measured"] is None or row["measured"] > row["budget"] for row in rows):
        raise SystemExit("a measured peak is over its budget")
