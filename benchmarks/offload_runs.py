"""Steps of small models with dropout whose saved tensors wait in other forms, on a CPU that stands for a card: all cells, and
many steps.

    python benchmarks/offload_runs.py                   # models x compilers x forms x budgets, then 1,000 steps
    python benchmarks/offload_runs.py --steps 100 --only "gated aot_eager"

A cell holds if the gradients are those of the step that keeps all saved tensors as they are (bit by bit under `aot_eager`, to
rounding under Inductor), the measured peak is the predicted one but for code headroom, both together are within the budget, the
bytes on the host are within `host_memory`, and the bytes that are moved are those of the plan. The exit code is 1 if a cell
does not hold, or if either memory grows over the steps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from harness import ROOT, measured_peak, parser, run, table
from rich.table import Table

from autoremat.host_memory.links import link_of

sys.path.insert(0, str(ROOT / "tests"))
import stays  # noqa: E402
from offload_cells import AMPLE, BUDGETS, MODELS, STORES, Cells  # noqa: E402

CASES = {f"{model} {compiler}": (model, compiler) for compiler in ("aot_eager", "inductor") for model in MODELS}
COLUMNS = {
    "store": "forms", "budget": "budget", "budget_bytes": "bytes", "peak_bytes": "predicted", "headroom_bytes": "headroom",
    "measured_bytes": "measured", "held_bytes": "on host", "to_host_bytes": "moved", "packed": "bits", "equal_bits": "equal",
    "close": "close", "holds": "holds",
}  # fmt: skip


def measure(case: str) -> Iterator[dict[str, Any]]:
    source = Cells(*CASES[case])
    for store, budget in product(STORES, BUDGETS):
        cell = source.cell(store, budget)
        yield {"case": case} | asdict(cell) | {"holds": cell.holds}


def shown(rows: list[dict[str, Any]]) -> list[Table | str]:
    lines = [{"case": row["case"]} | {column: row[key] for key, column in COLUMNS.items()} for row in rows]
    return [table("Cells", lines), f"{sum(row['holds'] for row in rows)} of {len(rows)} cells hold."]


def growth(steps: int) -> dict[str, int]:
    """Returns the bytes by which the memory of the device and of the host grows from the third of ``steps`` to the last."""
    model, x = MODELS["gated"]()
    options = {"compiler": "aot_eager", "cost_model": "roofline", "memory_budget": 0.7, "host_memory": AMPLE}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="autoremat", options=options)
    peaks, held = [], []
    for number in range(steps):
        model.zero_grad(set_to_none=True)
        if number in (2, steps - 1):
            peaks.append(measured_peak(lambda: compiled(x).backward(), model))
            held.append(link_of(torch.device("cpu")).pool.held_bytes)
        else:
            compiled(x).backward()
    assert held[0]
    return {"device": peaks[-1] - peaks[0], "host": held[-1] - held[0]}


def main() -> int:
    made = parser(__doc__, CASES)
    made.add_argument("--steps", type=int, default=1000, help="number of steps over which neither memory may grow")
    arguments = made.parse_args()
    warnings.simplefilter("ignore")
    with stays.small_device():
        grown = growth(arguments.steps)
        text = f"{arguments.steps} steps: growth in bytes {grown}."
        rows = run("offload_runs", arguments, dict, measure, lambda rows: [*shown(rows), text])
    return int(not all(row["holds"] for row in rows) or any(grown.values()))


if __name__ == "__main__":
    sys.exit(main())
