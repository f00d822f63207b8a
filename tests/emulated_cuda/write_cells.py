"""Runs all cells of the small models and writes them as JSON: `python -m emulated_cuda.write_cells FILE`, on the card."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from emulated_cuda import card

if __name__ == "__main__":
    card.install()
    from emulated_cuda.small_models import MODELS
    from emulated_cuda.steps import ROUNDING, cells_of_model

    cells = []
    for name in MODELS:
        for dtype in ROUNDING:
            for cell in cells_of_model(name, dtype):
                print(cell, flush=True)
                cells.append(dataclasses.asdict(cell))
    Path(sys.argv[1]).write_text(json.dumps(cells, indent=1) + "\n")
