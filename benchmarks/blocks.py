"""Blocks compiled one by one against the whole graph: cost at the same peak, measured peaks, compilations, compile time.

    python benchmarks/blocks.py                                  # Llama, GPT-2 and a diffusion transformer; 8, 16, 32 blocks
    python benchmarks/blocks.py --models llama --layers 8        # measures some rows again; the others stay
    python benchmarks/blocks.py --parts rows                     # without the compile times and the finest plans

Inductor compiles on a CPU. Budgets lie between the minimum peak of the blocks and that without recomputation. "Added" is the
time of recomputation and of saved tensors above that of the fastest plan. It is a share of the step, by the cost model. The
plan of the whole graph has at most the predicted peak of the blocks. "Finest" is the tightest budget with three times the
levels in each Pareto front and a plan for each block, without generated code. "Borders saved" is the plan of the whole graph
at the peak of the blocks, if it must save what one block hands to the next, as blocks do. Each compile time is that of a
process with empty caches, half of the baseline's peak as budget, and one step. Inductor
has started: it has compiled one product, which takes seconds of imports and of checks of the processor. The time of the
blocks includes the profile of the step. Written to `benchmarks/results/blocks.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest.mock
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lowering import PATIENT, ROOT, Built, Lowered, batched, uncached, without_kernels
from model_zoo import diffusion_transformer, gpt2, llama
from torch import nn
from torch.nn import functional as F

import autoremat
from autoremat.basics.units import format_bytes
from autoremat.compiler import peers
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.compiler.planning import SmallestGraph, plan_for_minimum_peak
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Op
from autoremat.planner.multigraph.step_profile import CODE_HEADROOM, StepProfile
from autoremat.planner.search import candidates
from autoremat.planner.search.planner import Planner

SHARES = (0.05, 0.25, 0.45, 0.65, 0.85)
"""Budgets, as shares of the way from the least budget that leaves code headroom to the blocks' peak without recomputation."""
BLOCK = re.compile(r"\b(?:joint|single|layers|h)\.\d+")
"""Matches the module paths of the models' blocks."""
FINEST = {"saved_levels": 24, "peak_levels": 9}
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
LAYERS = (8, 16, 32)


def build(name: str, count: int) -> Built:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, inputs = BUILDERS[name](count)
    return model.train(), inputs


def blocks_of(model: Any) -> list[nn.Module]:
    """Returns the blocks of a model of ``BUILDERS``. The last one of a language model is its head."""
    if hasattr(model, "joint"):
        return [*model.joint, *model.single]
    layers = model.inner.layers if hasattr(model.inner, "layers") else model.inner.h
    return [*layers, model.head]


def whole(name: str, count: int) -> SmallestGraph:
    """Returns the whole graph with its planner. Nothing is lowered."""
    model, inputs = build(name, count)
    found: list[SmallestGraph] = []

    def plan_and_stop(priced: PricedGraph, context: PlanningContext, earlier: object) -> Any:
        found.append(plan_for_minimum_peak(priced, context, compares=False))
        raise Lowered

    with uncached(), unittest.mock.patch.object(peers, "plan_graph", plan_and_stop), without_kernels():
        torch.compile(model, backend="autoremat", options=PATIENT)(*inputs)
    return found[0]


def measured(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Returns the peak of the second step in bytes."""
    model(*inputs).backward()
    model.zero_grad(set_to_none=True)
    with autoremat.track_peak("cpu") as peak:
        model(*inputs).backward()
    model.zero_grad(set_to_none=True)
    return peak.bytes


def rows(name: str, count: int, shares: Sequence[float] = SHARES) -> list[dict[str, Any]]:
    """Returns a row for each budget."""
    graph = whole(name, count)
    planner, step_seconds = graph.planner, graph.plan.graph.step_seconds
    assert planner is not None
    fastest = planner.fastest()
    assert fastest is not None
    model, inputs = build(name, count)
    compiled = autoremat.compile_blocks(blocks_of(model), 1.0, step=lambda: model(*inputs), options=PATIENT)
    assert compiled.profile is not None
    budgets = {share: budget_at(compiled.profile, share) for share in shares}
    result = []
    for share, budget in budgets.items():
        profile = compiled.within(budget)
        before = len(autoremat.reports())
        peak = measured(model, inputs)
        same_peak = planner.choose(profile.peak_bytes)
        added = None if same_peak is None else (same_peak.cost_seconds - fastest.cost_seconds) / step_seconds
        result.append(
            {
                "model": name, "blocks": count, "share": share, "budget": profile.budget_bytes, "predicted": profile.peak_bytes,
                "measured": peak, "added": profile.added_seconds / step_seconds, "added by the whole graph": added,
                "plans": [len({p for m, p, _ in profile.variants if m == n}) for n in sorted(set(profile.step.numbers))],
                "compilations": len(autoremat.reports()) - before,
            }
        )  # fmt: skip
        print(result[-1], flush=True)
    return result


def finest(name: str, count: int) -> dict[str, Any]:
    """Returns the added time with more plans per graph and finer Pareto fronts, and that with borders saved.

    Nothing is compiled.
    """
    graph = whole(name, count)
    planner, step_seconds = graph.planner, graph.plan.graph.step_seconds
    assert planner is not None
    fastest = planner.fastest()
    assert fastest is not None
    found: dict[str, Any] = {"model": name, "blocks": count}
    budget, with_borders = None, Planner(with_borders_saved(planner.graph), PATIENT["time_limit"])
    for label, levels, variants in (("blocks", {}, 3), ("finest", FINEST, count)):
        model, inputs = build(name, count)
        with unittest.mock.patch.object(candidates, "settings", replace(candidates.settings, **levels)):
            compiled = autoremat.compile_blocks(
                blocks_of(model), 1.0, variants=variants, step=partial(model, *inputs), options=PATIENT
            )
            assert compiled.profile is not None
            budget = budget or budget_at(compiled.profile, SHARES[0])
            profile = compiled.within(budget)
        same_peak = planner.choose(profile.peak_bytes)
        found |= {
            f"predicted, {label}": profile.peak_bytes,
            f"added, {label}": profile.added_seconds / step_seconds,
            f"whole graph, {label}": same_peak and (same_peak.cost_seconds - fastest.cost_seconds) / step_seconds,
        }
        if label == "blocks":
            saved = with_borders.choose(profile.peak_bytes)
            found["borders saved"] = saved and (saved.cost_seconds - fastest.cost_seconds) / step_seconds
    print(found, flush=True)
    return found


def with_borders_saved(graph: Graph) -> Graph:
    """Returns the graph with a constraint to save each value of a block that the forward of another module reads."""
    ops = list(graph.ops)

    def block(op: Op) -> str | None:
        found = BLOCK.search(op.module)
        return None if found is None else found[0]

    for number, op in enumerate(ops[: graph.num_forward]):
        readers = [ops[reader] for value in op.outputs for reader in graph.readers[value] if reader < graph.num_forward]
        if block(op) and op.rematerializable and any(block(reader) != block(op) for reader in readers):
            ops[number] = replace(op, constraint=Constraint.SAVE)
    return replace(graph, ops=tuple(ops))


def budget_at(profile: StepProfile, share: float) -> int:
    """Returns the budget at a share of the way from the least one to the peak without recomputation."""
    least = profile.minimum_peak_bytes / (1 - CODE_HEADROOM)
    return int(least + share * (profile.baseline_peak_bytes - least))


def compile_seconds(name: str, count: int, variants: int) -> tuple[float, float]:
    """Returns the seconds of compilation and first step: by the clock, and of this process without C++ compilers.

    Inductor has started before, as it does once in every process.
    """
    torch.compile(lambda x: torch.relu(x @ x).sum())(torch.randn(8, 8, requires_grad=True)).backward()
    model, inputs = build(name, count)
    begin, own = time.perf_counter(), time.process_time()
    if variants:
        autoremat.compile_blocks(blocks_of(model), 0.5, step=lambda: model(*inputs), variants=variants)
        model(*inputs).backward()
    else:
        torch.compile(model, backend="autoremat", options={"memory_budget": 0.5})(*inputs).backward()
    return time.perf_counter() - begin, time.process_time() - own


def times(name: str, count: int) -> dict[str, Any]:
    """Returns the compile times of all methods, each in a process of its own with empty caches."""
    found: dict[str, Any] = {"model": name, "blocks": count}
    for label, variants in METHODS.items():
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            command = [sys.executable, __file__, "--only-time", str(variants), "--models", name, "--layers", str(count)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        found[label], found[f"{label}, own"] = map(float, done.stdout.splitlines()[-1].split())
        print(found, flush=True)
    return found


def text_of(results: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the tables of all rows."""
    columns = ("budget", "predicted", "measured")
    lines = [
        f"{'model':<10} {'blocks':>6} {'share':>6}" + "".join(f" {c:>11}" for c in columns)
        + f" {'added':>8} {'whole graph':>12} {'difference':>11} {'plans':>7} {'compiled':>9}"
    ]  # fmt: skip
    for row in results["rows"]:
        added, other = row["added"], row["added by the whole graph"]
        whole_graph = "-" if other is None else f"{other:.2%}"
        difference = "-" if other is None else f"{added - other:+.2%}"
        plans = "+".join(map(str, row["plans"]))
        lines.append(
            f"{row['model']:<10} {row['blocks']:>6} {row['share']:>6.0%}"
            + "".join(f" {format_bytes(row[c]):>11}" for c in columns)
            + f" {added:>8.2%} {whole_graph:>12} {difference:>11} {plans:>7} {row['compilations']:>9}"
        )
    if results["finest"]:
        lines += ["", f"{'model':<10} {'blocks':>6}" + "".join(f" {c:>24}" for c in ("up to 3 plans", "finest"))]
        lines[-1] += f" {'borders saved':>14}"
        for row in results["finest"]:
            cells = [(row[f"added, {label}"], row[f"whole graph, {label}"]) for label in ("blocks", "finest")]
            texts = [f"{added:.2%} (whole {'-' if w is None else f'{w:.2%}'})" for added, w in cells]
            saved = "-" if row.get("borders saved") is None else f"{row['borders saved']:.2%}"
            lines.append(f"{row['model']:<10} {row['blocks']:>6}" + "".join(f" {text:>24}" for text in texts) + f" {saved:>14}")
    if results["times"]:
        title = "Compile time and first step, in seconds; in brackets of the process alone, without C++ compilers"
        columns = ("up to 3 plans", "one plan each", "whole graph", "ratio to 3", "ratio to one")
        lines += ["", title, f"{'model':<10} {'blocks':>6}" + "".join(f" {column:>14}" for column in columns)]
        for row in results["times"]:
            found = [(row[label], row[f"{label}, own"]) for label in METHODS]
            ratios = [tuple(whole / one for one, whole in zip(ones, found[-1], strict=True)) for ones in found[:-1]]
            cells = [f"{clock:.1f} ({own:.1f})" for clock, own in (*found, *ratios)]
            lines.append(f"{row['model']:<10} {row['blocks']:>6}" + "".join(f" {cell:>14}" for cell in cells))
    return "\n".join(lines) + "\n"


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the new rows, and the old ones of other models and sizes, in the sequence of the models."""
    replaced = {(row["model"], row["blocks"], row.get("share")) for row in new}
    rows = [row for row in old if (row["model"], row["blocks"], row.get("share")) not in replaced] + new
    return sorted(rows, key=lambda row: (list(BUILDERS).index(row["model"]), row["blocks"], row.get("share", 0.0)))


PARTS: dict[str, Callable[[str, int], Any]] = {"rows": rows, "finest": finest, "times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--layers", nargs="+", type=int, default=list(LAYERS))
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--only-time", type=int, choices=list(METHODS.values()), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.only_time is not None:
        print(*compile_seconds(arguments.models[0], arguments.layers[0], arguments.only_time))
        return
    file = arguments.output / "blocks.json"
    results = {part: [] for part in PARTS} | (json.loads(file.read_text()) if file.exists() else {})
    for count in arguments.layers:
        for name in arguments.models:
            for part in arguments.parts:
                new = rows(name, count, arguments.shares) if part == "rows" else [PARTS[part](name, count)]
                results[part] = merged(results[part], new)
                file.write_text(json.dumps(results, indent=2) + "\n")
                (arguments.output / "blocks.txt").write_text(text_of(results))
    print(text_of(results))
    if any(row["measured"] > row["budget"] for row in results["rows"]):
        raise SystemExit("a measured peak is over its budget")


if __name__ == "__main__":
    main()
