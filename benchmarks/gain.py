"""What a model gains: plain Inductor, torch's own budget, checkpoints of all blocks and autoremat at their peak, side by side.

    python benchmarks/gain.py              # the tables of docs/results.md, from stored rows
    python benchmarks/gain.py --predict    # first plans for cards by name, which need not be here: minutes for each model

Rows of a CPU are measured, by `costs.py`. Rows of cards are predicted: plans of one graph in bfloat16, by the data sheet of the
card. The largest batch is what fits the card beside the model and AdamW, on the line through the peaks of two batches;
autoremat's is that of its least peak.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from costs import checkpointed
from gpu_duels import KINDS, Kind, Size, default_dtype
from harness import RESULTS, parser, run
from model_zoo import TokenLoss
from torch import nn

import autoremat
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.options.options import Options
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.tools.explain import previews
from autoremat.tools.pareto import points_of_torch, without_traffic
from autoremat.torch_private import compilers

CARDS = ("H100-80GB", "RTX 4090")
TORCH_BUDGETS = (1.0, 0.5, 0.2)
"""Plain Inductor's, and two of those of `costs.py`."""

PLAIN, LOWEST, CHECKPOINTS, OURS = METHODS = ("plain Inductor", "torch's lowest", "checkpoints", "autoremat")
SECONDS = 10.0


def bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        intermediate_size=4 * size.width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return TokenLoss(BertForMaskedLM(config))


def sized(kind: Kind, **size: int) -> Kind:
    return replace(kind, real=replace(kind.real, **size))


MODELS = {
    "BERT base": Kind(bert, "BertLayer", Size(12, 768, 12, 16, 512, 30_522), Size(2, 64, 2, 8, 32, 256)),
    "ViT-B": sized(KINDS["ViT-L"], layers=12, width=768, heads=12),
    "GPT-2 small": sized(KINDS["GPT-2 medium"], layers=12, width=768, heads=12),
    "GPT-2 medium, 4 layers": sized(KINDS["GPT-2 medium"], layers=4),
    "Llama 1B, 4 layers": sized(KINDS["Llama 1B"], layers=4),
    "ResNet-50": KINDS["ResNet-50"],
}


@dataclass(frozen=True)
class Row:
    """One predicted method for one card."""

    model: str
    card: str
    method: str
    batch: int
    peak_bytes: int
    step_seconds: float
    largest_batch: int


def plans_of(kind: Kind, batch: int, card: str) -> tuple[dict[str, Plan], int]:
    """Returns the plan of each method, and autoremat's least peak."""
    with torch.device("meta"), default_dtype(torch.bfloat16):
        model, by_hand = (kind.build(kind.real).train() for _ in range(2))
        side, labels = kind.real.length, torch.zeros(batch, dtype=torch.int64)
        tokens = (torch.zeros(batch, side, dtype=torch.int64),)
        inputs = tokens if kind.real.vocabulary else (torch.zeros(batch, 3, side, side), labels)

    assert checkpointed(by_hand), "no list of blocks is known"

    def by_torch(priced: PricedGraph, shares: Sequence[float] = (1.0,)) -> list[Plan]:
        return [point.plan for point in points_of_torch(priced, shares) if point.plan]

    def look(priced: PricedGraph) -> tuple[dict[str, Plan], int]:
        plain, *others = by_torch(priced, TORCH_BUDGETS)
        planner = Planner(without_traffic(priced.graph), SECONDS)
        least = planner.lowest
        planner.restart()
        ours = planner.find(Limits(checkpoints.peak_bytes)).plan or least
        lowest = min(plain, *others, key=lambda plan: plan.peak_bytes)
        return {PLAIN: plain, LOWEST: lowest, CHECKPOINTS: checkpoints, OURS: ours}, least.peak_bytes

    options = Options.parse({"progress": False}, None, compilers.inductor_config_names)
    ((checkpoints,),), _ = previews(by_hand, inputs, {}, options, card, by_torch)
    (plans,), _ = previews(model, inputs, {}, options, card, look)
    return plans


def predict(name: str) -> Iterator[Row]:
    kind = MODELS[name]
    batch = kind.real.batch
    with torch.device("meta"), default_dtype(torch.bfloat16):
        model = kind.build(kind.real)
    smaller, least_of_smaller = plans_of(kind, batch // 2, CARDS[0])
    for card in CARDS:
        left = autoremat.device_budget(card, model, torch.optim.AdamW(model.parameters())).budget_bytes
        plans, least = plans_of(kind, batch, card)
        for method, plan in plans.items():
            peak, before = plan.peak_bytes, smaller[method].peak_bytes
            most, rise = (least, least - least_of_smaller) if method == OURS else (peak, peak - before)
            largest = batch + math.floor((left - most) / rise * (batch - batch // 2))
            yield Row(name, card, method, batch, peak, plan.predicted_seconds, max(0, largest))


def predicted(rows: list[Row]) -> list[str]:
    """Returns a table with a line for each model. Figures of the cards follow each other."""
    lines = [f"| Predicted | {' | '.join(METHODS)} |", f"|---|{'---:|' * len(METHODS)}"]
    for name in dict.fromkeys(row.model for row in rows):
        cells = []
        for method in METHODS:
            on = [row for row in rows if (row.model, row.method) == (name, method)]
            plain = [row for row in rows if (row.model, row.method) == (name, PLAIN)]
            peak = f"{on[0].peak_bytes / plain[0].peak_bytes:.0%}"
            times = ", ".join(f"{one.step_seconds / other.step_seconds:.2f}" for one, other in zip(on, plain, strict=True))
            if method == PLAIN:
                peak = f"{on[0].peak_bytes / 2**30:.1f} GiB"
                times = ", ".join(f"{row.step_seconds * 1e3:.0f}" for row in on) + " ms"
            cells.append(f"{peak}; {times}; {', '.join(str(row.largest_batch) for row in on)}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def of_a_cpu() -> list[str]:
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads((RESULTS / "costs.json").read_text())["rows"]:
        rows.setdefault(row["model"], {})[row["method"]] = row
    return [line(f"{model}, CPU", methods) for model, methods in rows.items() if "checkpoint" in methods]


def line(name: str, methods: dict[str, dict[str, Any]]) -> str:
    plain = methods["plain"]

    def cell(row: dict[str, Any]) -> str:
        return f"{row['peak_bytes'] / plain['peak_bytes']:.0%}, {row['step_seconds'] / plain['step_seconds']:.2f}"

    lowest = min((row for method, row in methods.items() if method.startswith("torch")), key=lambda row: row["peak_bytes"])
    mib = f"{plain['peak_bytes'] / 2**20:.0f} MiB, {plain['step_seconds'] * 1e3:.0f} ms"
    return f"| {name} | {mib} | {cell(lowest)} | {cell(methods['checkpoint'])} | {cell(methods['autoremat as checkpoint'])} |"


def main() -> None:
    made = parser(__doc__, MODELS)
    made.add_argument("--predict", action="store_true", help="plan for the cards")
    arguments = made.parse_args()
    if arguments.predict:
        run("gain", arguments, Row, predict, predicted)
        return
    print("| model | plain Inductor | torch's lowest | checkpoints | autoremat |\n|---|---|---|---|---|")
    print("\n".join([*of_a_cpu(), "", *(RESULTS / "gain.txt").read_text().splitlines()[1:]]))


if __name__ == "__main__":
    main()
