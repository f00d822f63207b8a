"""Steps of small models with dropout whose saved tensors wait in other forms, on a CPU that stands for a card: all cells, and
many steps.

    python benchmarks/offload_runs.py                   # models x compilers x forms x budgets, then 1,000 steps
    python benchmarks/offload_runs.py --steps 100 --compilers aot_eager

A cell holds if the gradients are those of the step that keeps all saved tensors as they are (bit by bit under `aot_eager`, to
rounding under Inductor), the measured peak is the predicted one but for code headroom, both together are within the budget, the
bytes on the host are within `host_memory`, and the bytes that are moved are those of the plan. The exit code is 1 if a cell
does not hold, or if either memory grows over the steps. Written to `benchmarks/results/offload_runs.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from dataclasses import asdict
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import stays  # noqa: E402
import torch  # noqa: E402
from offload_cells import AMPLE, BUDGETS, MODELS, STORES, Cell, Cells  # noqa: E402

import autoremat  # noqa: E402
from autoremat import host_memory, track_peak  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
COMPILERS = ("aot_eager", "inductor")
COLUMNS = (
    f"{'model':12} {'compiler':9} {'forms':5} {'budget':6} {'bytes':>9} {'predicted':>9} {'headroom':>8} {'measured':>9} "
    f"{'on host':>8} {'moved':>8} {'bits':>4} {'equal':>5} {'holds':>5}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="number of steps over which neither memory may grow")
    parser.add_argument("--compilers", nargs="+", choices=COMPILERS, default=COMPILERS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with stays.small_device():
        cells: list[Cell] = []
        for compiler, model in product(arguments.compilers, MODELS):
            source = Cells(model, compiler)
            for store, budget in product(STORES, BUDGETS):
                cells.append(source.cell(store, budget))
                print(line(cells[-1]), flush=True)
        grown = growth(arguments.steps)
    held = sum(cell.holds for cell in cells)
    text = [__doc__.partition("\n\n    python")[0].replace("\n", " "), "", COLUMNS, *map(line, cells), ""]
    text += [
        f"{held} of {len(cells)} cells hold.",
        f"{arguments.steps} steps: growth in bytes {grown}.",
        f"torch {torch.__version__}",
    ]
    (RESULTS / "offload_runs.txt").write_text("\n".join(text) + "\n")
    (RESULTS / "offload_runs.json").write_text(
        json.dumps({"cells": [asdict(cell) for cell in cells], "growth": grown}, indent=1)
    )
    print("\n".join(text[-3:]))
    return int(held < len(cells) or any(grown.values()))


def line(cell: Cell) -> str:
    """Returns a row of the table."""
    equal = "bits" if cell.equal_bits else "close" if cell.close else "no"
    return (
        f"{cell.model:12} {cell.compiler:9} {cell.store:5} {cell.budget:6} {cell.budget_bytes:9} {cell.peak_bytes:9} "
        f"{cell.headroom_bytes:8} {cell.measured_bytes:9} {cell.held_bytes:8} {cell.to_host_bytes:8} {cell.packed:4} "
        f"{equal:>5} {cell.holds!s:>5}"
    )


def growth(steps: int) -> dict[str, int]:
    """Returns the bytes by which the memory of the device and of the host grows from the third of ``steps`` to the last."""
    model, x = MODELS["gated"]()
    options = {"compiler": "aot_eager", "cost_model": "roofline", "memory_budget": 0.7, "host_memory": AMPLE}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="autoremat", options=options)
    peaks, held, began = [], [], time.perf_counter()
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        if number in (2, steps - 1):
            gc.collect()
            with track_peak("cpu") as peak:
                compiled(x).backward()
            peaks.append(peak.bytes)
            held.append(host_memory.statistics("cpu").held_bytes)
        else:
            compiled(x).backward()
    print(f"{steps} steps of {autoremat.reports()[-1].stored} in {time.perf_counter() - began:.0f} s")
    assert held[0]
    return {"device": peaks[-1] - peaks[0], "host": held[-1] - held[0]}


if __name__ == "__main__":
    sys.exit(main())
