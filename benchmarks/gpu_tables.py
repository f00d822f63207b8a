"""Prints the tables of a file of rows: `python benchmarks/gpu_tables.py gpu-results/rows.jsonl`. It needs no device."""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_duels
import gpu_offload
import gpu_peaks
import gpu_rates
from gpu_rows import Rows
from rich.console import Console


def main() -> None:
    rows, console = Rows(Path(sys.argv[1])), Console(width=220, highlight=False)
    for line in rows.lines():
        if "machine" in line:
            console.print(", ".join(f"{key} {value}" for key, value in line["machine"].items()))
    if found := rows.rows("rates"):
        console.print(gpu_rates.table_of(found), gpu_rates.verdict(found))
    for mode in gpu_peaks.MODES:
        if found := rows.rows(mode):
            console.print(gpu_peaks.table_of(mode, found), gpu_peaks.verdict(found))
    if found := rows.rows("offload"):
        console.print(gpu_offload.table_of(found), gpu_offload.verdict(found))
    if found := rows.rows("duels"):
        console.print(gpu_duels.table_of(found), gpu_duels.verdict(found))


if __name__ == "__main__":
    main()
