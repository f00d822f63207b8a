"""Planned, post-fusion and measured peaks of many models under many budgets, compiled by Inductor.

    python benchmarks/peaks.py                         # nine models, six budgets each
    python benchmarks/peaks.py --resume                # goes on from the rows that are there
    python benchmarks/peaks.py --lowered               # without kernels, and so without measuring
    python benchmarks/peaks.py --models unet --times   # with step times, which say something only on an idle machine
    python benchmarks/peaks.py --monotone llama-12     # post-fusion peaks over twelve budgets, and torch's over twelve
    python benchmarks/peaks.py --no-budget             # post-fusion peaks without a budget against Inductor alone

Budgets lie between the smallest peak and the peak without a budget, both by the simulator. "Planned" is the simulated peak of a
plan before any correction: that of the first attempt is held against the code made of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lowering import (
    BUILDERS,
    KINDS,
    PATIENT,
    ROOT,
    Device,
    Watch,
    build,
    lowered,
    plain_peak,
    planned,
    smallest,
    uncached,
    watching,
)
from rich.console import Console
from rich.table import Table
from torch._dynamo.exc import BackendCompilerFailed

import autoremat
from autoremat.basics.errors import BudgetInfeasible

SHARES = (0.0, 0.15, 0.3, 0.5, 0.7, 0.9)
"""Budgets, as shares of the way from 3 % above the smallest peak to the peak without a budget."""

MONOTONE_BUDGETS = 12
MARGIN_OF_MINIMUM = 1.03
TIMED_STEPS, WARM_STEPS = 9, 2


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
    why_not_more: str
    """Why the rest of the budget is not used."""
    step_seconds: float | None = None
    plain_step_seconds: float | None = None

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

    @property
    def slowdown(self) -> float | None:
        """Measured, against Inductor alone. None if the steps were not timed."""
        return self.step_seconds / self.plain_step_seconds - 1 if self.step_seconds and self.plain_step_seconds else None


@dataclass(frozen=True)
class Setting:
    """The measurements for each budget beside the generated code."""

    measured: bool = True
    times: bool = False


def rows_of(name: str, setting: Setting, known: Sequence[Row]) -> Iterator[Row]:
    """Yields one row per budget, the tightest first. Those in ``known`` are taken from there."""
    report = planned(name)
    least, most = (peak + report.code_headroom_bytes for peak in (report.minimum_peak_bytes, report.predicted_peak_bytes))
    least *= MARGIN_OF_MINIMUM
    plain = step_seconds(name) if setting.times else None
    for number, share in enumerate(SHARES):
        if number < len(known):
            yield known[number]
            continue
        budget = int(least + share * (most - least))
        try:
            yield budgeted(name, budget, setting, plain)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, BudgetInfeasible):
                raise
            yield budgeted(name, int(error.inner_exception.minimum_bytes * MARGIN_OF_MINIMUM), setting, plain)


def budgeted(name: str, budget: int, setting: Setting, plain_seconds: float | None) -> Row:
    measured, seconds = None, None
    if setting.measured:
        watch, measured, seconds = measure(name, setting.times, memory_budget=budget)
        report = autoremat.reports()[-1]
    else:
        watch = lowered(name, memory_budget=budget)
        report = watch.report
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
        why_not_more=report.room_left_because,
        step_seconds=seconds,
        plain_step_seconds=plain_seconds,
    )


def measure(name: str, times: bool, **options: Any) -> tuple[Watch, int, float | None]:
    """Returns the compiled attempts, the measured peak of the third step, and the median step time if wanted."""
    model, inputs = build(name)
    gc.collect()
    compiled = torch.compile(model, backend="autoremat", options=PATIENT | options)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(*inputs).backward()

    with uncached(), watching(kernels=True) as watch:
        for _ in range(WARM_STEPS):
            step()
    model.zero_grad(set_to_none=True)
    with autoremat.track_peak(Device.chosen) as peak:
        step()
    return watch, peak.bytes, median_seconds(step) if times else None


def median_seconds(step: Callable[[], None]) -> float:
    samples = []
    for _ in range(TIMED_STEPS):
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def synchronize() -> None:
    """Waits until the device has done all work that it was given."""
    if Device.chosen.type == "cuda":
        torch.cuda.synchronize()


def step_seconds(name: str) -> float:
    """Returns the median step time of Inductor alone."""
    model, inputs = build(name)
    compiled = torch.compile(model)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(*inputs).backward()

    for _ in range(WARM_STEPS):
        step()
    return median_seconds(step)


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
        "of these without a reason": sum(row.used < 0.9 and not row.why_not_more for row in rows),
    }


def table_of(rows: Sequence[Row]) -> Table:
    times = any(row.slowdown is not None for row in rows)
    table = Table(title="Peaks of forward and backward, MiB above the step's start")
    table.add_column("model", no_wrap=True)
    columns = ["budget", "planned", "its code", "error %", "final code", "measured", "error %", "used %", "attempts",
               "added %"]  # fmt: skip
    for column in [*columns, *(["measured %"] if times else [])]:
        table.add_column(column, justify="right")
    table.add_column("why not more")
    for row in rows:
        cells = [
            mebibytes(row.budget_bytes),
            mebibytes(row.first_planned_bytes),
            mebibytes(row.first_code_bytes),
            f"{row.planned_error:.1%}".rstrip("%"),
            mebibytes(row.code_bytes),
            "" if row.measured_bytes is None else mebibytes(row.measured_bytes),
            "" if row.measured_bytes is None else f"{row.code_error:.1%}".rstrip("%"),
            f"{100 * row.used:.0f}",
            str(row.attempts),
            f"{100 * row.overhead:.1f}",
        ]
        if times:
            cells.append("" if row.slowdown is None else f"{100 * row.slowdown:.1f}")
        table.add_row(row.model, *cells, row.why_not_more)
    return table


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f}"


def write(name: str, shown: Sequence[Any], record: dict[str, Any], folder: Path) -> None:
    """Prints ``shown``, and writes it to ``name``.txt and the record to ``name``.json in ``folder``."""
    setup = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if Device.chosen.type == "cuda":
        setup["device"] = torch.cuda.get_device_name()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.txt").open("w") as file:
        for console in (Console(width=150), Console(width=150, file=file)):
            console.print(", ".join(f"{key}: {value}" for key, value in setup.items()), highlight=False)
            for part in shown:
                console.print(part, highlight=False)
    (folder / f"{name}.json").write_text(json.dumps(setup | record, indent=2) + "\n")


def sweep(names: Sequence[str], setting: Setting, folder: Path, resume: bool, title: str = "peaks") -> None:
    """Writes all rows of the models to ``title``.txt and ``title``.json in ``folder``. Rows of other models stay there."""
    path = folder / f"{title}.json"
    stored = [Row(**fields) for fields in json.loads(path.read_text())["rows"]] if path.exists() else []
    rows = [row for row in stored if row.model not in names]
    order = list(dict.fromkeys([*(row.model for row in stored), *names]))
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        there = [row for row in stored if row.model == name and resume]
        for row in there if len(there) == len(SHARES) else rows_of(name, setting, there):
            print(row, flush=True)
            rows.append(row)
            path.write_text(json.dumps({"rows": [asdict(r) for r in rows]}))
    rows.sort(key=lambda row: order.index(row.model))
    figures = summary(rows)
    lines = "\n".join(f"{key}: {value:.4g}" for key, value in figures.items())
    write(title, [table_of(rows), lines], {"summary": figures, "rows": [asdict(r) for r in rows]}, folder)


def monotone(name: str, folder: Path) -> None:
    """Writes the peaks for twelve budgets, evenly from the smallest peak to the peak without a budget.

    Torch's twelve budgets are shares of saved bytes.
    """
    free = lowered(name)
    least, most = int(smallest(name).attempts[-1].code_bytes * MARGIN_OF_MINIMUM), free.attempts[-1].code_bytes
    budgets = [least + (most - least) * i // (MONOTONE_BUDGETS - 1) for i in range(MONOTONE_BUDGETS)]
    ours, theirs = [], []
    for i, budget in enumerate(budgets):
        ours.append(lowered(name, memory_budget=budget).attempts[-1].code_bytes)
        theirs.append(plain_peak(name, free.known, activation_memory_budget=(i + 1) / MONOTONE_BUDGETS))
        print(f"{name}: budget {mebibytes(budget)}, peak {mebibytes(ours[-1])}, torch {mebibytes(theirs[-1])}", flush=True)
    table = Table(title=f"{name}: post-fusion peaks, MiB")
    for column in ("budget", "autoremat", "torch's budget", "torch"):
        table.add_column(column, justify="right")
    for i, budget in enumerate(budgets):
        share = f"{(i + 1) / MONOTONE_BUDGETS:.2f}"
        table.add_row(mebibytes(budget), mebibytes(ours[i]), share, mebibytes(theirs[i]))
    falls = {"ours": falls_in(ours), "torch": falls_in(theirs)}
    record = {"model": name, "budgets": budgets, "ours": ours, "torch": theirs, "falls": falls}
    text = f"the peak falls as the budget grows: autoremat {falls['ours']} times, torch {falls['torch']} times"
    write(f"peaks_{name}", [table, text], record, folder)


def falls_in(peaks: Sequence[int]) -> int:
    return sum(larger < smaller for smaller, larger in pairwise(peaks))


def without_budget(names: Sequence[str], folder: Path) -> None:
    """Writes our peaks without a budget against those of Inductor alone."""
    table = Table(title="Post-fusion peaks without a budget, MiB")
    for column in ("model", "Inductor alone", "autoremat", "ratio", "recomputed, % of the step"):
        table.add_column(column, justify="left" if column == "model" else "right")
    record = {}
    for name in names:
        watch = lowered(name)
        ours, plain = watch.attempts[-1].code_bytes, plain_peak(name, watch.known)
        overhead = watch.report.recompute_seconds / watch.report.step_seconds
        record[name] = {"inductor": plain, "autoremat": ours, "recomputed": overhead}
        print(name, record[name], flush=True)
        table.add_row(name, mebibytes(plain), mebibytes(ours), f"{ours / plain:.3f}", f"{100 * overhead:.2f}")
    write("peaks_no_budget", [table], {"peaks": record}, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(BUILDERS), default=list(KINDS))
    parser.add_argument("--resume", action="store_true", help="keep the rows that the output has")
    parser.add_argument("--lowered", action="store_true", help="generate code, but compile and run nothing")
    parser.add_argument("--times", action="store_true", help="also time the steps")
    parser.add_argument("--monotone", nargs="+", metavar="MODEL", choices=sorted(BUILDERS))
    parser.add_argument("--no-budget", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.no_budget:
        without_budget(arguments.models, arguments.output)
    elif arguments.monotone:
        for name in arguments.monotone:
            monotone(name, arguments.output)
    else:
        sweep(arguments.models, Setting(not arguments.lowered, arguments.times), arguments.output, arguments.resume)


if __name__ == "__main__":
    main()
