"""`autoremat.plan` on graphs of one phase.

    python benchmarks/any_graph.py                     # about half an hour
    python benchmarks/any_graph.py --only 100 250 --seeds 0
    python benchmarks/any_graph.py --published FOLDER  # with the files of MOCCASIN's data set, not part of this project

Random layered graphs of the published sizes (see random_layered.py), as shares of the peak of their given order. Times are in %
of the graph's own seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness import parser, percent, run, table
from random_layered import WIDTHS, generate
from rich.table import Table

from autoremat import Graph, plan

SHARES = (0.9, 0.8, 0.7)
LIMITS = {100: 15.0, 250: 15.0, 500: 60.0, 1000: 60.0}
"""Seconds, by number of ops."""


@dataclass(frozen=True)
class Row:
    """One graph at one budget. Times are shares of the graph's seconds, the peak one of the budget."""

    size: str
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


def published_graph(path: Path) -> Graph:
    """Returns a graph of MOCCASIN's data set (github.com/haoming-codes/moccasin, folder data), in its stored order."""
    stored = json.loads(path.read_text())
    order = stored["graph"]["order"]
    place = {node: index for index, node in enumerate(order)}
    nodes = [stored["nodes"][node] for node in order]
    edges = [(place[link["0"]], place[link["1"]]) for link in stored["links"]]
    return Graph.from_dag([float(node["duration"]) for node in nodes], [node["out_cost"] for node in nodes], edges)


def measure(published: Path | None, seeds: list[int], size: str) -> Iterator[Row]:
    """Yields the rows of all graphs of a size."""
    graphs: dict[str, Graph] = {}
    for path in published.glob("random_layered_*.json") if published else ():
        graph = published_graph(path)
        if len(graph.ops) == int(size):
            graphs["published"] = graph
    for seed in seeds:
        drawn = generate(int(size), WIDTHS[int(size)], seed)
        graphs[f"seed {seed}"] = Graph.from_dag(drawn.seconds, drawn.sizes, drawn.edges)
    for name, graph in graphs.items():
        for share in SHARES:
            begun = time.perf_counter()
            found = plan(graph, share, time_limit=LIMITS[int(size)])
            seconds, step, budget = time.perf_counter() - begun, graph.step_seconds, found.budget_bytes or 0
            added = found.added_seconds / step if found.peak_bytes <= budget else None
            bound, peak = found.lower_bound_seconds / step, found.peak_bytes / budget
            yield Row(size, name, len(graph.ops), share, added, bound, found.gap, peak, found.status.value, seconds)


def cells(row: Row) -> dict[str, str]:
    shares = {"budget %": row.budget, "added": row.added, "bound": row.bound, "gap": row.gap, "peak/budget %": row.peak}
    figures = {name: percent(share, 2) for name, share in shares.items()}
    return {"graph": row.graph, "ops": str(row.ops), **figures, "status": row.status, "seconds": f"{row.seconds:.1f}"}


def shown(rows: list[Row]) -> list[Table]:
    return [table("Random layered graphs; added time, bound and gap in % of the graph's seconds", list(map(cells, rows)))]


def main() -> None:
    made = parser(__doc__, map(str, WIDTHS))
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--published", type=Path, help="a folder with the graphs random_layered_*.json of MOCCASIN")
    arguments = made.parse_args()
    run("any_graph", arguments, Row, partial(measure, arguments.published, arguments.seeds), shown)


if __name__ == "__main__":
    main()
