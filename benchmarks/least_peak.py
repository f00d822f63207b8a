"""The least peak of a step: what the first moves find, what the search finds below it, and the proven bound.

    python benchmarks/least_peak.py                    # a few minutes
    python benchmarks/least_peak.py --only gpt2 unet
    python benchmarks/least_peak.py --check            # compares with the stored rows; exits 1 if a peak is higher
    python benchmarks/least_peak.py --near             # costs of plans near the least peak; about ten minutes

The models are those of ``plan_hashes.py``, planned for an A100 by name, with Inductor's fusion. RL1 and RL2 are random layered
graphs of one phase, in which any op may run again (``random_layered.py``); the chain is a training step without fusion. Costs
are the added seconds of the plans as shares of the step, and those after the search buy nothing but the least peak.

With `--near`, plans are made for the least peak found, and 3 and 10 % more. Large models are layers of published ones
(``published_tradeoffs.py``), for the cards of their sources.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

os.environ["AUTOREMAT_PROGRESS"] = "0"

import plan_hashes
import published_tradeoffs
import torch
from harness import RESULTS, parser, run, stored, table
from random_layered import WIDTHS, generate
from rich.table import Table

import autoremat
from autoremat import Graph
from autoremat.planner.search.planner import Planner

DEVICE = "A100-40GB"
WORK = 10.0
"""The time limit, in seconds, whose work each search gets."""

TOLERANCE = 1.005
"""By which a least peak may exceed the stored one."""

LAYERED = {"RL1": 100, "RL2": 250}
ABOVE = (0.0, 0.03, 0.1)
"""Shares of the least peak by which budgets near it exceed it."""

LARGE = {
    "llama-8b": published_tradeoffs.Step("H100", 4096, 32, 14336, 1, 8192, 4, gated=True, compiler="inductor"),
    "llama-8b eager": published_tradeoffs.Step("H100", 4096, 32, 14336, 1, 8192, 4, gated=True),
    "gpt-22b": published_tradeoffs.GPT_22B_SHARD,
    "bert-large": replace(published_tradeoffs.BERT_LARGE, layers=6),
}
NAMES = (*plan_hashes.MODELS, "chain", *LAYERED, *LARGE)


@dataclass(frozen=True)
class Row:
    """One graph. Bytes are those of simulated peaks."""

    name: str
    ops: int
    whole_bytes: int
    """Of the step without recomputation."""
    before_bytes: int
    """Of the first moves."""
    found_bytes: int
    bound_bytes: int
    earlier_bound_bytes: int
    """The bound from the working sets and from a few minimum cuts."""
    cost_before: float
    cost_found: float
    search_seconds: float
    """Seconds of the search below these."""
    bound_seconds: float

    @property
    def distance(self) -> float:
        """The share by which the least peak found exceeds the bound."""
        return self.found_bytes / self.bound_bytes - 1.0


@dataclass(frozen=True)
class Near:
    """One graph and budget. Costs are shares of the step."""

    name: str
    ops: int
    above: float
    """Share of the least peak by which the budget exceeds it."""
    found: float
    bound: float


def captured(name: str) -> Graph:
    """Returns the graph of a model's training step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = plan_hashes.MODELS[name]()
    options = {"cost_model": "roofline", "memory_budget": 1.0}
    report = autoremat.explain(model, *inputs, device=DEVICE, lower=False, options=options)
    assert report.plan is not None
    return report.plan.graph


def graph_of(name: str) -> Graph:
    """Returns the graph of that name, without forms of its values."""
    if name in LARGE:
        plan = LARGE[name].reports(memory_budget=1.0).plan
        assert plan is not None
        return replace(plan.graph, values=tuple(replace(value, forms=()) for value in plan.graph.values))
    if name in LAYERED:
        drawn = generate(LAYERED[name], WIDTHS[LAYERED[name]], seed=0)
        return Graph.from_dag(drawn.seconds, drawn.sizes, drawn.edges)
    return plan_hashes.chain() if name == "chain" else captured(name)


def measure(name: str) -> Iterator[Row]:
    graph = graph_of(name)
    yield (of_one_phase if graph.single_phase else of_step)(name, graph)


def of_step(name: str, graph: Graph) -> Row:
    """Returns the row of a training step."""
    planner = Planner(graph, WORK)
    before, earlier = planner.smallest, planner.moments.peak_bytes()
    begun = time.perf_counter()
    bound = earlier
    bounded = time.perf_counter()
    found = planner.lowest
    ended = time.perf_counter()
    found.check()
    step = graph.step_seconds
    return Row(
        name, len(graph.ops), planner.baseline.peak_bytes, before.peak_bytes, found.peak_bytes, bound, earlier,
        before.added_seconds / step, found.added_seconds / step, ended - bounded, bounded - begun,
    )  # fmt: skip


def of_one_phase(name: str, graph: Graph) -> Row:
    """Returns the row of a single-phase graph, of which any op may run again."""
    planner = Planner(graph, WORK)
    bound = planner.moments.peak_bytes()
    before = planner.smallest
    begun = time.perf_counter()
    found = planner.lowest
    ended = time.perf_counter()
    step = sum(op.seconds for op in graph.ops)
    return Row(
        name, len(graph.ops), planner.baseline.peak_bytes, before.peak_bytes, found.peak_bytes, bound, bound,
        before.added_seconds / step, found.added_seconds / step, ended - begun, 0.0,
    )  # fmt: skip


def near(name: str) -> Iterator[Near]:
    """Yields the costs of a graph's plans near its least peak."""
    graph = graph_of(name)
    lowest = Planner(graph).lowest.peak_bytes
    for above in ABOVE:
        budget = int(lowest * (1.0 + above))
        found = Planner(graph).find(budget)
        assert found.plan is not None
        costs = (found.plan.cost_seconds, found.lower_bound_seconds)
        yield Near(name, len(graph.ops), above, *(seconds / graph.step_seconds for seconds in costs))


def cells(row: Row) -> dict[str, object]:
    return {
        "graph": row.name,
        "ops": row.ops,
        "whole": row.whole_bytes,
        "before": row.before_bytes,
        "found": row.found_bytes,
        "less": f"{1 - row.found_bytes / row.before_bytes:.1%}",
        "bound": row.bound_bytes,
        "earlier bound": row.earlier_bound_bytes,
        "distance": f"{row.distance:.2%}",
        "cost before": f"{row.cost_before:.2f}",
        "cost found": f"{row.cost_found:.2f}",
        "search, s": f"{row.search_seconds:.1f}",
        "bound, s": f"{row.bound_seconds:.2f}",
    }


def shown(rows: list[Row]) -> list[Table | str]:
    close = sum(row.distance <= 0.03 for row in rows)
    return [table("Least peaks in bytes", list(map(cells, rows))), f"within 3 % of the bound: {close} of {len(rows)}"]


def shown_near(rows: list[Near]) -> list[Table | str]:
    lines = [
        {"graph": r.name, "ops": r.ops, "above least": f"{r.above:.0%}"}
        | {"found": f"{r.found:.1%}", "bound": f"{r.bound:.1%}"}
        for r in rows
    ]
    return [table("Costs near the least peak", lines)]


def check(names: list[str]) -> int:
    """Prints the graphs whose least peak is higher than the stored one. Returns 1 if there are any, else 0."""
    before = {row.name: row.found_bytes for row in stored("least_peak", RESULTS, Row)}
    worse = 0
    for name in names:
        (row,) = measure(name)
        print(row, flush=True)
        if row.found_bytes > TOLERANCE * before[name]:
            print(f"{name}: {row.found_bytes} bytes, {before[name]} before")
            worse += 1
    print(f"{worse} of {len(names)} least peaks are higher")
    return min(worse, 1)


def main() -> None:
    made = parser(__doc__, NAMES)
    made.add_argument("--check", action="store_true", help="store nothing; exit 1 if a least peak is higher than stored")
    made.add_argument("--near", action="store_true", help="costs of plans near the least peak")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    others = ("chain", *LAYERED) if arguments.near else LARGE
    arguments.only = [name for name in arguments.only if name not in others]
    if arguments.check:
        sys.exit(check(arguments.only))
    if arguments.near:
        run("near_least_peak", arguments, Near, near, shown_near)
    else:
        run("least_peak", arguments, Row, measure, shown)


if __name__ == "__main__":
    main()
