"""Published trade-offs of memory against time, beside what is predicted for the same models and cards.

    python benchmarks/published_tradeoffs.py                       # the rows that are not stored yet, 15 seconds each
    python benchmarks/published_tradeoffs.py --fresh               # all rows
    python benchmarks/published_tradeoffs.py --only "full" "sqrt"  # rows with such names anew

Each row is a published figure with its source. Models have the published widths and lengths, on the meta device, for a card by
name. They have few layers and no vocabulary, because layers are alike: the added time is a share of the layers' time. A row is
in range if the predicted share of added time is; a row that is not states the reason. Written to
`benchmarks/results/published_tradeoffs.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import functools
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat

RESULTS = Path(__file__).resolve().parent / "results" / "published_tradeoffs.txt"
LAYERS = 2
ROUNDING = 0.02
"""Share of the peak without recomputation by which the peak of a plan may miss the published one."""


class Attention(nn.Module):
    """Attention with a fused kernel, or by two products and a softmax."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.core_attn = FusedCore() if fused else Core()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.core_attn(q, k, v).transpose(1, 2).flatten(2))


class FusedCore(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return F.dropout(scores.softmax(-1), 0.1) @ v


class Mlp(nn.Module):
    """Two products with a GELU, or three with a SwiGLU."""

    def __init__(self, width: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, (1 + gated) * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.act = Swiglu() if gated else nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Swiglu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, fused: bool, gated: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.input_norm, self.mlp_norm = norm(width), norm(width)
        self.attention, self.mlp = Attention(width, heads, fused), Mlp(width, inner, gated)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    def __init__(self, layers: int, *sizes: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().mean()


@dataclass(frozen=True)
class Step:
    """Layers of a published model, its batch, and the card."""

    card: str
    width: int
    heads: int
    inner: int
    batch: int
    length: int
    fused: bool = True
    gated: bool = False
    layers: int = LAYERS

    @functools.lru_cache  # noqa: B019
    def reports(self, **options: Any) -> autoremat.Report:
        """Returns the report of the step under ``options``."""
        with torch.device("meta"):
            sizes = (self.width, self.heads, self.inner, self.fused, self.gated)
            model = Stack(self.layers, *sizes).bfloat16()
            x = torch.empty(self.batch, self.length, self.width, dtype=torch.bfloat16, requires_grad=True)
        chosen = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = {"cost_model": "roofline", "time_limit": 3.0, "on_infeasible": "best_effort"} | chosen
            return autoremat.explain(model, x, device=self.card, options=given)


LLAMA_7B = Step("A100", 4096, 32, 11008, 1, 4096, gated=True)
LLAMA_H100 = Step("H100", 4096, 32, 11008, 1, 4096, gated=True)
LLAMA_70B = Step("H100", 8192, 64, 28672, 1, 4096, gated=True)
GPT_22B = Step("A100", 6144, 64, 24576, 4, 2048, fused=False)
BERT_LARGE = Step("V100", 1024, 16, 4096, 8, 512, fused=False, layers=6)
GPT2_LARGE = Step("V100", 1280, 20, 5120, 8, 512, fused=False, layers=6)
DEEP = Step("A100", 2048, 16, 8192, 4, 1024, layers=6)


@dataclass(frozen=True)
class Row:
    """A published share of added time, as a range, and what to plan for it."""

    name: str
    source: str
    low: float
    high: float
    step: Step
    options: dict[str, Any] = field(default_factory=dict)
    peak: float | None = None
    """Budget as a share of the peak without recomputation; 0 stands for the peak of the other plan."""
    against: dict[str, Any] | None = None
    """Options of the other plan, if the figure compares two plans. None compares with the fastest plan."""
    reason: str = ""
    """Why a prediction may be out of range."""


FASTER = "fused kernels recompute pointwise ops for less than the eager kernels of the source"
FEW = "the working set of one of these few layers needs more memory than that"
ROWS = [
    Row("full checkpointing, low end", "Hugging Face: 20-30 %", 0.2, 0.33, LLAMA_7B, {"policy": "full"}),
    Row("full checkpointing, H100", "torchtitan and Megatron-LM: 20-33 %", 0.2, 0.33, LLAMA_H100, {"policy": "full"}),
    Row("full checkpointing, 22B", "Korthikanti et al. 2022: 30-40 %", 0.25, 0.4, GPT_22B, {"policy": "full"},
        reason="the predicted forward is less than a third of the step: attention that is not fused is bound by memory"),
    Row("full checkpointing, 70B", "Megatron: +30 % per recomputed layer", 0.2, 0.35, LLAMA_70B, {"policy": "uniform:1"}),
    Row("block, half of the layers", "Megatron: the rest is kept", 0.1, 0.17, LLAMA_7B, {"policy": "block:1"}),
    Row("uniform, every two layers", "Megatron: +30 %", 0.2, 0.35, LLAMA_7B, {"policy": "uniform:2"}),
    Row("every N layers", "practice, 32 layers, N = 6: 33 % compute", 0.2, 0.35, DEEP, {"policy": "uniform:2"}),
    Row("sqrt", "Chen et al. 2016: one more forward, 33 %", 0.16, 0.34, DEEP, {"policy": "sqrt"}),
    Row("sequential, 3 segments", "torch: the last of k segments is kept", 0.13, 0.34, DEEP, {"policy": "segments:3"}),
    Row("attention core, unfused", "Korthikanti et al.: 4-7 %", 0.0, 0.07, GPT_22B, {"policy": "selective"}, reason=FASTER),
    Row("attention, fused", "lightning-thunder#1646: +2.4 %", 0.012, 0.048, LLAMA_H100,
        {"recompute": ("*scaled_dot_product*",)}),
    Row("norms and activation", "Megatron-Bridge#5570, Megatron-LM#4715: at most 2 %", -0.02, 0.02, LLAMA_H100,
        {"policy": "selective:*norm,*.act"}),
    Row("GELU alone", "llm.c#422: a net gain", 0.0, 0.02, GPT_22B, {"policy": "selective:*.act"}),
    Row("MLPs, 70B", "Megatron-Bridge#5570: about 16 %", 0.12, 0.2, LLAMA_70B, {"policy": "selective:mlp"}),
    Row("full against selective", "torchtitan#97, Llama 7B: 4.91 s against 4.55 s", 0.05, 0.33, LLAMA_7B, {"policy": "full"},
        against={"policy": "full", "save": ("aten.mm", "*scaled_dot_product*")},
        reason="torchtitan's selective policy runs every second product again, ours in this row none"),
    Row("planned against full, equal memory", "torchtitan#4636: 5.6-5.8 % faster", -0.2, -0.03, LLAMA_H100, peak=0.0,
        against={"policy": "full"}, reason="of two layers, the peak under the policy leaves room for most of one"),
    Row("half of the memory", "FastSA: 7 % on the average of 23 models", 0.0, 0.07, GPT_22B, peak=0.5),
    Row("a quarter of the memory", "FastSA: 18 %", 0.0, 0.18, GPT_22B, peak=0.27, reason=FEW),
    Row("2-5 times less", "Rockmate: 10-20 %", 0.0, 0.2, GPT_22B, peak=0.3, reason=FEW),
    Row("50-70 % less", "HiRemate: 10-15 %", 0.0, 0.15, BERT_LARGE, peak=0.4, reason=FEW),
    Row("BERT-Large, twice the batch", "DTR: 96.5 % of the throughput", 0.0, 0.036, BERT_LARGE, peak=0.5, reason=FEW),
    Row("GPT-2, three times the batch", "DTR: 93.2 % of the throughput", 0.0, 0.073, GPT2_LARGE, peak=1 / 3, reason=FEW),
    Row("pointwise ops alone", "PyTorch blog: half of the memory by pointwise ops", 0.0, 0.03, LLAMA_H100, peak=0.6),
    Row("50-60 % less", "practice: 20-30 %", 0.0, 0.3, LLAMA_7B, peak=0.45, reason=FEW),
    Row("selective, 3-5 times less", "practice: 5 %", 0.0, 0.05, GPT_22B, peak=0.3, reason=FEW),
]  # fmt: skip


def predicted(row: Row) -> tuple[float, float]:
    """Returns the share of time that the plan of ``row`` adds, and its peak as a share of that without recomputation."""
    step, options = row.step, dict(row.options)
    other = step.reports(**(row.against or {"memory_budget": None}))
    if row.peak is not None:
        whole = step.reports(memory_budget=None)
        wanted = (
            row.peak * whole.baseline_peak_bytes if row.peak > 0 else other.predicted_peak_bytes + other.code_headroom_bytes
        )
        options |= {"memory_budget": int(wanted)}
    found = step.reports(**options)
    return found.predicted_seconds / other.predicted_seconds - 1, found.predicted_peak_bytes / found.baseline_peak_bytes


def table_of(lines: list[dict[str, Any]]) -> Table:
    table = Table("plan", "card", "published", "predicted", "peak", "in range", "source")
    for line in lines:
        published = f"{line['low']:.1%} to {line['high']:.1%}"
        verdict = "yes" if line["in_range"] else f"no: {line['reason'] or 'see the source'}"
        table.add_row(
            line["name"], line["card"], published, f"{line['added']:.1%}", f"{line['peak']:.0%}", verdict, line["source"]
        )
    return table


def line_of(row: Row) -> dict[str, Any]:
    """Returns what is predicted for a row."""
    added, peak = predicted(row)
    print(f"{row.name:38s} {row.low:6.1%} {row.high:6.1%}  {added:7.2%}  peak {peak:4.0%}", flush=True)
    return {"name": row.name, "card": row.step.card, "added": added, "peak": peak}


def judged(row: Row, line: dict[str, Any]) -> dict[str, Any]:
    """Returns what is predicted for a row beside what is published."""
    facts = {key: getattr(row, key) for key in ("source", "low", "high", "reason")}
    is_reached = not row.peak or line["peak"] <= row.peak + ROUNDING
    return line | facts | {"in_range": is_reached and row.low <= line["added"] <= row.high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=(), help="parts of the names of rows that are planned anew")
    parser.add_argument("--fresh", action="store_true", help="plan all rows anew")
    arguments = parser.parse_args()
    as_json = RESULTS.with_suffix(".json")
    stored = json.loads(as_json.read_text()) if as_json.exists() and not arguments.fresh else []
    known = {line["name"]: line for line in stored if not any(part in line["name"] for part in arguments.only)}
    for row in ROWS:
        if row.name not in known:
            known[row.name] = line_of(row)
        known[row.name] = judged(row, known[row.name])
        as_json.write_text(json.dumps([known[r.name] for r in ROWS if r.name in known], indent=1) + "\n")
    with RESULTS.open("w") as file:
        Console(file=file, width=200).print(table_of([known[row.name] for row in ROWS]))


if __name__ == "__main__":
    main()
