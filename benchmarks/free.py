"""Measured peaks of budgets of time that cost nothing, beside those of Inductor alone.

    python benchmarks/free.py                          # twelve models, some 20 minutes on two cores
    python benchmarks/free.py --models gpt2-12 vit-8   # measures these again; rows of other models stay

Each model is compiled by Inductor alone, with `max_slowdown=0` and with `max_slowdown="free"`. Peaks are bytes above those live
when a step begins, so a busy machine measures the same. Predicted slow-downs are beside the plan without a budget. Written to
`benchmarks/results/free.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import model_zoo
import slowdown
import torch
from rich.console import Console
from rich.table import Table
from slowdown import Bench, mebibytes

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = slowdown.MODELS | {
    "gpt2-12": lambda: model_zoo.gpt2(12),
    "bert-12": lambda: model_zoo.bert(12),
    "vit-8": lambda: model_zoo.vit(8),
    "resnet-50": lambda: model_zoo.resnet("bottleneck", [3, 4, 6, 3]),
    "vgg-11": model_zoo.vgg11,
    "dit-2": lambda: model_zoo.diffusion_transformer(2),
}
ALONE, ASKED = "Inductor alone", (0.0, "free")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    slowdown.MODELS = MODELS
    slowdown.prepare()
    stored = arguments.output / "free.json"
    rows: dict[str, Any] = json.loads(stored.read_text())["rows"] if stored.exists() else {}
    for name in arguments.models:
        rows[name] = measured(name)
        write({model: rows[model] for model in MODELS if model in rows}, arguments.output)


def measured(name: str) -> dict[str, dict[str, float | None]]:
    """Returns, for each plan of a model, its measured peak in bytes and its predicted slow-down."""
    bench = Bench(name, rounds=0)
    bench.add(ALONE)
    for asked in ASKED:
        bench.add(str(asked), max_slowdown=asked)
    for step in bench.steps.values():
        step()
    return {
        method: {
            "peak": bench.peak(step),
            "slowdown": bench.reports[method].slowdown if method in bench.reports else None,
        }
        for method, step in bench.steps.items()
    }


def write(rows: dict[str, Any], folder: Path) -> None:
    """Writes and prints the table."""
    table = Table(title="Measured peaks in MiB")
    table.add_column("model")
    for column in (ALONE, *(f"max_slowdown={asked!r}" for asked in ASKED), "predicted, %"):
        table.add_column(column, justify="right")
    for model, row in rows.items():
        peaks = [mebibytes(row[str(method)]["peak"]) for method in (ALONE, *ASKED)]
        table.add_row(model, *peaks, f"{100 * row['free']['slowdown']:.1f}")
    highest = [max(row[str(asked)]["peak"] for asked in ASKED) for row in rows.values()]
    kept = sum(peak <= row[ALONE]["peak"] for peak, row in zip(highest, rows.values(), strict=True))
    with (folder / "free.txt").open("w") as file:
        for console in (Console(width=100), Console(width=100, file=file)):
            console.print(table)
            console.print(f"models whose peaks are no higher than Inductor's: {kept} of {len(rows)}", highlight=False)
    (folder / "free.json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
