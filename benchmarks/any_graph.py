"""`autoremat.plan` on graphs of one phase, and on joint graphs where the quick search leaves a gap.

    python benchmarks/any_graph.py                     # about half an hour
    python benchmarks/any_graph.py --sizes 100 250 --seeds 0 --joint
    python benchmarks/any_graph.py --published FOLDER  # with the files of MOCCASIN's data set, not part of this project

The first table: random layered graphs of the published sizes (see random_layered.py), as shares of the peak of their given
order. The second: gains of annealing and of the event-gap model over the search that the backend runs, on joint graphs without
fusion. Times are in % of the graph's own seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from planner import capture_model, percent
from random_layered import WIDTHS, generate
from rich.console import Console
from rich.table import Table

from autoremat import Graph, Plan, plan
from autoremat.planner.search.planner import Planner

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.9, 0.8, 0.7)
LIMITS = {100: 15.0, 250: 15.0, 500: 60.0, 1000: 60.0}
"""Seconds, by number of ops."""

JOINT = ("gpt2-4", "llama-4", "unet", "densenet", "resnet-50")
JOINT_SHARES = (0.8, 0.6, 0.5, 0.4, 0.3)
JOINT_LIMIT = 20.0


@dataclass(frozen=True)
class Row:
    """One graph at one budget. Times are shares of the graph's seconds, the peak one of the budget."""

    graph: str
    ops: int
    budget: float
    searched: float | None
    """Added by the search alone; None where nothing fits or it was not asked."""
    added: float | None
    bound: float
    gap: float
    peak: float
    status: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", type=int, choices=list(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--joint", nargs="*", choices=JOINT, default=list(JOINT))
    parser.add_argument("--published", type=Path, help="a folder with the graphs random_layered_*.json of MOCCASIN")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    layered: list[Row] = []
    joint: list[Row] = []
    for path in sorted(arguments.published.glob("random_layered_*.json"), key=ops_of) if arguments.published else ():
        graph = published_graph(path)
        for share in SHARES:
            layered.append(row("published", graph, share, LIMITS[len(graph.ops)], None))
            write(layered, joint, arguments.output)
    for size in arguments.sizes:
        for seed in arguments.seeds:
            drawn = generate(size, WIDTHS[size], seed)
            graph = Graph.from_dag(drawn.seconds, drawn.sizes, drawn.edges)
            for share in SHARES:
                layered.append(row(f"seed {seed}", graph, share, LIMITS[size], None))
                write(layered, joint, arguments.output)
    for name in arguments.joint:
        graph = capture_model(name, torch_budgets=())[0].graph
        for share in JOINT_SHARES:
            planner = Planner(graph, JOINT_LIMIT)  # its time runs from here
            searched = planner.find(int(share * planner.baseline.peak_bytes)).plan
            joint.append(row(name, graph, share, JOINT_LIMIT, searched))
            write(layered, joint, arguments.output)


def ops_of(path: Path) -> int:
    return len(json.loads(path.read_text())["nodes"])


def published_graph(path: Path) -> Graph:
    """Returns a graph of MOCCASIN's data set (github.com/haoming-codes/moccasin, folder data), in its stored order."""
    stored = json.loads(path.read_text())
    order = stored["graph"]["order"]
    place = {node: index for index, node in enumerate(order)}
    nodes = [stored["nodes"][node] for node in order]
    edges = [(place[link["0"]], place[link["1"]]) for link in stored["links"]]
    return Graph.from_dag([float(node["duration"]) for node in nodes], [node["out_cost"] for node in nodes], edges)


def row(name: str, graph: Graph, share: float, limit: float, searched: Plan | None) -> Row:
    begun = time.perf_counter()
    found = plan(graph, share, time_limit=limit)
    seconds = time.perf_counter() - begun
    step, budget = graph.step_seconds, found.budget_bytes or 0
    added = found.added_seconds / step if found.peak_bytes <= budget else None
    result = Row(
        name,
        len(graph.ops),
        share,
        searched and searched.added_seconds / step,
        added,
        found.lower_bound_seconds / step,
        found.gap,
        found.peak_bytes / budget,
        found.status.value,
        seconds,
    )
    print(result, flush=True)
    return result


def table(title: str, rows: list[Row], with_search: bool) -> Table:
    result = Table(title=title)
    columns = ["graph", "ops", "budget %", *(["search"] if with_search else []), "added", "bound", "gap", "peak/budget %"]
    for column in (*columns, "status", "seconds"):
        result.add_column(column, justify="left" if column in ("graph", "status") else "right")
    for r in rows:
        searched = [percent(r.searched)] if with_search else []
        figures = (percent(r.budget), *searched, *(percent(x) for x in (r.added, r.bound, r.gap, r.peak)))
        result.add_row(r.graph, str(r.ops), *figures, r.status, f"{r.seconds:.1f}")
    return result


def write(layered: list[Row], joint: list[Row], folder: Path) -> None:
    """Writes any_graph.txt and any_graph.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = {"torch": torch.__version__, "cores": os.cpu_count(), "time limits": LIMITS, "joint time limit": JOINT_LIMIT}
    parts = (
        table("Random layered graphs; added time, bound and gap in % of the graph's seconds", layered, False),
        table("Joint graphs: the search, and improved by annealing and the event-gap model, in % of the step", joint, True),
    )
    with (folder / "any_graph.txt").open("w") as file:
        console = Console(width=120, file=file)
        for part in (", ".join(f"{k}: {v}" for k, v in setup.items()), *parts):
            console.print(part, highlight=False)
    record = setup | {"layered": [asdict(r) for r in layered], "joint": [asdict(r) for r in joint]}
    (folder / "any_graph.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
