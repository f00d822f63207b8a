"""Costs of plans near the least peak, with and without ruin and recreate of their schedules.

    python benchmarks/near_least_peak.py              # about ten minutes
    python benchmarks/near_least_peak.py --only gpt2 llama-8b    # stores nothing

Small models are those of ``plan_hashes.py``, for an A100 by name, with Inductor's fusion. Large ones are layers of published
models (``published_tradeoffs.py``), for the cards of their sources. Budgets are the least peak found, and 3 and 10 % more.
Costs are those of the cost model as shares of the step, beside the lower bound. Written to
`benchmarks/results/near_least_peak.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import least_peak
import plan_hashes
import published_tradeoffs
import torch

import autoremat
from autoremat.planner.graph.graph import Graph
from autoremat.planner.search.planner import Planner

RESULTS = Path(__file__).resolve().parent / "results" / "near_least_peak.json"
ABOVE = (0.0, 0.03, 0.1)
"""Shares of the least peak by which budgets exceed it."""
LARGE = {
    "llama-8b": published_tradeoffs.Step("H100", 4096, 32, 14336, 1, 8192, 4, gated=True, compiler="inductor"),
    "llama-8b eager": published_tradeoffs.Step("H100", 4096, 32, 14336, 1, 8192, 4, gated=True),
    "gpt-22b": published_tradeoffs.GPT_22B_SHARD,
    "bert-large": replace(published_tradeoffs.BERT_LARGE, layers=6),
}


@dataclass(frozen=True)
class Row:
    """One graph and budget. Costs are shares of the step."""

    name: str
    ops: int
    above: float
    """Share of the least peak by which the budget exceeds it."""
    before: float
    found: float
    bound: float


def graph_of(name: str) -> Graph:
    """Returns the graph of a model's training step, without forms of its values."""
    if name in plan_hashes.MODELS:
        return least_peak.captured(name)
    plan = LARGE[name].reports(memory_budget=1.0).plan
    assert plan is not None
    return replace(plan.graph, values=tuple(replace(value, forms=()) for value in plan.graph.values))


def rows_of(name: str, graph: Graph) -> Iterator[Row]:
    """Yields the rows of a graph."""
    lowest = Planner(graph).lowest.peak_bytes
    for above in ABOVE:
        budget = int(lowest * (1.0 + above))
        before, found = Planner(graph).choose(budget), Planner(graph).find(budget)
        assert before is not None
        assert found.plan is not None
        costs = (before.cost_seconds, found.plan.cost_seconds, found.lower_bound_seconds)
        yield Row(name, len(graph.ops), above, *(seconds / graph.step_seconds for seconds in costs))


def table(rows: list[Row]) -> str:
    """Returns the rows as text, with the mean gain at each distance from the least peak."""
    lines = [f"{'graph':<16}{'ops':>5}{'above least':>13}{'before':>9}{'found':>9}{'bound':>9}"]
    lines += [f"{r.name:<16}{r.ops:>5}{r.above:>13.0%}{r.before:>9.1%}{r.found:>9.1%}{r.bound:>9.1%}" for r in rows]
    for above in ABOVE:
        gains = [row.before - row.found for row in rows if row.above == above]
        if gains:
            lines.append(
                f"{above:.0%} above the least peak: {statistics.mean(gains):.1%} of the step less on average, at most "
                f"{max(gains):.1%}; cheaper in {sum(gain > 1e-4 for gain in gains)} of {len(gains)}"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*plan_hashes.MODELS, *LARGE]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="nothing is stored then")
    chosen = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    rows: list[Row] = []
    for name in chosen:
        rows += rows_of(name, graph_of(name))
        print(table(rows[-len(ABOVE) :]), flush=True)
    if chosen == names:
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        RESULTS.with_suffix(".txt").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
