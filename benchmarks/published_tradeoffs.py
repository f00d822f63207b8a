"""Published trade-offs of memory against time, beside what is predicted for the same models and cards.

    python benchmarks/published_tradeoffs.py               # all rows, about 15 minutes
    python benchmarks/published_tradeoffs.py --resume      # the rows that are not stored yet
    python benchmarks/published_tradeoffs.py --only sqrt   # this row anew

Each row is a published figure with its source. Models have the published widths, lengths and numbers of layers, on the meta
device, for a card by name. They run as the source ran them: one kernel for each op, or fused by a compiler. They have no
vocabulary and no optimizer: the added time is a share of the layers' time.

A row is in range if the predicted share of added time is. A single published figure stands for half to double of it. What
another planner needs for less memory is the top of a range from nothing; such a row must reach the peak too. A row that is out
of range states the reason.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from harness import parser, run, table
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat

ROUNDING = 0.02
"""Share of the peak without recomputation by which the peak of a plan may miss the published one."""


class Attention(nn.Module):
    """Attention with a fused kernel, or by two products and a softmax. It may have some of a layer's heads alone."""

    def __init__(self, width: int, inner: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, width, bias=False)
        self.core_attn = FusedCore() if fused else Core()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(self.core_attn(q, k, v).transpose(1, 2).flatten(2))


class FusedCore(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return F.dropout(scores.softmax(-1), 0.1) @ v


class Mlp(nn.Module):
    """Two products with a GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class GatedMlp(Mlp):
    """Three products with a SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.gate, self.act = nn.Linear(width, inner, bias=False), Swiglu()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x), self.up(x)))


class Swiglu(nn.Module):
    def forward(self, gate: Tensor, value: Tensor) -> Tensor:
        return F.silu(gate) * value


class Layer(nn.Module):
    """A layer of a Llama (gated), or of a GPT-2 or a BERT, which has dropout."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        norm = nn.RMSNorm if step.gated else nn.LayerNorm
        self.input_norm, self.mlp_norm = norm(step.width), norm(step.width)
        self.attention = Attention(step.width, step.width // step.cards, step.heads // step.cards, step.fused)
        self.mlp = (GatedMlp if step.gated else Mlp)(step.width, step.inner // step.cards)
        self.dropout = nn.Dropout(0.0 if step.gated else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.input_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Stack(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(step) for _ in range(step.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().mean()


@dataclass(frozen=True)
class Step:
    """Layers of a published model, its batch, the card, and how the source ran it."""

    card: str
    width: int
    heads: int
    inner: int
    batch: int
    length: int
    layers: int
    fused: bool = True
    """True if one kernel computes the attention."""
    gated: bool = False
    compiler: str = "aot_eager"
    """The code that ran: Inductor's, or one kernel for each op."""
    dtype: torch.dtype = torch.bfloat16
    cards: int = 1
    """Cards that divide the heads and the inner width of a layer. Their all-reduces are left out."""

    @functools.lru_cache  # noqa: B019
    def reports(self, **options: Any) -> autoremat.Report:
        """Returns the report of the step under ``options``."""
        with torch.device("meta"):
            model = Stack(self).to(self.dtype)
            x = torch.empty(self.batch, self.length, self.width, dtype=self.dtype, requires_grad=True)
        chosen = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
        given: dict[str, Any] = {"cost_model": "roofline", "time_limit": 3.0, "on_infeasible": "best_effort"}
        given["compiler"] = self.compiler
        if self.compiler == "inductor":
            given["pattern_matcher"] = self.fused  # it would put a fused kernel in the place of two products and a softmax
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return autoremat.explain(model, x, device=self.card, options=given | chosen)


LLAMA_7B = Step("A100", 4096, 32, 11008, 1, 4096, 32, gated=True)
LLAMA_H100 = replace(LLAMA_7B, card="H100", compiler="inductor")
LLAMA_SHARDED = replace(LLAMA_H100, batch=8)
"""Gradients are as small beside activations as on eight cards that share them and have a sample each."""
LLAMA_H100_FEW = replace(LLAMA_H100, layers=4)
LLAMA_70B_FEW = Step("H100", 8192, 64, 28672, 1, 4096, 4, gated=True, compiler="inductor")
GPT_22B = Step("A100", 6144, 64, 24576, 4, 2048, 12, fused=False, compiler="inductor")
GPT_22B_SHARD = replace(GPT_22B, layers=4, cards=8)
BERT_LARGE = Step("V100", 1024, 16, 4096, 16, 512, 24, fused=False, compiler="inductor", dtype=torch.float16)
GPT2 = replace(BERT_LARGE, width=768, heads=12, inner=3072, batch=24, layers=12)
GPT2_SINGLE = replace(GPT2, batch=8, dtype=torch.float32)
GPT2_LLMC = replace(GPT2, card="A100", length=1024, fused=True, dtype=torch.bfloat16)
DEEP = Step("A100", 2048, 16, 8192, 4, 1024, 32)


FASTEST = {"memory_budget": "1TiB"}
"""Options of the fastest plan."""

TRIED = (
    "the budget is what the fastest plan of 8 samples needs, which computes pointwise ops again as it is; the source tells "
    "batches that were tried, not bytes: up to 15 samples may have fitted"
)


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
    against: dict[str, Any] = field(default_factory=lambda: FASTEST)
    """Options of the other plan."""
    other_batch: int = 0
    """Batch of the other plan, with which times per sample are compared; 0 for the same."""
    reason: str = ""
    """Why the prediction is out of range."""


TITAN_SELECTIVE = {"policy": "full", "save": ("*scaled_dot_product*", "attention.q", "attention.v", "mlp.gate", "mlp.down")}
"""What torchtitan saves: attention, and every second product of a layer."""

ROWS = [
    Row("full checkpointing, low end", "Hugging Face: 20-30 %", 0.2, 0.3, LLAMA_7B, {"policy": "full"}),
    Row("full checkpointing, H100", "torchtitan and Megatron-LM: 20-33 %", 0.2, 0.33, LLAMA_H100_FEW, {"policy": "full"}),
    Row("full checkpointing, 22B", "Korthikanti et al. 2022: 30-40 %", 0.3, 0.4, GPT_22B_SHARD, {"policy": "full"},
        reason="nothing reads the result of a layer's last product, so no plan runs it again: 8 % of the step, which the "
               "source pays; its two all-reduces per forward are left out"),
    Row("full checkpointing, 70B", "Megatron: +30 % per recomputed layer", 0.2, 0.35, LLAMA_70B_FEW, {"policy": "uniform:1"}),
    Row("block, half of the layers", "Megatron: the rest is kept", 0.1, 0.17, LLAMA_H100_FEW, {"policy": "block:2"}),
    Row("uniform, every two layers", "Megatron: +30 %", 0.2, 0.35, LLAMA_H100_FEW, {"policy": "uniform:2"}),
    Row("every N layers", "practice, 32 layers, N = 6: 33 % compute", 0.2, 0.35, DEEP, {"policy": "uniform:6"}),
    Row("sqrt", "Chen et al. 2016: one more forward, 33 %", 0.16, 0.34, DEEP, {"policy": "sqrt"}),
    Row("sequential, 3 segments", "torch: the last of k segments is kept", 0.13, 0.34, DEEP, {"policy": "segments:3"}),
    Row("attention core, unfused", "Korthikanti et al.: 4-7 %", 0.04, 0.07, GPT_22B_SHARD, {"policy": "selective"},
        reason="running the core again takes 4.3 %; the rest is the traffic of pointwise results, which this policy saves and "
               "the fastest plan computes again"),
    Row("attention, fused", "lightning-thunder#1646: +2.4 %", 0.012, 0.048, LLAMA_H100_FEW,
        {"recompute": ("*scaled_dot_product*",)}),
    Row("norms and activation", "Megatron-Bridge#5570, Megatron-LM#4715: at most 2 %", -0.02, 0.02, LLAMA_H100_FEW,
        {"policy": "selective:*norm,*.act"}),
    Row("GELU alone", "llm.c#422: a net gain", 0.0, 0.02, GPT2_LLMC, {"policy": "selective:*.act"}),
    Row("MLPs, 70B", "Megatron-Bridge#5570: about 16 %", 0.12, 0.2, LLAMA_70B_FEW, {"policy": "selective:mlp"}),
    Row("full against selective", "torchtitan#97, Llama 7B: 4.91 s against 4.55 s", 0.04, 0.161, LLAMA_7B, {"policy": "full"},
        against=TITAN_SELECTIVE),
    Row("planned against full, equal memory", "torchtitan#4636: 5.6-5.8 % faster", -0.116, -0.028, LLAMA_SHARDED, peak=0.0,
        against={"policy": "full"},
        reason="the policy's own peak has no room but for inputs of layers, and the search ends 1.1 % above the policy; the "
               "source offloads as well"),
    Row("planned against full, one sample", "torchtitan#4636: 5.6-5.8 % faster", -0.116, -0.028, LLAMA_H100, peak=0.0,
        against={"policy": "full"},
        reason="gradients of all layers make the policy's peak, and before they exist their memory holds saved tensors; the "
               "source shares gradients over cards"),
    Row("half of the memory", "FastSA: 7 % on the average of 23 models", 0.0, 0.07, GPT2_SINGLE, peak=0.5),
    Row("a quarter of the memory", "FastSA: 18 %", 0.0, 0.18, GPT2_SINGLE, peak=0.27),
    Row("2-5 times less", "Rockmate: 10-20 %", 0.0, 0.2, GPT2_SINGLE, peak=0.3),
    Row("50-70 % less", "HiRemate: 10-15 %", 0.0, 0.15, GPT2_SINGLE, peak=0.4),
    Row("BERT-Large, twice the batch", "DTR in RAF: 96.5 % of the throughput", 0.0, 0.036, BERT_LARGE, peak=0.0, other_batch=8,
        reason=TRIED),
    Row("GPT-2, three times the batch", "DTR in RAF: 93.2 % of the throughput", 0.0, 0.073, GPT2, peak=0.0, other_batch=8,
        reason=TRIED),
    Row("pointwise ops alone", "PyTorch blog: half of the memory by pointwise ops", 0.0, 0.03, LLAMA_H100_FEW, peak=0.6),
    Row("50-60 % less", "practice: 20-30 %", 0.0, 0.3, replace(LLAMA_7B, batch=4), peak=0.45),
    Row("selective, 3-5 times less", "practice: 5 %", 0.0, 0.05, GPT_22B, peak=0.3,
        reason="gradients take a third of the budget; recomputation takes 4.1 %, the rest is that pointwise kernels of the "
               "backward read more; the plan may be 5.0 % of the step above the best one"),
]  # fmt: skip


def predicted(row: Row) -> tuple[float, float]:
    """Returns the share of time that the plan of ``row`` adds to a sample, and its peak as a share of that without
    recomputation."""
    step, options = row.step, dict(row.options)
    base = replace(step, batch=row.other_batch or step.batch)
    other = base.reports(**row.against)
    if row.peak is not None:
        whole = step.reports(**FASTEST)
        wanted = row.peak * whole.baseline_peak_bytes if row.peak else other.predicted_peak_bytes + other.code_headroom_bytes
        options |= {"memory_budget": int(wanted)}
    found = step.reports(**options)
    slower = (found.predicted_seconds / step.batch) / (other.predicted_seconds / base.batch)
    return slower - 1, found.predicted_peak_bytes / found.baseline_peak_bytes


def measure(name: str) -> Iterator[dict[str, Any]]:
    """Yields what is predicted for a row, beside what is published."""
    row = next(row for row in ROWS if row.name == name)
    added, peak = predicted(row)
    is_reached = not row.peak or peak <= row.peak + ROUNDING
    line = {"name": name, "card": row.step.card, "layers": row.step.layers, "added": added, "peak": peak}
    line |= {key: getattr(row, key) for key in ("source", "low", "high", "reason")}
    yield line | {"in_range": is_reached and row.low <= added <= row.high}


def cells(line: dict[str, Any]) -> dict[str, str]:
    return {
        "plan": line["name"],
        "card": line["card"],
        "layers": line["layers"],
        "published": f"{line['low']:.1%} to {line['high']:.1%}",
        "predicted": f"{line['added']:.1%}",
        "peak": f"{line['peak']:.0%}",
        "in range": "yes" if line["in_range"] else f"no: {line['reason'] or 'see the source'}",
        "source": line["source"],
    }


def shown(lines: list[dict[str, Any]]) -> list[Table]:
    return [table("Added time, as a share of the step", list(map(cells, lines)))]


if __name__ == "__main__":
    run("published_tradeoffs", parser(__doc__, (row.name for row in ROWS)).parse_args(), dict, measure, shown)
