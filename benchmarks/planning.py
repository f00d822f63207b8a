"""Seconds that planning takes against torch's own partitioner, both given the same joint graph and half the memory.

    python benchmarks/planning.py
    python benchmarks/planning.py --suffix _torch-2.15     # with another torch; leaves the results of the pinned one alone

The graphs are those of the demo's model with more or fewer layers, decomposed as for Inductor. Torch's figure is one call
of its min-cut partitioner at `activation_memory_budget=0.5`. The minimum cuts in it, which torch 2.15 no longer leaves to
networkx, are also given alone. Ours are the planning itself (`Report.planning_seconds`)
and the whole call of the partitioner, which also reads the graph and writes forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
import unittest.mock
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from rich.console import Console
from rich.table import Table
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from autoremat.compiler.joint_graph import PlanningContext
from autoremat.compiler.partitioner import Partitioner
from autoremat.compiler.partitioning import Partitioning
from autoremat.compiler.planning import plan_graph
from autoremat.request.limits import Limits
from autoremat.request.request import Request

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import demo_model  # noqa: E402

BUDGET = 0.5
LAYERS = (4, 10, 32)


@dataclass(frozen=True)
class Row:
    """Medians over the repeats, in seconds."""

    layers: int
    nodes: int
    torch_seconds: float
    torch_cuts_seconds: float
    planning_seconds: float
    whole_call_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--suffix", default="", help="of the names of the result files")
    arguments = parser.parse_args()
    rows = [compare(layers, arguments.repeats) for layers in arguments.layers]
    write(rows, arguments.repeats, arguments.output / f"planning{arguments.suffix}")


def compare(layers: int, repeats: int) -> Row:
    """Returns the row of a model with `layers` layers, whose joint graph both partition in turn."""
    torch._dynamo.reset()
    found: list[Row] = []

    def partition(joint: fx.GraphModule, inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        found.append(time_both(layers, joint, inputs, keywords, repeats))
        return min_cut_rematerialization_partition(joint, inputs, **keywords)

    backend = aot_autograd(
        fw_compiler=lambda module, _: module.forward, partition_fn=partition, decompositions=select_decomp_table()
    )
    size = replace(demo_model.FULL, layers=layers)
    (batch,) = demo_model.token_batches(size, 1)
    torch.compile(demo_model.build_model(size), backend=backend)(batch)
    (row,) = found
    print(f"{layers} layers: torch {row.torch_seconds:.3f} s, ours {row.planning_seconds:.3f} s", flush=True)
    return row


def time_both(layers: int, joint: fx.GraphModule, inputs: Any, keywords: dict[str, Any], repeats: int) -> Row:
    def seconds_of(partition: Callable[..., Any]) -> float:
        with warnings.catch_warnings():  # torch's own classes warn while they are copied
            warnings.simplefilter("ignore", FutureWarning)
            fresh = fx.GraphModule(joint, copy.deepcopy(joint.graph))  # a partitioner may change what it is given
        begin = time.perf_counter()
        partition(fresh, inputs, **keywords)
        return time.perf_counter() - begin

    solve, cuts = partitioners.solve_min_cut, []

    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return solve(*arguments, **options)
        finally:
            cuts[-1] += time.perf_counter() - begin

    theirs, planning, whole = [], [], []
    for _ in range(repeats):
        cuts.append(0.0)
        with (
            functorch_config.patch(activation_memory_budget=BUDGET),
            unittest.mock.patch.object(partitioners, "solve_min_cut", timed),
        ):
            theirs.append(seconds_of(min_cut_rematerialization_partition))
        ours = Partitioning(PlanningContext(Request(Limits(reference_share=BUDGET))), plan_graph)
        whole.append(seconds_of(Partitioner(ours)))
        planning.append(ours.planned.report.planning_seconds)
    medians = map(statistics.median, (theirs, cuts, planning, whole))
    return Row(layers, len(joint.graph.nodes), *medians)


def write(rows: list[Row], repeats: int, stem: Path) -> None:
    """Prints the table and writes it to a text and a JSON file of the name `stem`."""
    setup = {"torch": torch.__version__, "cores": os.cpu_count(), "budget": BUDGET, "repeats": repeats}
    table = Table(title="Seconds to partition the same joint graph")
    columns = (
        "layers", "nodes", "torch", "its cuts", "our planning", "our whole call", "torch / planning", "torch / whole call",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        times = (row.torch_seconds, row.torch_cuts_seconds, row.planning_seconds, row.whole_call_seconds)
        ratios = (row.torch_seconds / row.planning_seconds, row.torch_seconds / row.whole_call_seconds)
        table.add_row(str(row.layers), str(row.nodes), *(f"{t:.3f}" for t in times), *(f"{r:.1f}" for r in ratios))
    stem.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{stem}.txt").open("w") as file:
        for console in (Console(width=120), Console(width=120, file=file)):
            console.print(", ".join(f"{key}: {value}" for key, value in setup.items()), highlight=False)
            console.print(table)
    record = setup | {"rows": [asdict(row) for row in rows]}
    Path(f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
