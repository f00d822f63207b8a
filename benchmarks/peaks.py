"""Planned, post-fusion and measured peaks of many models under many budgets, compiled by Inductor.

    python benchmarks/peaks.py                         # nine models, six budgets each
    python benchmarks/peaks.py --resume                # goes on from the rows that are there
    python benchmarks/peaks.py --lowered               # without kernels, and so without measuring

Budgets lie between the smallest peak and the peak without a budget, both by the simulator. "Planned" is the simulated peak of a
plan before any correction: that of the first attempt is held against the code made of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from harness import measured_peak, mebibytes, parser, percent, run, table, training_step
from lowering import BUILDERS, KINDS, PATIENT, Device, Watch, build, lowered, planned, uncached, watching
from rich.table import Table

import autoremat
from autoremat.basics.errors import BudgetInfeasible, find_cause

SHARES = (0.0, 0.15, 0.3, 0.5, 0.7, 0.9)
"""Budgets, as shares of the way from 3 % above the smallest peak to the peak without a budget."""

MARGIN_OF_MINIMUM = 1.03


@dataclass(frozen=True)
class Row:
    """One model under one budget; bytes above those live when the step begins."""

    model: str
    budget_bytes: int
    first_planned_bytes: int
    """The simulated peak with code headroom, for the first attempt."""
    first_code_bytes: int
    """Post-fusion, of the first attempt; of its half that is over the budget, if there is one."""
    code_bytes: int
    """Post-fusion, of the code that runs."""
    measured_bytes: int | None
    attempts: int
    overhead: float
    """Predicted recomputation as a share of the step."""
    """Why the rest of the budget is not used."""

    @property
    def best_known_bytes(self) -> int:
        return self.code_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def used(self) -> float:
        return self.best_known_bytes / self.budget_bytes

    @property
    def planned_error(self) -> float:
        return self.first_planned_bytes / self.first_code_bytes - 1

    @property
    def code_error(self) -> float:
        return 0.0 if self.measured_bytes is None else self.code_bytes / self.measured_bytes - 1


def measure(is_lowered: bool, name: str) -> Iterator[Row]:
    """Yields one row per budget, the tightest first."""
    report = planned(name)
    least, most = (peak + report.code_headroom_bytes for peak in (report.minimum_peak_bytes, report.predicted_peak_bytes))
    least *= MARGIN_OF_MINIMUM
    for share in SHARES:
        budget = int(least + share * (most - least))
        try:
            yield budgeted(name, budget, is_lowered)
        except Exception as error:
            if (infeasible := find_cause(error, BudgetInfeasible)) is None:
                raise
            yield budgeted(name, int(infeasible.minimum_bytes * MARGIN_OF_MINIMUM), is_lowered)


def budgeted(name: str, budget: int, is_lowered: bool) -> Row:
    watch, measured = (lowered(name, memory_budget=budget), None) if is_lowered else compiled(name, budget)
    report = watch.report if is_lowered else autoremat.reports()[-1]
    first, last = watch.attempts[0], watch.attempts[-1]
    return Row(
        model=name,
        budget_bytes=budget,
        first_planned_bytes=first.planned_bytes,
        first_code_bytes=first.code_bytes,
        code_bytes=last.code_bytes,
        measured_bytes=measured,
        attempts=len(watch.attempts),
        overhead=report.recompute_seconds / report.step_seconds,
    )


def compiled(name: str, budget: int) -> tuple[Watch, int]:
    """Returns the compiled attempts, and the measured peak of the third step."""
    model, inputs = build(name)
    step = training_step(model, inputs, backend="autoremat", options=PATIENT | {"memory_budget": budget})
    with uncached(), watching(kernels=True) as watch:
        for _ in range(2):
            step()
    return watch, measured_peak(step, model, device=Device.chosen)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the figures that a change must not make worse."""
    planned = [abs(row.planned_error) for row in rows]
    return {
        "cells": len(rows),
        "over the budget": sum(row.best_known_bytes > row.budget_bytes for row in rows),
        "post-fusion against measured, worst": max(abs(row.code_error) for row in rows),
        "planned against post-fusion, worst": max(planned),
        "planned against post-fusion, median": statistics.median(planned),
        "budget used, least": min(row.used for row in rows),
        "cells that use less than 90 % of the budget": sum(row.used < 0.9 for row in rows),
    }


def cells(row: Row) -> dict[str, str]:
    is_measured = row.measured_bytes is not None
    return {
        "model": row.model,
        "budget": mebibytes(row.budget_bytes),
        "planned": mebibytes(row.first_planned_bytes),
        "its code": mebibytes(row.first_code_bytes),
        "planned, error %": percent(row.planned_error),
        "final code": mebibytes(row.code_bytes),
        "measured": mebibytes(row.measured_bytes),
        "code, error %": percent(row.code_error) if is_measured else "-",
        "used %": percent(row.used, 0),
        "attempts": str(row.attempts),
        "added %": percent(row.overhead),
    }


def shown(rows: list[Row]) -> list[Table | str]:
    lines = [f"{key}: {value:.4g}" for key, value in summary(rows).items()]
    return [table("Peaks of forward and backward, MiB above the step's start", list(map(cells, rows))), *lines]


def main() -> None:
    made = parser(__doc__, {**KINDS, **BUILDERS})
    made.set_defaults(only=list(KINDS))
    made.add_argument("--lowered", action="store_true", help="generate code, but compile and run nothing")
    arguments = made.parse_args()
    run("peaks", arguments, Row, partial(measure, arguments.lowered), shown)


if __name__ == "__main__":
    main()
