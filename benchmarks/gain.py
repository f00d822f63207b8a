"""What a model gains: plain Inductor, torch's own budget, checkpoints of all blocks and autoremat at their peak, side by side.

    python benchmarks/gain.py

Measures nothing: it reads what `costs.py` (a CPU) and `make gpu` (an H100) have measured. Prints the rows of docs/results.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def of_a_cpu() -> list[str]:
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in json.loads((RESULTS / "costs.json").read_text())["rows"]:
        rows.setdefault(row["model"], {})[row["method"]] = row
    return [line(f"{model}, CPU", methods) for model, methods in rows.items() if "checkpoint" in methods]


def line(name: str, methods: dict[str, dict[str, Any]]) -> str:
    plain = methods["plain"]

    def cell(row: dict[str, Any]) -> str:
        return f"{row['peak_bytes'] / plain['peak_bytes']:.0%}, {row['step_seconds'] / plain['step_seconds']:.2f}"

    lowest = min((row for method, row in methods.items() if method.startswith("torch")), key=lambda row: row["peak_bytes"])
    mib = f"{plain['peak_bytes'] / 2**20:.0f} MiB, {plain['step_seconds'] * 1e3:.0f} ms"
    return f"| {name} | {mib} | {cell(lowest)} | {cell(methods['checkpoint'])} | {cell(methods['autoremat as checkpoint'])} |"


def main() -> None:
    print("| model | plain Inductor | torch's lowest | checkpoints | autoremat |\n|---|---|---|---|---|")
    print("\n".join(of_a_cpu()))


if __name__ == "__main__":
    main()
