"""Plans of equal requests in many processes, half of them beside busy ones: are they equal?

    python benchmarks/same_plans.py                            # ten plans of each of six models
    python benchmarks/same_plans.py --only gpt2                # plans this again; rows of other models stay
    python benchmarks/same_plans.py --at-once 2                # two processes plan at a time

Each plan is `autoremat.explain` in a process of its own, with its own seed of hashes, for an H100 by name, at 40 % of the
reference peak. The first half runs alone, the second half beside busy processes. The Llama has 80 layers, so that the work of
`time_limit` ends its search. Seconds are those of planning, and depend on whatever else the machine does: the load at the start
of each process is written beside them. Written to `benchmarks/results/same_plans.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import model_zoo
import torch
from explain_large import busy_processes
from plan_hashes import digest

import autoremat

RESULTS = Path(__file__).resolve().parent / "results"
DEVICE, SHARE = "H100-80GB", 0.4

MODELS: dict[str, Callable[[], model_zoo.Built]] = {
    "gpt2": lambda: model_zoo.gpt2(24),
    "llama": lambda: model_zoo.llama(80),
    "bert": lambda: model_zoo.bert(12),
    "t5": lambda: model_zoo.t5(6),
    "vit": lambda: model_zoo.vit(12),
    "resnet": lambda: model_zoo.resnet("basic", [3, 4, 6, 3]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS), help="some of the models")
    parser.add_argument(
        "--plans", type=int, default=10, help="number of plans of each model, half of them beside busy processes"
    )
    parser.add_argument("--busy", type=int, default=3, help="number of busy processes beside the second half")
    parser.add_argument("--at-once", type=int, default=1, help="number of processes that plan at the same time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--alone", choices=MODELS, help="plans this model in this process and prints the outcome as JSON")
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(planned(arguments.alone)))
        return
    stored = arguments.output / "same_plans.json"
    rows = {row["model"]: row for row in json.loads(stored.read_text())["rows"]} if stored.exists() else {}
    for name in arguments.only:
        with ThreadPoolExecutor(arguments.at_once) as planning:
            alone = list(planning.map(in_a_process, [name] * ((arguments.plans + 1) // 2)))
            with busy_processes(arguments.busy):
                busy = list(planning.map(in_a_process, [name] * (arguments.plans // 2)))
        rows[name] = {"model": name, "busy processes": arguments.busy, "alone": alone, "busy": busy}
        write([rows[model] for model in MODELS if model in rows], arguments.output)


def planned(name: str) -> dict[str, Any]:
    """Returns the plan of a model as a hash, with what the report says of its search."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    options = {"memory_budget": SHARE, "on_infeasible": "best_effort"}
    report = autoremat.explain(model, *inputs, device=DEVICE, lower=False, options=options)
    assert report.plan is not None
    schedule = report.plan.schedule
    return {
        "ops": report.ops,
        "graph": digest([[op.target, op.inputs, op.outputs, op.seconds] for op in report.plan.graph.ops]),
        "plan": digest([report.budget_bytes, schedule.forward, schedule.backward, report.lower_bound_seconds]),
        "ended by": "clock" if report.ended_by_clock else "work" if report.time_limited else "itself",
        "seconds": report.planning_seconds,
    }


def in_a_process(name: str) -> dict[str, Any]:
    """Returns the outcome of a process of its own, with the load of the machine at its start."""
    load = os.getloadavg()[0]
    environment = {**os.environ, "AUTOREMAT_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONHASHSEED", None)
    command = [sys.executable, __file__, "--alone", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome | {"load": round(load, 1)}


def write(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes all rows, as a table and as JSON, and prints the table."""
    heads = ("model", "ops", "plans", "distinct", "ended by", "seconds alone (load)", "seconds busy (load)")
    table = [heads]
    for row in rows:
        alone, busy = row["alone"], row["busy"]
        every = [*alone, *busy]
        ops = "/".join(sorted({f"{one['ops']:,}" for one in every}))
        ends = "/".join(sorted({one["ended by"] for one in every}))
        counts, distinct = f"{len(alone)} + {len(busy)}", f"{plans(alone)} alone, {plans(every)} in all"
        table.append((row["model"], ops, counts, distinct, ends, spent(alone), spent(busy)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        f"torch {torch.__version__}, {os.cpu_count()} cores; beside the second number of plans, {rows[0]['busy processes']} "
        "busy processes ran",
        *("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "same_plans.txt").write_text("\n".join(lines) + "\n")
    setup = {"torch": torch.__version__, "cores": os.cpu_count(), "device": DEVICE, "share": SHARE}
    (folder / "same_plans.json").write_text(json.dumps(setup | {"rows": list(rows)}, indent=1) + "\n")
    print("\n".join(lines), flush=True)


def plans(outcomes: Sequence[dict[str, Any]]) -> int:
    """Returns the number of distinct plans of distinct graphs."""
    return len({(one["graph"], one["plan"]) for one in outcomes})


def spent(outcomes: Sequence[dict[str, Any]]) -> str:
    """Returns the range of the seconds, and that of the load."""
    if not outcomes:
        return "-"
    seconds, loads = [one["seconds"] for one in outcomes], [one["load"] for one in outcomes]
    return f"{min(seconds):.1f} to {max(seconds):.1f} ({min(loads):.0f} to {max(loads):.0f})"


if __name__ == "__main__":
    main()
