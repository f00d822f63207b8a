"""Each mechanism of the planner and of the backend switched off: the difference that it makes, in one table for each kind.

    python benchmarks/ablation.py planners       # about 15 minutes
    python benchmarks/ablation.py cost_models    # about two minutes
    python benchmarks/ablation.py workarounds    # about twelve minutes
    python benchmarks/ablation.py runs           # about two minutes
    python benchmarks/ablation.py tables         # the tables of what is stored
    python benchmarks/ablation.py planners --fresh --time-limit 10

A run goes on where an earlier one ended. `planners`: the cost over the cheapest plan that any variant found, by the cost model
and the simulator. `cost_models`: the measured plans of costs.json, ranked again. `workarounds`: the peak of the code that
Inductor generates for the plan of one budget, without planning again. `runs`: steps that do run, for the workarounds that save
time or keep gradients right.
"""

from __future__ import annotations

import os

os.environ["AUTOREMAT_PROGRESS"] = "0"

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from ablation_cost_models import Timed, tables_of_cost_models, timings
from ablation_planners import Planned, plannings, tables_of_planners
from ablation_runs import Ran, runs, tables_of_runs
from ablation_shared import RESULTS
from ablation_workarounds import Coded, codes, tables_of_workarounds
from rich.console import Console

import autoremat

TIME_LIMIT = 5.0
"""Seconds of one planning; the default of `autoremat.plan` is 10."""

PROCESSOR = "the processor"

PARTS: dict[str, type[Any]] = {"planners": Planned, "cost_models": Timed, "workarounds": Coded, "runs": Ran}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "tables"])
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run of this part has found")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds of one planning")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    path = arguments.output / "ablation.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    found = {name: [kind(**entry) for entry in record.get(name, ())] for name, kind in PARTS.items()}
    limit = record.get("time limit of one planning", arguments.time_limit)
    clock = record.get("clock", PROCESSOR)
    if arguments.part in PARTS:
        rows = found[arguments.part]
        if arguments.fresh:
            rows.clear()
        if arguments.part == "planners" and not rows:
            limit, clock = arguments.time_limit, PROCESSOR
        known = {row.key: row for row in rows}
        made: dict[str, Callable[[], Iterator[Any]]] = {
            "planners": lambda: plannings(known, limit),
            "cost_models": lambda: timings(known),
            "workarounds": lambda: codes(known),
            "runs": lambda: runs(known),
        }
        for row in made[arguments.part]():
            print(row, flush=True)
            rows.append(row)
            write(found, limit, clock, path)
    write(found, limit, clock, path)
    print(path.with_suffix(".txt").read_text())


def write(found: dict[str, list[Any]], limit: float, clock: str, path: Path) -> None:
    """Writes ablation.json and ablation.txt."""
    setup = {"torch": torch.__version__, "threads": 1, "time limit of one planning": limit, "clock": clock}
    path.write_text(json.dumps(setup | {name: [asdict(row) for row in rows] for name, rows in found.items()}, indent=1) + "\n")
    with path.with_suffix(".txt").open("w") as file:
        console = Console(width=140, file=file)
        console.print(HEAD.format(limit=limit, **setup), highlight=False)
        makers = (tables_of_planners, tables_of_cost_models, tables_of_workarounds, tables_of_runs)
        for make, rows in zip(makers, found.values(), strict=True):
            for table in make(rows) if rows or make is tables_of_cost_models else ():
                console.print(table)


HEAD = """torch {torch}, one thread, processor seconds.
One planning had {limit:g} s of {clock}.
`autoremat.plan` has 10 s by the clock, in which annealing and neighbourhoods do
more. Cells that a run had no time for are in no table. Where the search is within 1 % of its bound (0.1 % on layered graphs)
nothing else runs, and all variants are equal. Budgets of joint graphs lie between the least peak that the search finds and the
peak without recomputation; one of the six lies below, where the search has no plan.
The code's peaks are those of one plan by the roofline's costs: the loop that plans again over a budget is off.
"""


if __name__ == "__main__":
    main()
