"""The planner on joint graphs of real models, against its own lower bound, torch's partitioner and per-layer checkpointing.

    python benchmarks/planner.py                       # all models, about an hour
    python benchmarks/planner.py --models gpt2-12 unet --output FOLDER
    python benchmarks/planner.py --join FOLDER/planner.json OTHER/planner.json

Everything here is by the cost model and the simulator, without fusion: every result is materialised. Added time is
recomputation as a share of the step without it. "added" and "seconds" are of the search, which the backend makes; "improved"
is `autoremat.plan` with `solver="auto"`, which goes on where the gap is over 1 %. Seconds are the processor's. Torch's
partitions, at `activation_memory_budget` 0.9 to 0.1, are taken as they are, order included. They run through the same
simulator, and so does checkpointing of every layer. Ours are planned for the peaks that these reach. Torch's partitions whose
backward autograd refuses, because they normalise again with statistics that the forward has overwritten, are left out.
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

import autoremat
from autoremat.basics.errors import PlanInvalid
from autoremat.capture.capture import Capture, capture
from autoremat.compiler.torch_partition import plan_of_partition
from autoremat.planner.constraints.constraints import Constraints
from autoremat.planner.constraints.policies import Full
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.torch_private import joint_graphs

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TORCH_BUDGETS = tuple(tenths / 10 for tenths in range(9, 0, -1))
TIME_LIMIT = 30.0
EVERY_LAYER = "every layer checkpointed"


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
    improved: float | None
    improved_gap: float | None
    improved_seconds: float


@dataclass(frozen=True)
class Duel:
    """A plan of another's making, and ours at the peak that it reaches."""

    model: str
    rival: str
    """One of torch's budgets, or checkpointing of every layer."""
    peak: float
    their_added: float
    our_added: float | None
    bound: float | None = None
    """Lower bound of `autoremat.plan` on the time that a plan at that peak adds; None if nothing fits by that."""


@dataclass(frozen=True)
class Least:
    """The smallest peaks found and the bound that no plan is below, less gradients and outputs of the graph, in bytes."""

    model: str
    ours: int
    torchs: int
    bound: int


PARTS: dict[type, str] = {Row: "rows", Duel: "duels", Least: "least"}
"""Names of the parts of the JSON."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--join", nargs="+", type=Path, metavar="JSON", help="join the results of earlier runs instead")
    arguments = parser.parse_args()
    rows: list[Row] = []
    duels: list[Duel] = []
    least: list[Least] = []
    if arguments.join:
        for record in (json.loads(path.read_text()) for path in arguments.join):
            for kind, found in ((Row, rows), (Duel, duels), (Least, least)):
                found += (kind(**entry) for entry in record[PARTS[kind]])
        write(rows, duels, least, arguments.output)
        return
    for name in arguments.models:
        captured, torch_plans = capture_model(name)
        rows += plan_at_all_budgets(name, captured.graph)
        duels += compare(name, captured.graph, torch_plans)
        if torch_plans:
            least.append(smallest(name, captured.graph, torch_plans))
        write(rows, duels, least, arguments.output)


def capture_model(name: str, torch_budgets: tuple[float, ...] = TORCH_BUDGETS) -> tuple[Capture, dict[float, Plan]]:
    """Returns the joint graph, priced by recomputation alone, and torch's partitions of it at these of its budgets."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    found: list[tuple[Capture, dict[float, Plan]]] = []

    def partition(joint: fx.GraphModule, inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        prepared = joint_graphs.prepare_joint(joint, keywords["num_fwd_outputs"])
        captured = capture(prepared, keywords["num_fwd_outputs"], fuses=False)
        captured = replace(captured, graph=replace(captured.graph, saving_seconds_per_byte=0.0))
        plans = {}
        for budget in torch_budgets:
            with warnings.catch_warnings(), functorch_config.patch(activation_memory_budget=budget):
                warnings.simplefilter("ignore", FutureWarning)
                halves = min_cut_rematerialization_partition(
                    fx.GraphModule(prepared, copy.deepcopy(prepared.graph)), inputs, **keywords
                )
            try:
                plans[budget] = plan_of_partition(captured, *halves)
            except PlanInvalid as error:
                print(f"{name}, torch at {budget}: {error}", flush=True)
        found.append((captured, plans))
        return min_cut_rematerialization_partition(joint, inputs, **keywords)

    backend = aot_autograd(fw_compiler=lambda module, _: module.forward, partition_fn=partition)
    model, inputs = MODELS[name]()
    torch.compile(model, backend=backend)(*inputs)
    (result,) = found
    return result


def plan_at_all_budgets(name: str, graph: Graph) -> list[Row]:
    rows = []
    peak, step = Planner(graph).baseline.peak_bytes, graph.step_seconds
    for share in SHARES:
        budget = int(share * peak)
        begin = time.process_time()
        planning = Planner(graph, TIME_LIMIT).find(budget)
        searched = time.process_time()
        improved = autoremat.plan(graph, budget, time_limit=TIME_LIMIT)
        ended = time.process_time()
        bound, plan = planning.lower_bound_seconds, planning.plan
        fits = improved.peak_bytes <= budget
        row = Row(
            name,
            len(graph.ops),
            share,
            plan and plan.added_seconds / step,
            ((improved if fits else None) or plan or planning.smallest).peak_bytes / peak,
            bound / step if bound < math.inf else None,
            plan and max(0.0, plan.added_seconds - bound) / (step + bound),
            searched - begin,
            improved.added_seconds / step if fits else None,
            improved.gap if fits else None,
            ended - searched,
        )
        print(row, flush=True)
        rows.append(row)
    return rows


def compare(name: str, graph: Graph, torch_plans: dict[float, Plan]) -> list[Duel]:
    planner = Planner(graph, TIME_LIMIT)
    peak, step = planner.baseline.peak_bytes, graph.step_seconds
    rivals = {f"torch {budget:.1f}": plan for budget, plan in torch_plans.items()}
    with warnings.catch_warnings():  # some models have no layers
        warnings.simplefilter("ignore", autoremat.ConstraintWarning)
        ordered = Constraints(policy=Full(), exact=True).apply(graph)
    if ordered.candidate is not None and ordered.candidate.plan.recomputed:
        rivals[EVERY_LAYER] = ordered.candidate.plan
    duels = []
    for rival, theirs in rivals.items():
        ours = planner.find(theirs.peak_bytes).plan
        added, bound = ours and ours.added_seconds / step, bound_at(graph, theirs.peak_bytes)
        duels.append(Duel(name, rival, theirs.peak_bytes / peak, theirs.added_seconds / step, added, bound))
        print(duels[-1], flush=True)
    return duels


def bound_at(graph: Graph, peak_bytes: int) -> float | None:
    seconds = autoremat.plan(graph, peak_bytes, time_limit=TIME_LIMIT).lower_bound_seconds
    return seconds / graph.step_seconds if seconds < math.inf else None


def smallest(name: str, graph: Graph, torch_plans: dict[float, Plan]) -> Least:
    with_caller = {*graph.forward_outputs, *graph.backward_outputs}
    held = sum(graph.values[v].bytes for v in with_caller if graph.values[v].producer is not None)
    found, torchs = Planner(graph, TIME_LIMIT).find(0), min(plan.peak_bytes for plan in torch_plans.values())
    return Least(name, found.smallest.peak_bytes - held, torchs - held, found.lower_bound_bytes - held)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def tables(rows: list[Row], duels: list[Duel], least: list[Least]) -> list[Table]:
    ours = Table(title="Planned for a share of the peak without recomputation; times in % of the step")
    for column in ("model", "ops", "budget %", "peak %", "bound", "added", "gap", "seconds", "improved", "gap", "seconds"):
        ours.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        figures = (percent(x) for x in (row.budget, row.peak, row.bound, row.added, row.gap))
        improved = (percent(row.improved), percent(row.improved_gap), f"{row.improved_seconds:.1f}")
        ours.add_row(row.model, str(row.ops), *figures, f"{row.seconds:.2f}", *improved)
    against = Table(title="At the peak of another's plan: recomputation in % of the step")
    for column in ("model", "plan", "peak %", "theirs", "autoremat", "bound"):
        against.add_column(column, justify="left" if column in ("model", "plan") else "right")
    for duel in duels:
        figures = (percent(x) for x in (duel.peak, duel.their_added, duel.our_added, duel.bound))
        against.add_row(duel.model, duel.rival, *figures)
    smallest = Table(title="The smallest peaks found, above gradients and outputs, KiB, and what no plan is below")
    for column in ("model", "autoremat", "no plan below", "torch's lowest", "autoremat / torch"):
        smallest.add_column(column, justify="left" if column == "model" else "right")
    for entry in least:
        sizes = (f"{size / 1024:.0f}" for size in (entry.ours, entry.bound, entry.torchs))
        smallest.add_row(entry.model, *sizes, f"{entry.ours / entry.torchs:.3f}")
    return [ours, against, smallest]


def summary(rows: list[Row], duels: list[Duel], least: list[Least]) -> list[str]:
    by_layer = [d for d in duels if d.rival == EVERY_LAYER]
    by_torch = [d for d in duels if d.rival != EVERY_LAYER]
    lines = [f"against torch: {_score(by_torch)}", f"against {EVERY_LAYER}: {_score(by_layer)}"]
    shares = {entry.model: entry.ours / entry.torchs for entry in least if entry.torchs > 0}
    if shares:
        worst = max(shares, key=shares.__getitem__)
        mean = statistics.geometric_mean(shares.values())
        lines.append(
            f"smallest peak over torch's lowest, above gradients and outputs: geometric mean {mean:.3f}, "
            f"largest {shares[worst]:.3f} ({worst})"
        )
    for text, most, chosen in (
        ("40 % and more", 0.01, [r for r in rows if r.budget >= 0.4]),
        ("less", 0.03, [r for r in rows if r.budget < 0.4]),
    ):
        gaps = {f"{r.model} {r.budget:.0%}": r.improved_gap for r in chosen if r.improved_gap is not None}
        over = [f"{name} {gap:.2%}" for name, gap in gaps.items() if gap > most]
        lines.append(f"gap at budgets of {text}: over {most:.0%} in {len(over)} of {len(gaps)} cells: {', '.join(over) or '-'}")
    return lines


def _score(duels: list[Duel]) -> str:
    both = [(d.our_added, d.their_added) for d in duels if d.our_added is not None and d.their_added > 0.0]
    worse = sum(ours > theirs * (1 + 1e-9) for ours, theirs in both)
    ratios = [ours / theirs for ours, theirs in both if ours > 0.0]  # without recomputation there is no logarithm
    ratio = statistics.geometric_mean(ratios) if ratios else math.nan
    missed = sum(d.our_added is None for d in duels)
    bounds = [d.bound / d.their_added for d in duels if d.bound and d.their_added > 0.0]
    possible = f", and no plan's is less than {statistics.geometric_mean(bounds):.3f}" if len(bounds) == len(ratios) else ""
    return (
        f"recomputation over theirs, geometric mean of {len(ratios)} duels: {ratio:.3f}{possible}; none needed in "
        f"{len(both) - len(ratios)}; slower in {worse}, no plan in {missed} of {len(duels)}"
    )


def write(rows: list[Row], duels: list[Duel], least: list[Least], folder: Path) -> None:
    """Writes planner.txt and planner.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = {"torch": torch.__version__, "cores": os.cpu_count(), "time limit": TIME_LIMIT}
    lines = summary(rows, duels, least)
    with (folder / "planner.txt").open("w") as file:
        console = Console(width=130, file=file)
        for part in (", ".join(f"{k}: {v}" for k, v in setup.items()), *tables(rows, duels, least), *lines):
            console.print(part, highlight=False)
    parts = zip(PARTS.values(), (rows, duels, least), strict=True)
    record = setup | {name: [asdict(entry) for entry in part] for name, part in parts}
    (folder / "planner.json").write_text(json.dumps(record, indent=2) + "\n")
    print("\n".join(lines), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
