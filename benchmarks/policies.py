"""Hand-made policies against the planner at the same peak: predicted and measured peaks, predicted and measured time.

    python benchmarks/policies.py                  # one Llama and one GPT-2 of 12 layers
    python benchmarks/policies.py --only llama-4   # a quick look
    python benchmarks/policies.py --inner inductor # compiled; takes as many minutes as there are rows

Each policy is compiled alone and is the plan. Then the planner gets the policy's predicted peak as its budget. Peaks are
forward and backward above the step's start. *Recomputed* is the recomputation's seconds by the cost model. *Cost* adds the
traffic of saved tensors; plans are chosen by it. Both are shares of the step without recomputation. Step times are medians over
rounds in which every row takes one step, and say something only on an idle machine.
"""

from __future__ import annotations

import gc
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import model_zoo
import torch
import torch._dynamo.config as dynamo_config
from harness import in_turn, measured_peak, mebibytes, parser, run, table, training_step
from rich.table import Table

import autoremat

MODELS = ("llama-12", "gpt2-12", "llama-4", "gpt2-4")
SIZES = {"HIDDEN": 256, "BATCH": 4, "LENGTH": 256}
"""Constants of `model_zoo`: in its own sizes a step is mostly the time of calls."""

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


class Bench:
    """One model: every row is compiled and measured, then all take steps in turn."""

    def __init__(self, name: str, inner: str) -> None:
        torch._dynamo.reset()
        gc.collect()
        self.name, self.inner = name, inner
        self.steps: dict[str, Callable[[], None]] = {}

    def rows(self, repeats: int) -> Iterator[Row]:
        rows = [self.measure("no recomputation", save=["*"])]
        for policy in policies(int(self.name.rpartition("-")[2])):
            rows.append(self.measure(policy, policy=policy))
            rows.append(self.measure(f"  planner at {policy}", memory_budget=rows[-1].predicted_bytes))
        samples = in_turn(self.steps, repeats)
        for row in rows:
            yield replace(row, step_seconds=statistics.median(samples[row.method]))

    def measure(self, method: str, **options: Any) -> Row:
        torch.manual_seed(0)
        model, inputs = model_zoo.MODELS[self.name]()
        options = {"compiler": self.inner, "time_limit": TIME_LIMIT, **options}
        step = training_step(model, inputs, backend="autoremat", options=options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", autoremat.ConstraintWarning)
            step()
        notes = [str(w.message) for w in caught if issubclass(w.category, autoremat.ConstraintWarning)]
        report = autoremat.reports()[-1]
        self.steps[method] = step
        plan = report.plan
        assert plan is not None
        predicted = report.predicted_peak_bytes if report.compiled_peak_bytes is None else report.compiled_peak_bytes
        shares = (report.recompute_seconds / report.step_seconds, plan.cost_seconds / report.step_seconds)
        peak = measured_peak(step, model)
        return Row(self.name, method, predicted, peak, report.saved_bytes, *shares, math.nan, "; ".join(notes))


def cells(row: Row) -> dict[str, str]:
    return {
        "method": row.method,
        "predicted": mebibytes(row.predicted_bytes),
        "measured": mebibytes(row.measured_bytes),
        "saved": mebibytes(row.saved_bytes),
        "recomputed": f"{row.recomputed:.1%}",
        "cost": f"{row.cost:.1%}",
        "step, ms": f"{row.step_seconds * 1e3:.1f}",
        "note": row.note,
    }


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


def shown(rows: list[Row]) -> list[Table | str]:
    names = dict.fromkeys(row.model for row in rows)
    title = "MiB above the step's start; shares of the step"
    tables = [table(f"{name}: {title}", [cells(row) for row in rows if row.model == name]) for name in names]
    return [*tables, verdict(rows)]


def main() -> None:
    made = parser(__doc__, MODELS)
    made.set_defaults(only=list(MODELS[:2]))
    made.add_argument("--inner", choices=("aot_eager", "inductor"), default="aot_eager")
    made.add_argument("--repeats", type=int, default=11, help="timed steps for each row")
    arguments = made.parse_args()
    for constant, size in SIZES.items():
        setattr(model_zoo, constant, size)
    dynamo_config.recompile_limit = dynamo_config.accumulated_recompile_limit = 1000  # one code object for all rows
    setup = {"compiler": arguments.inner, "timed steps": arguments.repeats}
    run("policies", arguments, Row, lambda name: Bench(name, arguments.inner).rows(arguments.repeats), shown, **setup)


if __name__ == "__main__":
    main()
