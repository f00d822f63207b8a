"""Hand-made policies against the planner at the same peak: predicted and measured peaks, predicted and measured time.

    python benchmarks/policies.py                  # one Llama and one GPT-2 of 12 layers
    python benchmarks/policies.py --quick          # of 4 layers
    python benchmarks/policies.py --inner inductor # compiled; takes as many minutes as there are rows

Each policy is compiled alone and is the plan. Then the planner gets the policy's predicted peak as its budget. Peaks are
forward and backward above the step's start. *Recomputed* is the recomputation's seconds by the cost model. *Cost* adds the
traffic of saved tensors; plans are chosen by it. Both are shares of the step without recomputation. Step times are medians over
rounds in which every row takes one step, and say something only on an idle machine. `load` in the heading is the load average
of the machine when the run began.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import model_zoo
import torch
import torch._dynamo.config as dynamo_config
from model_zoo import MODELS
from rich.console import Console
from rich.table import Table

import autoremat

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("llama", "gpt2")
SIZES = {"HIDDEN": 256, "BATCH": 4, "LENGTH": 256}
"""Constants of `model_zoo`, unless it is to be quick: in its own sizes a step is mostly the time of calls."""

WARM_STEPS = 2
TIME_LIMIT = 600.0
"""Seconds that one planning may take: no plan is to depend on how busy the machine is."""


@dataclass(frozen=True)
class Row:
    """A policy, or the planner at the peak of one. Times without a unit are shares of the step without recomputation."""

    model: str
    method: str
    predicted_bytes: int
    measured_bytes: int
    saved_bytes: int
    recomputed: float
    cost: float
    step_seconds: float
    note: str = ""


def policies(layers: int) -> list[str]:
    half = layers // 2
    found = (
        "full", "uniform:2", f"uniform:{half}", f"block:{half}", f"block:{layers - 1}", "sqrt", "segments:4", "selective",
        "selective:mlp", "selective:layernorm", "selective:core_attn,mlp,layernorm",
    )  # fmt: skip
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="models of 4 layers")
    parser.add_argument("--inner", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--repeats", type=int, default=11, help="timed steps for each row")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    layers = 4 if arguments.quick else 12
    for constant, size in ({} if arguments.quick else SIZES).items():
        setattr(model_zoo, constant, size)
    dynamo_config.recompile_limit = 1000  # one code object is compiled once for each row
    dynamo_config.accumulated_recompile_limit = 1000
    setup = {
        "torch": torch.__version__,
        "compiler": arguments.inner,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "timed steps": arguments.repeats,
    }
    rows: list[Row] = []
    for family in FAMILIES:
        torch._dynamo.reset()
        gc.collect()
        rows += Bench(f"{family}-{layers}", arguments.inner, arguments.repeats).rows(layers)
    write(rows, setup, arguments.output)


@dataclass
class Bench:
    """One model: every row is compiled and measured, then all take steps in turn."""

    name: str
    inner: str
    repeats: int

    def __post_init__(self) -> None:
        self.steps: list[Callable[[], object]] = []

    def rows(self, layers: int) -> list[Row]:
        rows = []
        for row in self.untimed_rows(layers):
            print(f"{row.model} {row.method}: {row.measured_bytes / 2**20:.2f} MiB, cost {row.cost:.1%}", flush=True)
            rows.append(row)
        return [replace(row, step_seconds=seconds) for row, seconds in zip(rows, self.timed(), strict=True)]

    def untimed_rows(self, layers: int) -> Iterator[Row]:
        yield self.measure("no recomputation", save=["*"])
        for policy in policies(layers):
            by_hand = self.measure(policy, policy=policy)
            yield by_hand
            yield self.measure(f"  planner at {policy}", memory_budget=by_hand.predicted_bytes)

    def measure(self, method: str, **options: Any) -> Row:
        torch.manual_seed(0)
        model, inputs = MODELS[self.name]()
        compiled = torch.compile(
            model, backend="autoremat", options={"compiler": self.inner, "time_limit": TIME_LIMIT, **options}
        )

        def step() -> None:
            model.zero_grad(set_to_none=True)
            compiled(*inputs).backward()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", autoremat.ConstraintWarning)
            step()
        notes = [str(w.message) for w in caught if issubclass(w.category, autoremat.ConstraintWarning)]
        report = autoremat.reports()[-1]
        model.zero_grad(set_to_none=True)
        with autoremat.track_peak("cpu") as tracker:
            compiled(*inputs).backward()
        self.steps.append(step)
        plan = report.plan
        assert plan is not None
        predicted = report.predicted_peak_bytes if report.compiled_peak_bytes is None else report.compiled_peak_bytes
        return Row(
            self.name, method, predicted, tracker.bytes, report.saved_bytes, report.recompute_seconds / report.step_seconds,
            plan.cost_seconds / report.step_seconds, math.nan, "; ".join(notes),
        )  # fmt: skip

    def timed(self) -> list[float]:
        """Returns the median seconds of each row's step."""
        samples: list[list[float]] = [[] for _ in self.steps]
        for turn in range(WARM_STEPS + self.repeats):
            for step, seconds in zip(self.steps, samples, strict=True):
                begin = time.perf_counter()
                step()
                if turn >= WARM_STEPS:
                    seconds.append(time.perf_counter() - begin)
        return [statistics.median(seconds) for seconds in samples]


def write(rows: list[Row], setup: dict[str, Any], folder: Path) -> None:
    """Prints the table and writes it to policies.txt and policies.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "policies.txt").open("w") as file:
        for console in (Console(width=120), Console(width=120, file=file)):
            console.print(", ".join(f"{key}: {value}" for key, value in setup.items()), highlight=False)
            for name in dict.fromkeys(row.model for row in rows):
                console.print(table_of(name, [row for row in rows if row.model == name]))
            for number, note in enumerate(notes_of(rows), 1):
                console.print(f"({number}) {note}", highlight=False)
            console.print(verdict(rows), highlight=False)
    record = setup | {"rows": [asdict(row) for row in rows]}
    (folder / "policies.json").write_text(json.dumps(record, indent=2) + "\n")


def notes_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.note for row in rows if row.note))


def table_of(name: str, rows: list[Row]) -> Table:
    table = Table(title=f"{name}: MiB above the step's start; shares of the step", title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in ("predicted", "measured", "saved", "recomputed", "cost", "step, ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        sizes = [f"{size / 2**20:.2f}" for size in (row.predicted_bytes, row.measured_bytes, row.saved_bytes)]
        mark = f" ({notes_of(rows).index(row.note) + 1})" if row.note else ""
        table.add_row(
            row.method + mark, *sizes, f"{row.recomputed:.1%}", f"{row.cost:.1%}", f"{row.step_seconds * 1e3:.1f}"
        )  # fmt: skip
    return table


def verdict(rows: list[Row]) -> str:
    """Returns the comparison of the planner with policies at the same peaks, in words."""
    pairs = [(a, b) for a, b in zip(rows, rows[1:], strict=False) if b.method.startswith("  planner")]
    dearer = [f"{b.model} {b.method.strip()}" for a, b in pairs if b.cost > a.cost * (1 + 1e-9)]
    larger = [f"{b.model} {b.method.strip()}" for a, b in pairs if b.measured_bytes > a.predicted_bytes]
    saved = statistics.median(a.cost - b.cost for a, b in pairs)
    ratios = sorted(b.step_seconds / a.step_seconds for a, b in pairs)
    return (
        f"At the peaks of {len(pairs)} policies the planner's cost is higher {len(dearer)} times, its measured peak "
        f"{len(larger)} times; the median saving is {saved:.1%} of the step. Measured steps, planner to policy: median "
        f"{statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}. {' '.join(dearer + larger)}".strip()
    )


if __name__ == "__main__":
    sys.exit(main())
