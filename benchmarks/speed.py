"""Seconds to plan one budget as the backend does it, with default options and a bound, beside torch's own partitioner.

    python benchmarks/speed.py                          # GPT-2 and Llama with 12, 32 and 80 layers
    python benchmarks/speed.py --models llama-12 --share 0.7

Joint graphs are those that Inductor hands over. Ours are planned for a share of the simulated peak; torch's partitioner gets
the same share as its `activation_memory_budget`. Seconds are the processor's, the median of a few runs. The exponent is that of
seconds against ops between the shortest and the longest model of a kind. Written to `benchmarks/results/speed.*`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import time
import unittest.mock
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from lowering import BUILDERS, ROOT, Lowered, build, uncached, without_kernels
from rich.console import Console
from rich.table import Table
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from autoremat.compiler import peers
from autoremat.compiler.joint_graph import JointGraph, PlanningContext, PricedGraph
from autoremat.compiler.partitioning import Partitioning
from autoremat.compiler.planning import BudgetedGraph
from autoremat.torch_private import joint_graphs

MODELS = tuple(f"{kind}-{layers}" for kind in ("gpt2", "llama") for layers in (12, 32, 80))


@dataclass(frozen=True)
class Row:
    """One model; processor seconds."""

    model: str
    ops: int
    seconds: float
    added: float
    """Recomputation as a share of the step."""
    gap: float
    torch_seconds: float


def measured(name: str, share: float, repeats: int) -> Row:
    """Returns the row of a model whose joint graph is planned by us and by torch. Nothing is lowered."""
    model, inputs = build(name)
    rows: list[Row] = []
    partition, plan_graph = Partitioning.__call__, peers.plan_graph

    def timed(self: Partitioning[Any], joint: JointGraph) -> Any:
        torchs = seconds_of(lambda: by_torch(joint.module, joint.inputs, share, dict(joint.keywords)), 1)

        def plan_and_stop(priced: PricedGraph, context: PlanningContext, earlier: object = None) -> BudgetedGraph:
            ours = seconds_of(lambda: plan_graph(priced, context), repeats)
            planned = plan_graph(priced, context)
            added = planned.plan.added_seconds / priced.graph.step_seconds
            rows.append(Row(name, len(priced.graph.ops), ours, added, planned.report.gap, torchs))
            raise Lowered

        self.plan = plan_and_stop
        return partition(self, joint)

    options = {"memory_budget": share, "on_planning_error": "raise"}
    with uncached(), unittest.mock.patch.object(Partitioning, "__call__", timed), without_kernels():
        torch.compile(model, backend="autoremat", options=options)(*inputs)
    return rows[0]


def by_torch(joint: fx.GraphModule, inputs: Any, share: float, keywords: dict[str, Any]) -> None:
    copied = fx.GraphModule(joint, copy.deepcopy(joint.graph))
    prepared = joint_graphs.prepare_joint(copied, keywords["num_fwd_outputs"])
    with warnings.catch_warnings(), functorch_config.patch(activation_memory_budget=share):
        warnings.simplefilter("ignore", FutureWarning)
        min_cut_rematerialization_partition(prepared, inputs, **keywords)


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        samples.append(time.process_time() - begin)
    return statistics.median(samples)


def exponents(rows: list[Row]) -> dict[str, float]:
    """Returns the exponents of planning time in the number of ops, by kind of model."""
    found = {}
    for kind in dict.fromkeys(row.model.rpartition("-")[0] for row in rows):
        of_kind = sorted((row.ops, row.seconds) for row in rows if row.model.startswith(f"{kind}-"))
        (few, least), (many, most) = of_kind[0], of_kind[-1]
        if many > few:
            found[kind] = math.log(most / least) / math.log(many / few)
    return found


def write(rows: list[Row], share: float, folder: Path) -> None:
    table = Table(title=f"PlanningResult for {share:.0%} of the peak, processor seconds")
    for column in ("model", "ops", "ours", "added %", "gap %", "torch's partitioner"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        figures = (f"{row.seconds:.2f}", f"{100 * row.added:.1f}", f"{100 * row.gap:.2f}", f"{row.torch_seconds:.2f}")
        table.add_row(row.model, str(row.ops), *figures)
    growth = ", ".join(f"{kind} {exponent:.2f}" for kind, exponent in exponents(rows).items())
    load = os.getloadavg()[0]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "speed.txt").open("w") as file:
        for console in (Console(width=100), Console(width=100, file=file)):
            console.print(f"torch {torch.__version__}, load {load:.1f}", highlight=False)
            console.print(table)
            console.print(f"exponent of the seconds against the ops: {growth}", highlight=False)
    record = {"share": share, "load": load, "exponents": exponents(rows), "rows": [asdict(row) for row in rows]}
    (folder / "speed.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(BUILDERS), default=list(MODELS))
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        rows.append(measured(name, arguments.share, arguments.repeats))
        print(rows[-1], flush=True)
    write(rows, arguments.share, arguments.output)


if __name__ == "__main__":
    main()
