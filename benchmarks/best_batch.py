"""Predicted samples per second against measured ones, for five batch sizes under three budgets.

    python benchmarks/best_batch.py                      # two models, about 12 minutes on two idle cores
    python benchmarks/best_batch.py --models llama-4     # measures these again; rows of other models stay

Budgets are shares of the peak that the largest size has under the fastest plan. Each size is compiled by Inductor under each
budget, and `autoremat.best_batch` plans the same sizes. Steps of all sizes and budgets of a model run in turn, in an order that
reverses each round; seconds are medians. A result is the rank correlation (Kendall's tau) of predicted and measured samples per
second under a budget. The other is the samples per second that the predicted best size loses against the measured best one.
Sizes that do not fit a budget are left out. Only an idle machine gives figures worth keeping. Written to
`benchmarks/results/best_batch.*`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import model_zoo
import torch
import torch._dynamo.config as dynamo_config
from rich.console import Console
from rich.table import Table
from torch import nn

import autoremat
from autoremat.tools.best_batch import BestBatch

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"HIDDEN": 192, "LENGTH": 128}
"""Constants of `model_zoo`."""

MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2-4": lambda: model_zoo.gpt2(4)[0], "llama-4": lambda: model_zoo.llama(4)[0]}
BATCHES = (1, 2, 4, 8, 16)
SHARES = (1.0, 0.6, 0.35)
WARM_ROUNDS = 2


@dataclass(frozen=True)
class Row:
    """One size of one model under one budget."""

    model: str
    share: float
    budget_bytes: int
    size: int
    predicted: float
    """Samples per second."""
    measured: float
    """Samples per second."""
    recomputed: float
    """Seconds of recomputation as a share of the step, by the cost model."""
    predicted_bytes: int
    measured_bytes: int


@dataclass(frozen=True)
class Verdict:
    """The result of the rows of one model under one budget."""

    model: str
    share: float
    tau: float
    predicted_best: int
    measured_best: int
    loss: float
    """Share of the measured best's samples per second that the predicted best lacks."""


@dataclass(frozen=True)
class Step:
    """Forward and backward of a compiled model."""

    model: nn.Module
    compiled: Callable[[torch.Tensor], torch.Tensor]
    inputs: torch.Tensor

    def __call__(self) -> None:
        self.forget_gradients()
        self.compiled(self.inputs).backward()

    def forget_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)


def tokens(size: int) -> torch.Tensor:
    return torch.randint(0, model_zoo.VOCABULARY, (size, model_zoo.LENGTH))


def measured(name: str, rounds: int) -> list[Row]:
    """Returns the rows of a model."""
    torch.manual_seed(0)
    model = MODELS[name]()
    most = autoremat.explain(model, tokens(BATCHES[-1]), options={"memory_budget": "1TiB"}).peak_bytes
    budgets = {share: int(share * most) for share in SHARES}
    planned = {share: planned_for(model, budget) for share, budget in budgets.items()}
    steps: dict[tuple[float, int], Step] = {}
    for share, budget in budgets.items():
        for one in planned[share].tried:
            if one.fits:
                steps[share, one.size] = compiled_step(name, one.size, budget)
    samples = samples_of(steps, rounds)
    return [
        Row(
            name, share, budgets[share], one.size, one.samples_per_second or 0.0,
            one.size / statistics.median(samples[share, one.size]), one.recomputed_share or 0.0, one.peak_bytes,
            peak_of(steps[share, one.size]),
        )
        for share, found in planned.items()
        for one in found.tried
        if one.fits
    ]  # fmt: skip


def planned_for(model: nn.Module, budget: int) -> BestBatch:
    """Returns the sizes as planned, without their code."""
    return autoremat.best_batch(tokens, model, budget, candidates=BATCHES)


def compiled_step(name: str, size: int, budget: int) -> Step:
    """Returns forward and backward of a fresh model, compiled for that size and budget."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](), tokens(size)
    compiled = torch.compile(model, backend="autoremat", dynamic=False, options={"memory_budget": budget})
    step, begin = Step(model, compiled, inputs), time.perf_counter()
    step()
    print(f"{name}, {size} within {budget / 2**20:.1f} MiB: compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    return step


def samples_of(steps: dict[tuple[float, int], Step], rounds: int) -> dict[tuple[float, int], list[float]]:
    """Returns the seconds of each step in each round."""
    found: dict[tuple[float, int], list[float]] = {key: [] for key in steps}
    for turn in range(WARM_ROUNDS + rounds):
        for key in list(steps) if turn % 2 else reversed(steps):
            begin = time.perf_counter()
            steps[key]()
            if turn >= WARM_ROUNDS:
                found[key].append(time.perf_counter() - begin)
    return found


def peak_of(step: Step) -> int:
    """Returns the measured peak of a step that starts without gradients."""
    step.forget_gradients()
    with autoremat.track_peak("cpu") as peak:
        step()
    return peak.bytes


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Returns Kendall's tau of the pairs: couples that agree minus couples that disagree, as a share of all."""
    couples = list(itertools.combinations(pairs, 2))
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in couples]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(couples) if couples else 1.0


def verdicts_of(rows: list[Row]) -> list[Verdict]:
    """Returns one verdict for each model and budget."""
    found = []
    for model, share in dict.fromkeys((row.model, row.share) for row in rows):
        own = [row for row in rows if (row.model, row.share) == (model, share)]
        predicted, best = max(own, key=lambda row: row.predicted), max(own, key=lambda row: row.measured)
        tau = kendall([(row.predicted, row.measured) for row in own])
        found.append(Verdict(model, share, tau, predicted.size, best.size, 1 - predicted.measured / best.measured))
    return found


def write(rows: list[Row], setup: dict[str, Any], folder: Path) -> None:
    """Writes best_batch.txt and best_batch.json in `folder`."""
    table = Table(title="Samples per second by size and budget")
    table.add_column("model", no_wrap=True)
    columns = ("budget, MiB", "share", "size", "predicted", "measured", "recomputed %", "simulated, MiB", "peak, MiB")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.model, f"{row.budget_bytes / 2**20:.1f}", f"{row.share:g}", str(row.size), f"{row.predicted:.2f}",
            f"{row.measured:.2f}", f"{100 * row.recomputed:.1f}", f"{row.predicted_bytes / 2**20:.1f}",
            f"{row.measured_bytes / 2**20:.1f}",
        )  # fmt: skip
    found = verdicts_of(rows)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "best_batch.txt").open("w") as file:
        for console in (Console(width=110), Console(width=110, file=file)):
            console.print(", ".join(f"{key}: {value}" for key, value in setup.items()), highlight=False)
            console.print(table)
            for one in found:
                text = f"tau {one.tau:.2f}, best {one.predicted_best} predicted, {one.measured_best} measured"
                console.print(f"{one.model} at {one.share:g}: {text}, loss {one.loss:.1%}", highlight=False)
    record = setup | {"verdicts": [asdict(one) for one in found], "rows": [asdict(row) for row in rows]}
    (folder / "best_batch.json").write_text(json.dumps(record, indent=2) + "\n")


def known_rows(folder: Path, setup: dict[str, Any]) -> dict[str, list[Row]]:
    """Returns the rows, by model, that an earlier run with the same setup has written."""
    path = folder / "best_batch.json"
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    same = all(record.get(key) == value for key, value in setup.items())
    found: dict[str, list[Row]] = {}
    for fields in record["rows"] if same else ():
        found.setdefault(fields["model"], []).append(Row(**fields))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each size and budget")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    for constant, size in SIZES.items():
        setattr(model_zoo, constant, size)
    dynamo_config.recompile_limit = 10_000  # one code object is compiled once for each size and budget
    setup = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "sizes": SIZES,
    }
    rows = known_rows(arguments.output, setup)
    for name in arguments.models:
        torch._dynamo.reset()
        begin = time.perf_counter()
        rows[name] = measured(name, arguments.rounds)
        print(f"{name}: {time.perf_counter() - begin:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
        write([row for known in MODELS for row in rows.get(known, ())], setup, arguments.output)


if __name__ == "__main__":
    main()
