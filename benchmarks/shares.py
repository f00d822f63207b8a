"""Shares of the peak without autoremat: measured peaks against those of plain Inductor.

    python benchmarks/shares.py                          # eight models, shares of 0.9, 0.7 and 0.5
    python benchmarks/shares.py --resume                 # goes on from the rows that are there
    python benchmarks/shares.py --models gpt2 --shares 0.7

A cell is *over* if the measured peak exceeds the share of plain Inductor's measured peak by more than two points. Peaks are the
same on a busy machine as on an idle one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lowering import PATIENT, ROOT, build
from rich.console import Console
from rich.table import Table
from torch._dynamo.exc import BackendCompilerFailed

import autoremat
from autoremat.basics.errors import BudgetInfeasible

MODELS = ("llama", "gpt2", "bert", "t5", "vit", "resnet", "unet", "densenet")
SHARES = (0.9, 0.7, 0.5)
TOLERANCE = 0.02
STEPS = 2
"""Steps of which the last is measured: the first one compiles."""

RESULTS = ROOT / "benchmarks" / "results"
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One model under one share; bytes above those live when the step begins."""

    model: str
    share: float
    plain_bytes: int
    """Measured, of Inductor alone."""
    reference_bytes: int
    reference_source: str
    budget_bytes: int
    """The minimum instead, if the budget is infeasible."""
    measured_bytes: int | None
    """None if the budget is infeasible."""

    @property
    def ratio(self) -> float | None:
        return None if self.measured_bytes is None else self.measured_bytes / self.plain_bytes

    @property
    def is_over(self) -> bool:
        return self.ratio is not None and self.ratio > self.share + TOLERANCE


def measured(name: str, backend: str, options: dict[str, Any] | None) -> int:
    """Returns the measured peak of a warm step in bytes."""
    model, inputs = build(name)
    compiled = torch.compile(model, backend=backend, options=options)
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        with autoremat.track_peak() as peak:
            compiled(*inputs).backward()
    return peak.bytes


def rows_of(name: str, shares: list[float]) -> Iterator[Row]:
    plain = measured(name, "inductor", None)
    for share in shares:
        try:
            ours = measured(name, "autoremat", PATIENT | {"memory_budget": share, "cost_model": "roofline"})
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, BudgetInfeasible):
                raise
            budget = error.inner_exception.budget_bytes
            yield Row(name, share, plain, round(budget / share), "", error.inner_exception.minimum_bytes, None)
            continue
        report = autoremat.reports()[-1]
        yield Row(name, share, plain, report.reference_bytes or 0, report.reference_source, report.budget_bytes or 0, ours)


def write(rows: list[Row], models: tuple[str, ...]) -> None:
    """Writes the rows as JSON and as a table."""
    rows = sorted(rows, key=lambda row: (models.index(row.model) if row.model in models else len(models), -row.share))
    (RESULTS / "shares.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    table = Table(title="Peaks of forward and backward, MiB above the step's start")
    columns = ("model", "share", "Inductor alone", "reference", "of", "budget", "measured", "ratio", "at most share + 2 %")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in (0, 4, 8) else "right")
    for row in rows:
        known = row.measured_bytes is not None
        table.add_row(
            row.model, f"{row.share:g}", f"{row.plain_bytes / MIB:.2f}", f"{row.reference_bytes / MIB:.2f}",
            row.reference_source, f"{row.budget_bytes / MIB:.2f}" if known else "infeasible",
            f"{row.measured_bytes / MIB:.2f}" if known else f"least {row.budget_bytes / MIB:.2f}",
            f"{row.ratio:.3f}" if known else "-", "NO" if row.is_over else "yes" if known else "-",
        )  # fmt: skip
    feasible = [row for row in rows if row.measured_bytes is not None]
    with (RESULTS / "shares.txt").open("w") as file:
        console = Console(file=file, width=150)
        console.print(f"torch: {torch.__version__}, threads: {torch.get_num_threads()}")
        console.print(table)
        console.print(f"{len(feasible)} of {len(rows)} cells are feasible, {sum(row.is_over for row in rows)} are over.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    path = RESULTS / "shares.json"
    rows = [Row(**row) for row in json.loads(path.read_text())] if arguments.resume and path.exists() else []
    for name in arguments.models:
        missing = [share for share in arguments.shares if (name, share) not in {(row.model, row.share) for row in rows}]
        for row in rows_of(name, missing) if missing else ():
            rows.append(row)
            write(rows, MODELS)
            print(row, flush=True)


if __name__ == "__main__":
    main()
