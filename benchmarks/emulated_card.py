"""Small models under budgets on the emulated CUDA card of the tests: peaks by plan, by replay and as measured, and gradients.

    python benchmarks/emulated_card.py

The cells are those of the slow tests (`tests/emulated_cuda/steps.py`). They run in a process of their own, because the card
must be there before torch is imported. The exit code is 1 if a measured peak differs from the replayed one, or is over a budget
that holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, parser, table, write
from rich.table import Table

HEAD = """\
Small models under budgets on the emulated CUDA card of the tests: an H100 whose allocator counts as CUDA's and whose kernels
Triton's interpreter runs. Sizes in KiB. "plan": simulated peak, with workspaces of kernels, which the card does not allocate;
"replay": peak of the generated code; "measured": peak of the allocator. "fits": measured within a budget that holds.
Errors: the largest relative error of a gradient, to torch and to the step without a budget. "To torch" is to eager code, and
for ResNet and experts in 16 bits to eager code in float32, because rounding decides signs and the choice of experts.
Budget 0.7: a share of the baseline's peak. Budget "least": one byte, so the smallest plan runs. The same code runs in
`tests/training/test_emulated_cuda.py`.
"""


def run() -> list[dict[str, Any]]:
    """Returns the cells, from a process with the card."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.json"
        # A process must not take the kernels and plans that an earlier one has compiled.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(ROOT / "tests"), str(ROOT))),
            "TRITON_INTERPRET": "1",
            "AUTOREMAT_COST_MODEL": "roofline",
            "AUTOREMAT_PROGRESS": "0",
            "AUTOREMAT_CACHE_DIR": folder,
            "TORCHINDUCTOR_CACHE_DIR": folder,
        }
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "emulated_cuda.write_cells", str(path)],
            env=environment,
            cwd=ROOT,
            check=True,
        )
        found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def agrees(cell: dict[str, Any]) -> bool:
    """Returns True if the measured peak is the replayed one, to the byte."""
    return bool(cell["measured_bytes"] == cell["replayed_bytes"])


def fits(cell: dict[str, Any]) -> bool | None:
    """Returns True if the measured peak is within the budget; None if there is no budget, or if no plan fits."""
    holds = cell["within_budget"] and cell["budget_bytes"] is not None
    return cell["measured_bytes"] <= cell["budget_bytes"] if holds else None


def cells_of(cell: dict[str, Any]) -> dict[str, object]:
    words = {True: "yes", False: "NO", None: "-"}
    sizes = {"plan": "predicted_bytes", "replay": "replayed_bytes", "measured": "measured_bytes"}
    to_torch = cell["error_to_torch"]
    return {
        "model": cell["model"],
        "data type": cell["data_type"],
        "budget": {None: "none", 1: "least"}.get(cell["budget"], cell["budget"]),
        **{column: f"{cell[name] / 1024:.1f}" for column, name in sizes.items()},
        "equal": words[agrees(cell)],
        "fits": words[fits(cell)],
        "recomputed": cell["recomputed_ops"],
        "to torch": "-" if to_torch is None else f"{to_torch:.1e}",
        "to first": f"{cell['error_to_first']:.1e}",
        "bits": words[cell["has_equal_bits"]].lower(),
    }


def shown(cells: list[dict[str, Any]]) -> list[Table | str]:
    bounded = [cell for cell in cells if fits(cell) is not None]
    totals = (
        f"{sum(map(agrees, cells))} of {len(cells)} measured peaks are the replayed ones to the byte; "
        f"{sum(map(bool, map(fits, bounded)))} of {len(bounded)} are within a budget that holds; "
        f"{sum(cell['has_equal_bits'] for cell in cells)} steps have the gradients of the first to the bit."
    )
    return [HEAD, table("Cells", list(map(cells_of, cells))), totals]


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    found = run()
    write("emulated_card", arguments.output, shown(found), found)
    sys.exit(not all(agrees(cell) and fits(cell) is not False for cell in found))
