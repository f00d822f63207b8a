"""`autoremat.plan` on graphs of one phase.

    python benchmarks/any_graph.py                     # about half an hour
    python benchmarks/any_graph.py --sizes 100 250 --seeds 0
    python benchmarks/any_graph.py --published FOLDER  # with the files of MOCCASIN's data set, not part of this project

Random layered graphs of the published sizes (see random_layered.py), as shares of the peak of their given order. Times are in %
of the graph's own seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from random_layered import WIDTHS, generate
from rich.console import Console
from rich.table import Table

from autoremat import Graph, plan

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.9, 0.8, 0.7)
LIMITS = {100: 15.0, 250: 15.0, 500: 60.0, 1000: 60.0}
"""Seconds, by number of ops."""


@dataclass(frozen=True)
class Row:
    """One graph at one budget. Times are shares of the graph's seconds, the peak one of the budget."""

    graph: str
    ops: int
    budget: float
    added: float | None
    """None where nothing fits."""
    bound: float
    gap: float
    peak: float
    status: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", type=int, choices=list(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--published", type=Path, help="a folder with the graphs random_layered_*.json of MOCCASIN")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    layered: list[Row] = []
    for path in sorted(arguments.published.glob("random_layered_*.json"), key=ops_of) if arguments.published else ():
        graph = published_graph(path)
        for share in SHARES:
            layered.append(row("published", graph, share, LIMITS[len(graph.ops)]))
            write(layered, arguments.output)
    for size in arguments.sizes:
        for seed in arguments.seeds:
            drawn = generate(size, WIDTHS[size], seed)
            graph = Graph.from_dag(drawn.seconds, drawn.sizes, drawn.edges)
            for share in SHARES:
                layered.append(row(f"seed {seed}", graph, share, LIMITS[size]))
                write(layered, arguments.output)


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


def row(name: str, graph: Graph, share: float, limit: float) -> Row:
    begun = time.perf_counter()
    found = plan(graph, share, time_limit=limit)
    seconds = time.perf_counter() - begun
    step, budget = graph.step_seconds, found.budget_bytes or 0
    added = found.added_seconds / step if found.peak_bytes <= budget else None
    result = Row(
        name,
        len(graph.ops),
        share,
        added,
        found.lower_bound_seconds / step,
        found.gap,
        found.peak_bytes / budget,
        found.status.value,
        seconds,
    )
    print(result, flush=True)
    return result


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def table(rows: list[Row]) -> Table:
    result = Table(title="Random layered graphs; added time, bound and gap in % of the graph's seconds")
    for column in ("graph", "ops", "budget %", "added", "bound", "gap", "peak/budget %", "status", "seconds"):
        result.add_column(column, justify="left" if column in ("graph", "status") else "right")
    for r in rows:
        figures = (percent(x) for x in (r.budget, r.added, r.bound, r.gap, r.peak))
        result.add_row(r.graph, str(r.ops), *figures, r.status, f"{r.seconds:.1f}")
    return result


def write(layered: list[Row], folder: Path) -> None:
    """Writes any_graph.txt and any_graph.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = {"torch": torch.__version__, "cores": os.cpu_count(), "time limits": LIMITS}
    with (folder / "any_graph.txt").open("w") as file:
        console = Console(width=120, file=file)
        for part in (", ".join(f"{k}: {v}" for k, v in setup.items()), table(layered)):
            console.print(part, highlight=False)
    record = setup | {"layered": [asdict(r) for r in layered]}
    (folder / "any_graph.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
