"""`autoremat.plan` against the exact optimum, on graphs small enough to search through all their plans.

    python benchmarks/optimum.py             # some minutes
    python benchmarks/optimum.py --seeds 2

The optimum is over *all* sequences of executions in which the first runs keep the given order. An op that may run again does so
anywhere, as often as it pays. In a training step that is anywhere in the backward, because the forward runs once. Any value is
freed at any moment. The optimum is a cheapest path (Dijkstra, 1959) from nothing done to all done. A state consists of the live
values and the number of ops that have run. Each graph is planned at five budgets, from the least peak of any plan to just below
the peak without recomputation. Ratios are of the whole time, step and recomputation.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from autoremat import Graph, plan

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = 5
SOLVERS = ("auto", "ilp", "segments", "min_cut", "sqrt", "recompute_all")
Random = np.random.Generator


@dataclass(frozen=True)
class Row:
    """One graph at one budget. Seconds are added to the step's; None: no plan that fits was found."""

    family: str
    seed: int
    ops: int
    budget: float
    """As a share of the peak without recomputation."""
    step: float
    optimum: float
    added: dict[str, float | None]


def training_step(random: Random, length: int, skips: list[tuple[int, int]]) -> Graph:
    """Returns a chain of `length` forward ops with `skips`, and a gradient op for each.

    A gradient op reads the inputs and the result of its forward op.
    """
    count = 2 * length
    forward = {(i, i + 1) for i in range(length - 1)} | set(skips)
    edges = set(forward) | {(length - 1, length)}
    for i in range(length):
        gradient = count - 1 - i
        edges |= {(i, gradient)} | {(a, gradient) for a, b in forward if b == i}
        edges |= {(count - 1 - b, gradient) for a, b in forward if a == i}
    edges = {(a, b) for a, b in edges if a < b}
    sizes = random.integers(1, 10, count)
    return Graph.from_dag(
        random.uniform(1, 10, count).tolist(), sizes.tolist(), sorted(edges), outputs=[count - 1], num_forward=length
    )


def chain(random: Random) -> Graph:
    return training_step(random, 7, [])


def residual(random: Random) -> Graph:
    return training_step(random, 7, [(0, 2), (2, 4), (4, 6)])


def unet(random: Random) -> Graph:
    return training_step(random, 7, [(0, 6), (1, 5), (2, 4)])


def dense(random: Random) -> Graph:
    return training_step(random, 6, [(a, b) for a in range(6) for b in range(a + 2, 6)])


def single_phase(random: Random) -> Graph:
    """Returns a chain with skips between random ops, all of which may run again."""
    count = 12
    pairs = random.integers(0, count, (count, 2))
    edges = {(i, i + 1) for i in range(count - 1)} | {(int(min(p)), int(max(p))) for p in pairs if p[0] != p[1]}
    return Graph.from_dag(random.uniform(1, 10, count).tolist(), random.integers(1, 10, count).tolist(), sorted(edges))


FAMILIES: dict[str, Callable[[Random], Graph]] = {f.__name__: f for f in (chain, residual, unet, dense, single_phase)}


def cheapest(graph: Graph, budget: int) -> float:
    """Returns the least seconds that any plan within `budget` bytes adds; infinite if there is none.

    Values are bits. A value is freed at once when no op is left that reads it and it is no output.
    """
    ops, end = graph.ops, len(graph.ops)
    made = [sum(1 << v for v in op.outputs) for op in ops]
    read = [sum(1 << v for v in graph.computed_inputs[i]) for i in range(end)]
    size = [value.bytes for value in graph.values]
    rematerializable = [op.rematerializable and op.forward for op in ops]
    begins = 0 if graph.single_phase else graph.num_forward  # of the part in which ops run again
    outputs = sum(1 << v for v in {*graph.forward_outputs, *graph.backward_outputs})
    distance = {(0, 0): 0.0}
    queue = [(0.0, 0, 0)]
    while queue:
        seconds, done, alive = heapq.heappop(queue)
        if seconds > distance[alive, done]:
            continue
        if done == end and alive & outputs == outputs:
            return seconds
        used = sum(size[v] for v in range(len(size)) if alive >> v & 1)
        moves = [(seconds, done, alive & ~(1 << v)) for v in range(len(size)) if alive >> v & 1]
        for index in range(min(done + 1, end)):
            again = index < done
            may_run_again = rematerializable[index] and made[index] & ~alive and done >= begins
            if (again and not may_run_again) or read[index] & ~alive:
                continue
            fresh = made[index] & ~alive
            if used + sum(size[v] for v in ops[index].outputs if fresh >> v & 1) <= budget:
                moves.append((seconds + again * ops[index].seconds, max(done, index + 1), alive | made[index]))
        for move in moves:
            key = (move[2], move[1])
            if move[0] < distance.get(key, math.inf):
                distance[key] = move[0]
                heapq.heappush(queue, move)
    return math.inf


def least_peak(graph: Graph, peak: int) -> int:
    """Returns the least bytes that some plan needs. A plan without recomputation needs `peak`."""
    return bisect.bisect_left(range(peak), True, key=lambda budget: not math.isinf(cheapest(graph, budget)))


def rows_of(family: str, seed: int) -> list[Row]:
    graph = FAMILIES[family](np.random.default_rng(seed))
    peak = plan(graph, solver="save_all").peak_bytes
    rows = []
    least = least_peak(graph, peak)
    for budget in sorted({*np.linspace(least, peak - 1, BUDGETS).astype(int).tolist()} if least < peak else ()):
        optimum = cheapest(graph, budget)
        found = {solver: plan(graph, budget, solver) for solver in SOLVERS}
        added = {s: p.added_seconds if p.peak_bytes <= budget else None for s, p in found.items()}
        if any(a is not None and a < optimum - 1e-9 for a in added.values()):
            raise RuntimeError(f"{family}, seed {seed}, {budget} bytes: a plan is better than the optimum")
        rows.append(Row(family, seed, len(graph.ops), budget / peak, graph.step_seconds, optimum, added))
    return rows


def ratios(rows: list[Row], solver: str) -> list[float]:
    """Returns the ratios of whole times to the optimum, where the solver found a plan that fits."""
    return [(r.step + a) / (r.step + r.optimum) for r in rows if (a := r.added[solver]) is not None]


def table_of(rows: list[Row]) -> Table:
    table = Table(title="Whole time (step and recomputation) over that of the exact optimum")
    for column in ("graphs", "solver"):
        table.add_column(column)
    for column in ("cases", "optimal", "geometric mean", "worst", "no plan"):
        table.add_column(column, justify="right")
    for family in (*FAMILIES, "all"):
        of_family = [row for row in rows if family in ("all", row.family)]
        for solver in SOLVERS if of_family else ():
            found = ratios(of_family, solver)
            mean, worst = (f"{x:.4f}" for x in (np.exp(np.mean(np.log(found))), max(found))) if found else ("-", "-")
            optimal = sum(ratio < 1 + 1e-9 for ratio in found)
            table.add_row(family, solver, *map(str, (len(of_family), optimal, mean, worst, len(of_family) - len(found))))
    return table


def write(rows: list[Row], folder: Path) -> None:
    """Writes optimum.txt and optimum.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "optimum.txt").open("w") as file:
        for console in (Console(width=100), Console(width=100, file=file)):
            console.print(table_of(rows))
    (folder / "optimum.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--strategies", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for family in arguments.strategies:
        for seed in range(arguments.seeds):
            rows += rows_of(family, seed)
            print(f"{family}, seed {seed}: {len(rows)} cases", flush=True)
    write(rows, arguments.output)


if __name__ == "__main__":
    main()
