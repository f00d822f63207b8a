"""The least peak of a step: what the first moves find, what the search finds below it, and the proven bound.

    python benchmarks/least_peak.py                    # half an hour
    python benchmarks/least_peak.py --only gpt2 unet
    python benchmarks/least_peak.py --check            # compares with the stored rows; exits 1 if a peak is higher
    python benchmarks/least_peak.py --near             # costs of plans near the least peak; about ten minutes

Small models are those of ``plan_hashes.py``, planned for an A100 by name, with Inductor's fusion. Real ones have the sizes that
people train, in bfloat16 for an H100 by name. RL1 and RL2 are random layered graphs of one phase, in which any op may run again
(``random_layered.py``); the chain is a training step without fusion. Costs are the added seconds of the plans as shares of the
step, and those after the search buy nothing but the least peak.

With `--near`, plans are made for the least peak found, and 3 and 10 % more. Large models are layers of published ones
(``published_tradeoffs.py``), for the cards of their sources.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

os.environ["AUTOREMAT_PROGRESS"] = "0"

import model_zoo
import offload
import plan_hashes
import published_tradeoffs
import torch
from harness import RESULTS, parser, run, stored, table
from random_layered import WIDTHS, generate
from rich.table import Table

import autoremat
from autoremat import Graph
from autoremat.planner.plans.limits import Limits
from autoremat.planner.search.planner import Planner

DEVICE = "A100-40GB"
WORK = 10.0
"""The time limit, in seconds, whose work each search gets."""

TOLERANCE = 1.005
"""By which a least peak may exceed the stored one."""

LAYERED = {"RL1": 100, "RL2": 250}
ABOVE = (0.0, 0.03, 0.1)
"""Shares of the least peak by which budgets near it exceed it."""

LARGE = {
    "llama-8b": published_tradeoffs.Step("H100", 4096, 32, 14336, 1, 8192, 4, gated=True, compiler="inductor"),
    "llama-8b eager": published_tradeoffs.Step("H100", 4096, 32, 14336, 1, 8192, 4, gated=True),
    "gpt-22b": published_tradeoffs.GPT_22B_SHARD,
    "bert-large/6": replace(published_tradeoffs.BERT_LARGE, layers=6),
}


def tokens_of(name: str, batch: int, length: int, **config: object) -> offload.Step:
    """Returns the step of a Hugging Face language model on its own loss."""
    import transformers

    config |= {} if name in ("BertForMaskedLM", "GPT2LMHeadModel") else {"use_cache": False}
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config)).to(torch.bfloat16).train()
    return lambda tokens: model(input_ids=tokens, labels=tokens).loss, (torch.zeros((batch, length), dtype=torch.int64),)


def pixels_of(name: str, batch: int) -> offload.Step:
    """Returns the step of a Hugging Face image classifier in its default sizes."""
    import transformers

    kind = getattr(transformers, name)
    return offload.images(kind(kind.config_class(num_labels=1000)), batch)


def speech(batch: int) -> offload.Step:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12, decoder_attention_heads=12,
        encoder_ffn_dim=3072, decoder_ffn_dim=3072, use_cache=False,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).to(torch.bfloat16).train()
    tokens = torch.zeros((batch, 448), dtype=torch.int64)
    heard = torch.zeros((batch, 80, 3000), dtype=torch.bfloat16)
    return lambda x, y: model(input_features=x, decoder_input_ids=y, labels=y).loss, (heard, tokens)


def unet(batch: int) -> offload.Step:
    model = model_zoo.UNet((64, 128, 256, 512)).to(torch.bfloat16).train()
    return model, (torch.zeros((batch, 3, 256, 256), dtype=torch.bfloat16), torch.zeros((batch,), dtype=torch.int64))


REAL: dict[str, Callable[[], offload.Step]] = {
    "llama-3": lambda: offload.llama(32, 1),
    "llama-3/80": lambda: offload.llama(80, 1),
    "mixtral/12": lambda: offload.experts(12, 2),
    "gpt2-medium": lambda: offload.gpt2(16),
    "bert-large": lambda: tokens_of(
        "BertForMaskedLM", 32, 512, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "t5-base": lambda: tokens_of(
        "T5ForConditionalGeneration", 16, 512, d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
    ),
    "opt-1.3b": lambda: tokens_of(
        "OPTForCausalLM", 2, 2048, hidden_size=2048, num_hidden_layers=24, ffn_dim=8192, num_attention_heads=32,
        word_embed_proj_dim=2048,
    ),
    "gemma-2b": lambda: tokens_of("GemmaForCausalLM", 2, 2048, num_hidden_layers=18, hidden_size=2048, intermediate_size=16384,
                                  num_attention_heads=8, num_key_value_heads=1, head_dim=256),
    "whisper-small": lambda: speech(16),
    "vit-large": lambda: offload.vit(128),
    "dit-xl": lambda: offload.diffusion(32),
    "swin-tiny": lambda: pixels_of("SwinForImageClassification", 128),
    "convnext-tiny": lambda: pixels_of("ConvNextForImageClassification", 128),
    "resnet-50": lambda: offload.resnet(256),
    "u-net": lambda: unet(16),
}  # fmt: skip
NAMES = (*REAL, *plan_hashes.MODELS, "chain", *LAYERED, *LARGE)


@dataclass(frozen=True)
class Row:
    """One graph. Bytes are those of simulated peaks."""

    name: str
    ops: int
    whole_bytes: int
    """Of the step without recomputation."""
    before_bytes: int
    """Of the first moves."""
    found_bytes: int
    bound_bytes: int
    cost_before: float
    cost_found: float
    search_seconds: float
    """Seconds of the search below these."""

    @property
    def distance(self) -> float:
        """The share by which the least peak found exceeds the bound."""
        return self.found_bytes / self.bound_bytes - 1.0


@dataclass(frozen=True)
class Near:
    """One graph and budget. Costs are shares of the step."""

    name: str
    ops: int
    above: float
    """Share of the least peak by which the budget exceeds it."""
    found: float
    bound: float


def captured(name: str) -> Graph:
    """Returns the graph of a model's training step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = plan_hashes.MODELS[name]()
    options = {"cost_model": "roofline", "memory_budget": 1.0}
    report = autoremat.explain(model, *inputs, device=DEVICE, lower=False, options=options)
    assert report.plan is not None
    return report.plan.graph


def graph_of(name: str) -> Graph:
    """Returns the graph of that name, without forms of its values."""
    if name in LARGE:
        plan = LARGE[name].reports(memory_budget=1.0).plan
        assert plan is not None
        return replace(plan.graph, values=tuple(replace(value, forms=()) for value in plan.graph.values))
    if name in LAYERED:
        drawn = generate(LAYERED[name], WIDTHS[LAYERED[name]], seed=0)
        return Graph.from_dag(drawn.seconds, drawn.sizes, drawn.edges)
    if name in REAL:
        return offload.captured(REAL[name])
    return plan_hashes.chain() if name == "chain" else captured(name)


def measure(name: str) -> Iterator[Row]:
    """Yields the row of a graph."""
    graph = graph_of(name)
    planner = Planner(graph, WORK)
    before, bound = planner.smallest, planner.bounds.within().peak_bytes
    begun = time.process_time()
    found = planner.lowest
    ended = time.process_time()
    found.check()
    step = sum(op.seconds for op in graph.ops) if graph.single_phase else graph.step_seconds
    costs = (plan.added_seconds / step for plan in (before, found))
    yield Row(
        name, len(graph.ops), planner.baseline.peak_bytes, before.peak_bytes, found.peak_bytes, bound, *costs, ended - begun
    )


def near(name: str) -> Iterator[Near]:
    """Yields the costs of a graph's plans near its least peak."""
    graph = graph_of(name)
    lowest = Planner(graph).lowest.peak_bytes
    for above in ABOVE:
        budget = int(lowest * (1.0 + above))
        found = Planner(graph).find(Limits(budget))
        assert found.plan is not None
        costs = (found.plan.cost_seconds, found.lower_bound_seconds)
        yield Near(name, len(graph.ops), above, *(seconds / graph.step_seconds for seconds in costs))


def cells(row: Row) -> dict[str, object]:
    return {
        "graph": row.name,
        "ops": row.ops,
        "whole": row.whole_bytes,
        "before": row.before_bytes,
        "found": row.found_bytes,
        "less": f"{1 - row.found_bytes / row.before_bytes:.1%}",
        "bound": row.bound_bytes,
        "distance": f"{row.distance:.2%}",
        "cost before": f"{row.cost_before:.2f}",
        "cost found": f"{row.cost_found:.2f}",
        "search, s": f"{row.search_seconds:.1f}",
    }


def shown(rows: list[Row]) -> list[Table | str]:
    real = [row for row in rows if row.name in REAL]
    others = [row for row in rows if row not in real]
    count = "within 2 % of the bound: {} of {}"
    texts = (count.format(sum(row.distance <= 0.02 for row in group), len(group)) for group in (real, others))
    tables = (
        table(f"Least peaks of {kind} models, bytes", list(map(cells, group)))
        for kind, group in (("real", real), ("small", others))
    )
    return [part for pair in zip(tables, texts, strict=True) for part in pair]


def shown_near(rows: list[Near]) -> list[Table | str]:
    lines = [
        {"graph": r.name, "ops": r.ops, "above least": f"{r.above:.0%}"}
        | {"found": f"{r.found:.1%}", "bound": f"{r.bound:.1%}"}
        for r in rows
    ]
    return [table("Costs near the least peak", lines)]


def check(names: list[str]) -> int:
    """Prints the graphs whose least peak is higher than the stored one. Returns 1 if there are any, else 0."""
    before = {row.name: row.found_bytes for row in stored("least_peak", RESULTS, Row)}
    worse = 0
    for name in names:
        (row,) = measure(name)
        print(row, flush=True)
        if row.found_bytes > TOLERANCE * before[name]:
            print(f"{name}: {row.found_bytes} bytes, {before[name]} before")
            worse += 1
    print(f"{worse} of {len(names)} least peaks are higher")
    return min(worse, 1)


def main() -> None:
    made = parser(__doc__, NAMES)
    made.add_argument("--check", action="store_true", help="store nothing; exit 1 if a least peak is higher than stored")
    made.add_argument("--near", action="store_true", help="costs of plans near the least peak")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    others = (*REAL, "chain", *LAYERED) if arguments.near else LARGE
    arguments.only = [name for name in arguments.only if name not in others]
    if arguments.check:
        sys.exit(check(arguments.only))
    if arguments.near:
        run("near_least_peak", arguments, Near, near, shown_near)
    else:
        run("least_peak", arguments, Row, measure, shown)


if __name__ == "__main__":
    main()
