"""Blocks compiled one by one against the whole graph: cost at the same peak, measured peaks, compilations, compile time.

    python benchmarks/blocks.py                                  # Llama, GPT-2 and a diffusion transformer; 8, 16, 32 blocks
    python benchmarks/blocks.py --only llama-8                   # measures some rows again; the others stay
    python benchmarks/blocks.py --times                          # the compile times

Inductor compiles on a CPU. Budgets lie between the minimum peak of the blocks and that without recomputation. "Added" is the
time of recomputation and of saved tensors above that of the fastest plan. It is a share of the step, by the cost model. The
plan of the whole graph has at most the predicted peak of the blocks. Each compile time is that of a process with empty caches,
half of the baseline's peak as budget, and one step. Inductor has started: it has compiled one product, which takes seconds of
imports and of checks of the processor. The time of the blocks includes the profile of the step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from harness import measured_peak, mebibytes, parser, percent, run, table
from lowering import PATIENT, Built, Lowered, batched, uncached, without_kernels
from model_zoo import diffusion_transformer, gpt2, llama
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import autoremat
from autoremat.compiler import compile_loop
from autoremat.compiler.planning import SmallestGraph, plan_for_minimum_peak
from autoremat.planner.multigraph.step import CODE_HEADROOM
from autoremat.planner.plans.limits import Limits

SHARES = (0.05, 0.25, 0.45, 0.65, 0.85)
"""Budgets, as shares of the way from the least budget that leaves code headroom to the blocks' peak without recomputation."""
METHODS = {"one by one": 3, "one plan": 1, "whole": 0}
"""Maximum number of plans of a graph, for the compile times; 0 compiles the whole model as one graph."""


class Head(nn.Module):
    """The vocabulary projection and the loss, which is a block of its own: eager code would hold the logits several times."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.projection(hidden)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class LanguageModel(nn.Module):
    """A causal model of Hugging Face, with its head and loss in one module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model.model if hasattr(model, "model") else model.transformer
        self.head = Head(model.lm_head)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(input_ids=tokens).last_hidden_state, tokens)


def language_model(built: Built) -> Built:
    model, inputs = batched(built, 4)
    return LanguageModel(model.model), inputs


BUILDERS = {
    "llama": lambda count: language_model(llama(count)),
    "gpt2": lambda count: language_model(gpt2(count)),
    "diffusion": lambda count: diffusion_transformer(count // 4),
}
LAYERS = (8, 16, 32, 64)
"""The last one only for the compile times of a Llama."""


def build(case: str) -> Built:
    torch.manual_seed(0)
    torch.compiler.reset()
    name, _, count = case.partition("-")
    model, inputs = BUILDERS[name](int(count))
    return model.train(), inputs


def blocks_of(model: Any) -> list[nn.Module]:
    """Returns the blocks of a model of ``BUILDERS``. The last one of a language model is its head."""
    if hasattr(model, "joint"):
        return [*model.joint, *model.single]
    layers = model.inner.layers if hasattr(model.inner, "layers") else model.inner.h
    return [*layers, model.head]


def whole(case: str) -> SmallestGraph:
    """Returns the whole graph with its planner. Nothing is lowered."""
    model, inputs = build(case)
    found: list[SmallestGraph] = []

    def plan_and_stop(priced: Any, extra_headroom_bytes: int) -> Any:
        found.append(plan_for_minimum_peak(priced, compares=False))
        raise Lowered

    with uncached(), unittest.mock.patch.object(compile_loop, "plan_graph", plan_and_stop), without_kernels():
        torch.compile(model, backend="autoremat", options=PATIENT)(*inputs)
    return found[0]


def measure(case: str) -> Iterator[dict[str, Any]]:
    """Yields a row for each budget."""
    graph = whole(case)
    planner, step_seconds = graph.planner, graph.plan.graph.step_seconds
    assert planner is not None
    fastest = planner.fastest()
    assert fastest is not None
    model, inputs = build(case)
    compiled = autoremat.compile_blocks(blocks_of(model), 1.0, options=PATIENT)
    for _ in range(3):  # the second step is measured, and the third one planned
        model(*inputs).backward()
    assert compiled.profile is not None
    least = compiled.profile.minimum_peak_bytes / (1 - CODE_HEADROOM)
    budgets = {share: int(least + share * (compiled.profile.baseline_peak_bytes - least)) for share in SHARES}
    for share, budget in budgets.items():
        profile = compiled.within(budget)
        before = len(autoremat.reports())
        model(*inputs).backward()
        peak = measured_peak(lambda: model(*inputs).backward(), model)
        same_peak = planner.find(Limits(profile.peak_bytes)).plan
        added = None if same_peak is None else (same_peak.cost_seconds - fastest.cost_seconds) / step_seconds
        yield {
            "case": case, "share": share, "budget": profile.budget_bytes, "predicted": profile.peak_bytes, "measured": peak,
            "added": profile.added_seconds / step_seconds, "added by the whole graph": added,
            "plans": [len({p for m, p, _ in profile.variants if m == n}) for n in sorted(set(profile.step.numbers))],
            "compilations": len(autoremat.reports()) - before,
        }  # fmt: skip


def compile_seconds(case: str, variants: int) -> tuple[float, float]:
    """Returns the seconds of compilation and first step: by the clock, and of this process without C++ compilers.

    Inductor has started before, as it does once in every process.
    """
    torch.compile(lambda x: torch.relu(x @ x).sum())(torch.randn(8, 8, requires_grad=True)).backward()
    model, inputs = build(case)
    begin, own = time.perf_counter(), time.process_time()
    if variants:
        autoremat.compile_blocks(blocks_of(model), 0.5, variants=variants)
        for _ in range(3):  # two steps run uncompiled
            model(*inputs).backward()
    else:
        torch.compile(model, backend="autoremat", options={"memory_budget": 0.5})(*inputs).backward()
    return time.perf_counter() - begin, time.process_time() - own


def times(case: str) -> Iterator[dict[str, Any]]:
    """Yields the compile times of all methods, each in a process of its own with empty caches."""
    found: dict[str, Any] = {"case": case}
    for label, variants in METHODS.items():
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            command = [sys.executable, __file__, "--only", case, "--variants", str(variants)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        found[label], found[f"{label}, own"] = map(float, done.stdout.splitlines()[-1].split())
    yield found


def cells(row: dict[str, Any]) -> dict[str, str]:
    added, other = row["added"], row["added by the whole graph"]
    return {
        "model-blocks": row["case"],
        "share": percent(row["share"], 0),
        **{column: mebibytes(row[column]) for column in ("budget", "predicted", "measured")},
        "added": percent(added, 2),
        "whole graph": percent(other, 2),
        "difference": "-" if other is None else f"{100 * (added - other):+.2f}",
        "plans": "+".join(map(str, row["plans"])),
        "compiled": str(row["compilations"]),
    }


def shown(rows: list[dict[str, Any]]) -> list[Table]:
    return [table("Peaks in MiB, added time in % of the step", list(map(cells, rows)))]


def shown_times(rows: list[dict[str, Any]]) -> list[Table]:
    title = "Compile time and first step, in seconds; in brackets of the process alone, without C++ compilers"
    lines = [
        {"model-blocks": row["case"], **{label: f"{row[label]:.1f} ({row[f'{label}, own']:.1f})" for label in METHODS}}
        for row in rows
    ]
    return [table(title, lines)]


def main() -> None:
    made = parser(__doc__, [f"{name}-{count}" for name in BUILDERS for count in LAYERS])
    made.set_defaults(only=[case for case in made.get_default("cases") if not case.endswith("-64")])
    made.add_argument("--times", action="store_true", help="measure compile times in place of peaks")
    made.add_argument("--variants", type=int, choices=list(METHODS.values()), help=argparse.SUPPRESS)
    arguments = made.parse_args()
    warnings.simplefilter("ignore")
    if arguments.variants is not None:
        print(*compile_seconds(arguments.only[0], arguments.variants))
    elif arguments.times:
        run("blocks_times", arguments, dict, times, shown_times)
    else:
        rows = run("blocks", arguments, dict, measure, shown)
        if any(row["measured"] > row["budget"] for row in rows):
            raise SystemExit("a measured peak is over its budget")


if __name__ == "__main__":
    main()
