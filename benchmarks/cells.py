"""Measured peaks of many small training steps against their budgets: ops and models x types x layouts x compilers x budgets.

    python benchmarks/cells.py                   # all; goes on where an earlier run ended
    python benchmarks/cells.py --only conv fft   # cases whose names begin so
    python benchmarks/cells.py --fresh           # forgets earlier runs

A cell is *over* if the allocator's events of a warm step exceed a budget that the report says the step fits. Budgets are the
smallest feasible one to the byte, and shares.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cell_cases import CASES
from torch._dynamo.exc import BackendCompilerFailed

import autoremat
from autoremat.basics.errors import AutorematError, BudgetInfeasible

ROOT = Path(__file__).resolve().parent.parent
BUDGETS: tuple[float | str, ...] = (1.0, 0.9, 0.75, "smallest")
COMPILERS = ("aot_eager", "inductor")
SEED = 0


@dataclass(frozen=True)
class Cell:
    """One step under one budget; bytes above those live when the step begins."""

    case: str
    dtype: str
    layout: str
    compiler: str
    budget: str
    result: str
    """"held", "over", "not claimed" (a workspace is unknown), "infeasible", or an error."""
    budget_bytes: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        return self.case, self.dtype, self.layout, self.compiler, self.budget


def cells(prefixes: tuple[str, ...]) -> Iterator[tuple[str, torch.dtype, str, str]]:
    """Yields the cells: case, type, layout and compiler."""
    for name, case in CASES.items():
        if not prefixes or name.startswith(prefixes):
            for dtype in case.dtypes:
                for layout in ("contiguous", "channels last") if case.images else ("contiguous",):
                    for compiler in COMPILERS:
                        yield name, dtype, layout, compiler


def examine(name: str, dtype: torch.dtype, layout: str, compiler: str, budget: float | str) -> Cell:
    """Returns the cell of a step that is compiled and run twice. The second step is measured."""
    place = (name, str(dtype).removeprefix("torch."), layout, compiler, str(budget))
    options: dict[str, Any] = {"compiler": compiler, "cost_model": "roofline"}
    try:
        if budget == "smallest":
            try:
                run(name, dtype, layout, options | {"memory_budget": 1})
            except BackendCompilerFailed as error:
                if not isinstance(error.inner_exception, BudgetInfeasible):
                    raise
                budget = error.inner_exception.minimum_bytes
        measured, report = run(name, dtype, layout, options | {"memory_budget": budget})
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, BudgetInfeasible):
            return Cell(*place, "infeasible", inner.budget_bytes, inner.minimum_bytes)
        return Cell(*place, f"error: {type(inner).__name__}: {str(inner).splitlines()[0][:120]}")
    except (RuntimeError, NotImplementedError, AutorematError, Warning) as error:
        return Cell(*place, f"error: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    asked = report.budget_bytes or 0
    held = "held" if report.fits else "not claimed"
    return Cell(*place, "over" if measured > asked and report.fits else held, asked, report.peak_bytes, measured)


def run(name: str, dtype: torch.dtype, layout: str, options: dict[str, Any]) -> tuple[int, autoremat.Report]:
    """Returns the measured peak of a warm step, and its report."""
    torch.manual_seed(SEED)
    torch._dynamo.reset()
    model, x = CASES[name].build(dtype)
    if layout == "channels last":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    compiled = torch.compile(loss, backend="autoremat", options=options)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with autoremat.track_peak("cpu") as peak:
            compiled(x).backward()
    return peak.bytes, autoremat.reports()[-1]


def load(path: Path) -> list[Cell]:
    return [Cell(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def write(found: list[Cell], path: Path) -> None:
    """Writes the table of all cells."""
    counts = Counter(cell.result.partition(":")[0] for cell in found)
    measured = [cell for cell in found if cell.measured_bytes]
    worst = max((cell.measured_bytes / cell.predicted_bytes for cell in measured), default=0.0)
    lines = [
        f"Measured peaks of steps against their budgets; torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{os.cpu_count()} cores",
        f"cells: {len(found)}, measured: {len(measured)}, {dict(counts)}; largest measured over predicted: {worst:.4f}",
        "",
        f"{'case':<18}{'type':<10}{'layout':<15}{'compiler':<11}{'budget':<10}{'bytes':>10}{'predicted':>11}{'measured':>10}"
        "  result",
    ]
    for c in found:
        lines.append(
            f"{c.case:<18}{c.dtype:<10}{c.layout:<15}{c.compiler:<11}{c.budget:<10}{c.budget_bytes:>10}{c.predicted_bytes:>11}"
            f"{c.measured_bytes:>10}  {c.result}"
        )
    path.write_text("\n".join(lines) + "\n")
    print(lines[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names begin so")
    parser.add_argument("--compilers", nargs="+", default=COMPILERS, choices=COMPILERS)
    parser.add_argument("--fresh", action="store_true", help="forget the cells of earlier runs")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    record = arguments.output / "cells.jsonl"
    if arguments.fresh:
        record.unlink(missing_ok=True)
    found = load(record)
    known = {cell.key for cell in found}
    for name, dtype, layout, compiler in cells(tuple(arguments.only)):
        for budget in BUDGETS if compiler in arguments.compilers else ():
            if (name, str(dtype).removeprefix("torch."), layout, compiler, str(budget)) in known:
                continue
            found.append(examine(name, dtype, layout, compiler, budget))
            print(*found[-1].key, found[-1].result, found[-1].measured_bytes, found[-1].budget_bytes, flush=True)
            with record.open("a") as file:
                file.write(json.dumps(asdict(found[-1])) + "\n")
    write(found, arguments.output / "cells.txt")


if __name__ == "__main__":
    main()
