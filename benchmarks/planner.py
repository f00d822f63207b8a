"""The planner on joint graphs of real models, against its own lower bound and against torch's partitioner.

    python benchmarks/planner.py                       # all models, about half an hour
    python benchmarks/planner.py --models gpt2-12 unet

Everything here is by the cost model and the simulator, without fusion: every result is materialised. Added time is
recomputation as a share of the step without it. torch's partitions, at `activation_memory_budget` 0.9 to 0.1, are taken as
they are, order included, and run through the same simulator; ours are planned for the peak that torch's reach.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from model_zoo import MODELS
from rich.console import Console
from rich.table import Table
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from autoremat import torch_compat
from autoremat.capture import Capture, capture
from autoremat.comparison import plan_of_partition
from autoremat.graph import Graph
from autoremat.plans import Plan
from autoremat.solvers import Planner

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TORCH_BUDGETS = tuple(tenths / 10 for tenths in range(9, 0, -1))
TIME_LIMIT = 60.0


@dataclass(frozen=True)
class Row:
    """One model at one budget. Times are shares of the step, peaks shares of the peak without recomputation."""

    model: str
    ops: int
    budget: float
    added: float | None
    """None if nothing found fits."""
    peak: float
    bound: float | None
    """None if the bound says that nothing fits."""
    gap: float | None
    seconds: float


@dataclass(frozen=True)
class Duel:
    """torch's partition at one of its budgets, and ours at the peak that it reaches."""

    model: str
    torch_budget: float
    peak: float
    torch_added: float
    our_added: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    rows: list[Row] = []
    duels: list[Duel] = []
    for name in arguments.models:
        captured, torch_plans = capture_model(name)
        rows += plan_at_all_budgets(name, captured.graph)
        duels += compare(name, captured.graph, torch_plans)
        write(rows, duels, arguments.output)


def capture_model(name: str, torch_budgets: tuple[float, ...] = TORCH_BUDGETS) -> tuple[Capture, dict[float, Plan]]:
    """The joint graph, priced by recomputation alone, and torch's partitions of it at these of its budgets."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    found: list[tuple[Capture, dict[float, Plan]]] = []

    def partition(joint: fx.GraphModule, inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        prepared = torch_compat.prepare_joint(joint)
        captured = capture(prepared, keywords["num_fwd_outputs"], fuses=False)
        captured = replace(captured, graph=replace(captured.graph, saving_seconds_per_byte=0.0))
        plans = {}
        for budget in torch_budgets:
            with warnings.catch_warnings(), functorch_config.patch(activation_memory_budget=budget):
                warnings.simplefilter("ignore", FutureWarning)
                halves = min_cut_rematerialization_partition(
                    fx.GraphModule(prepared, copy.deepcopy(prepared.graph)), inputs, **keywords
                )
            plans[budget] = plan_of_partition(captured, *halves)
        found.append((captured, plans))
        return min_cut_rematerialization_partition(joint, inputs, **keywords)

    backend = aot_autograd(fw_compiler=lambda module, _: module.forward, partition_fn=partition)
    model, inputs = MODELS[name]()
    torch.compile(model, backend=backend)(*inputs)
    (result,) = found
    return result


def plan_at_all_budgets(name: str, graph: Graph) -> list[Row]:
    rows = []
    peak = Planner(graph).baseline.peak_bytes
    for share in SHARES:
        begin = time.perf_counter()
        planning = Planner(graph, TIME_LIMIT).find(int(share * peak))
        seconds = time.perf_counter() - begin
        bound, plan, step = planning.lower_bound_seconds, planning.plan, graph.step_seconds
        row = Row(
            name,
            len(graph.ops),
            share,
            plan and plan.added_seconds / step,
            (plan or planning.smallest).peak_bytes / peak,
            bound / step if bound < math.inf else None,
            plan and max(0.0, plan.added_seconds - bound) / (step + bound),
            seconds,
        )
        print(row, flush=True)
        rows.append(row)
    return rows


def compare(name: str, graph: Graph, torch_plans: dict[float, Plan]) -> list[Duel]:
    planner = Planner(graph, TIME_LIMIT)
    peak, step = planner.baseline.peak_bytes, graph.step_seconds
    duels = []
    for budget, theirs in torch_plans.items():
        ours = planner.find(theirs.peak_bytes).plan
        added = ours and ours.added_seconds / step
        duels.append(Duel(name, budget, theirs.peak_bytes / peak, theirs.added_seconds / step, added))
        print(duels[-1], flush=True)
    return duels


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def tables(rows: list[Row], duels: list[Duel]) -> list[Table]:
    ours = Table(title="Planned for a share of the peak without recomputation; times in % of the step")
    for column in ("model", "ops", "budget %", "peak %", "added", "bound", "gap", "seconds"):
        ours.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        figures = (percent(x) for x in (row.budget, row.peak, row.added, row.bound, row.gap))
        ours.add_row(row.model, str(row.ops), *figures, f"{row.seconds:.2f}")
    against = Table(title="At the peak of torch's partition: recomputation in % of the step")
    for column in ("model", "torch's budget", "peak %", "torch", "autoremat"):
        against.add_column(column, justify="left" if column == "model" else "right")
    for duel in duels:
        figures = (percent(x) for x in (duel.peak, duel.torch_added, duel.our_added))
        against.add_row(duel.model, f"{duel.torch_budget:.1f}", *figures)
    return [ours, against]


def summary(duels: list[Duel]) -> str:
    both = [(d.our_added, d.torch_added) for d in duels if d.our_added is not None and d.torch_added > 0.0]
    worse = sum(ours > theirs * (1 + 1e-9) for ours, theirs in both)
    ratios = [ours / theirs for ours, theirs in both if ours > 0.0]  # without recomputation there is no logarithm
    ratio = statistics.geometric_mean(ratios) if ratios else math.nan
    missed = sum(d.our_added is None for d in duels)
    return (
        f"recomputation against torch's, geometric mean of {len(ratios)} duels: {ratio:.3f}; none needed in "
        f"{len(both) - len(ratios)}; slower in {worse}, no plan in {missed} of {len(duels)}"
    )


def write(rows: list[Row], duels: list[Duel], folder: Path) -> None:
    """planner.txt and planner.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = {"torch": torch.__version__, "cores": os.cpu_count(), "time limit": TIME_LIMIT}
    with (folder / "planner.txt").open("w") as file:
        console = Console(width=120, file=file)
        for part in (", ".join(f"{k}: {v}" for k, v in setup.items()), *tables(rows, duels), summary(duels)):
            console.print(part, highlight=False)
    record = setup | {"rows": [asdict(row) for row in rows], "duels": [asdict(duel) for duel in duels]}
    (folder / "planner.json").write_text(json.dumps(record, indent=2) + "\n")
    print(summary(duels), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
