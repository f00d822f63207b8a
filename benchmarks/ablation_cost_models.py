"""The ablation of cost models: the measured plans of costs.json, ranked by each, and the seconds of a first explanation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cost_scores
from ablation_shared import RESULTS, mean
from rich.table import Table

from autoremat.options.options import COST_MODELS

TIMED = ("gpt2",)


@dataclass(frozen=True)
class Timed:
    """Seconds until a model's step is planned, in a process that has measured nothing yet."""

    model: str
    cost_model: str
    first: float
    again: float
    """The seconds for the same step in another process, which finds the measurements of the first in the cache."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.cost_model


def explained_in(model: str, cost_model: str, folder: str) -> float:
    """Returns the seconds of an explanation in a process of its own."""
    code = (
        "import time, lowering, autoremat\n"
        f"model, inputs = lowering.build({model!r})\n"
        "begun = time.perf_counter()\n"
        f"autoremat.explain(model, *inputs, options={{'cost_model': {cost_model!r}, 'memory_budget': 0.7}})\n"
        "print('seconds', time.perf_counter() - begun)"
    )
    environment = os.environ | {"AUTOREMAT_CACHE_DIR": folder}
    here = str(Path(__file__).resolve().parent)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=here, env=environment, check=True, capture_output=True, text=True
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def timings(known: dict[tuple[str, ...], Timed]) -> Iterator[Timed]:
    for model in TIMED:
        for cost_model in COST_MODELS:
            if (model, cost_model) not in known:
                with tempfile.TemporaryDirectory() as folder:
                    first, again = (explained_in(model, cost_model, folder) for _ in range(2))
                yield Timed(model, cost_model, first, again)


def regrets(rows: list[cost_scores.Row], cost_model: str) -> list[float]:
    """Returns, for each measured peak, the regret of a cost model as a share of a step.

    The regret is the time of the plan that the cost model takes above that of the fastest plan within that peak.
    """
    found = []
    for limit in rows:
        within = [row for row in rows if row.model == limit.model and row.peak_bytes <= limit.peak_bytes]
        chosen = min(within, key=lambda row: row.predicted[cost_model])
        found.append(chosen.step_seconds / min(row.step_seconds for row in within) - 1)
    return found


def tables_of_cost_models(rows: list[Timed]) -> Iterator[Table]:
    measured = [cost_scores.Row(**entry) for entry in json.loads((RESULTS / "costs.json").read_text())["rows"]]
    scores = cost_scores.scores(measured)
    table = Table(title=f"Cost models on {len(measured)} measured plans (costs.json), and the seconds of the first explanation")
    columns = (
        "cost model",
        "median error, % of the step",
        "pairs ranked rightly",
        "slower than the fastest, mean %",
        "worst %",
    )
    for column in (*columns, *(f"{model}: {when}" for model in TIMED for when in ("first s", "again s"))):
        table.add_column(column, justify="left" if column == "cost model" else "right")
    for name in measured[0].predicted:
        score, lost = scores.get(name), [100 * regret for regret in regrets(measured, name)]
        if score is not None:
            ranked = f"{100 * (score.ranked_rightly or 0):.1f} % of {score.pairs}"
            timed = {row.model: row for row in rows if row.cost_model == name}
            seconds = [f"{x:.1f}" for model in TIMED if model in timed for x in (timed[model].first, timed[model].again)]
            table.add_row(name, f"{100 * score.median_error:.1f}", ranked, mean(lost), f"{max(lost):.1f}", *seconds)
    yield table
