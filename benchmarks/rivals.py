"""Peak memory and step time of the demo's model: torch's activation budget, checkpointing of each layer, and autoremat.

    python benchmarks/rivals.py            # about a quarter of an hour on two idle cores
    python benchmarks/rivals.py --layers 4 --rounds 3 --output /tmp/rivals

A step is forward and backward. Every method must hold the parameter gradients at the end, so peaks are also given above them.
All methods run in turn, because the speed of an idle machine drifts within minutes. Step times say something only there: a
busy core slows all of them many times over.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from harness import ROOT, in_turn, measured_peak, mebibytes, parser, table, training_step, write
from lowering import inductor_alone

import autoremat
from autoremat.basics.errors import BudgetInfeasible, find_cause

sys.path.insert(0, str(ROOT / "examples"))
import demo_model  # noqa: E402

TORCH_BUDGETS = tuple(tenths / 10 for tenths in range(10, -1, -1))
"""1 is torch's default and Inductor alone."""

SHARES = (0.9, 0.7, 0.5, 0.4, 0.35, 0.3, 0.25)
"""autoremat's budgets as shares of the peak of Inductor alone; the last two may not be feasible."""

MARGIN_OF_MINIMUM = 1.02


@dataclass(frozen=True)
class Row:
    """One measured method; bytes above those live when the step begins."""

    method: str
    peak_bytes: int
    peak_above_gradients_bytes: int
    seconds: list[float]
    """Of each timed step."""
    budget_bytes: int | None = None
    predicted_bytes: int | None = None

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    """The methods: each has compiled a model of its own with the same weights."""

    def __init__(self, size: demo_model.ModelSize, device: str) -> None:
        self.size, self.device = size, device
        (self.batch,) = demo_model.token_batches(size, 1, device)
        self.steps: dict[str, Callable[[], None]] = {}
        self.rows: list[Row] = []

    def add(self, method: str, checkpoint: bool = False, budget: int | None = None, **options: Any) -> None:
        """Compiles a method and measures its peak. Prints a line if there is no plan for ``budget``."""
        model = demo_model.build_model(self.size, device=self.device)
        if checkpoint:
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # of new and of earlier transformers
            enable = next(getattr(model.model, name) for name in names if hasattr(model.model, name))
            enable({"use_reentrant": False})
        step = training_step(model, (self.batch,), **options or {"backend": inductor_alone()})
        try:
            for _ in range(2):
                step()
        except Exception as error:
            if (infeasible := find_cause(error, BudgetInfeasible)) is None:
                raise
            print(f"{method}: infeasible, the smallest peak is {mebibytes(infeasible.minimum_bytes)} MiB")
            return
        predicted = autoremat.reports()[-1].compiled_peak_bytes if options else None
        peak = measured_peak(step, model, device=self.device)
        gradients = sum(parameter.grad.untyped_storage().nbytes() for parameter in model.parameters())
        self.steps[method] = step
        self.rows.append(Row(method, peak, peak - gradients, [], budget, predicted))
        print(self.rows[-1], flush=True)

    def add_all(self) -> None:
        for budget in TORCH_BUDGETS:
            with functorch_config.patch(activation_memory_budget=budget):
                self.add(f"torch budget {budget:g}")
        self.add("checkpoint each layer", checkpoint=True)
        plain = self.rows[0].peak_bytes
        budgets = {f"autoremat {share:.0%} of torch's at 1": int(plain * share) for share in SHARES}
        smallest = demo_model.smallest_peak(self.size, self.batch)
        budgets["autoremat, smallest + 2 %"] = int(smallest * MARGIN_OF_MINIMUM)
        for method, budget in budgets.items():
            self.add(method, budget=budget, backend="autoremat", options={"memory_budget": budget})


def cells(row: Row, first: Row) -> dict[str, str]:
    sizes = (row.budget_bytes, row.predicted_bytes, row.peak_bytes, row.peak_above_gradients_bytes)
    names = ("budget", "predicted", "peak", "above gradients")
    seconds = {"step, s": f"{row.step_seconds:.3f}", "to first, x": f"{row.step_seconds / first.step_seconds:.2f}"}
    return {"method": row.method, **dict(zip(names, map(mebibytes, sizes), strict=True)), **seconds}


def ratio(rows: list[Row], other: str) -> float:
    """Returns our lowest peak above the gradients over the lowest of another kind of method."""
    ours, theirs = (
        min(row.peak_above_gradients_bytes for row in rows if row.method.startswith(kind)) for kind in ("autoremat", other)
    )
    return ours / theirs


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--layers", type=int, default=demo_model.FULL.layers)
    made.add_argument("--rounds", type=int, default=15, help="timed steps of each method")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = made.parse_args()
    dynamo_config.recompile_limit = dynamo_config.accumulated_recompile_limit = 10_000  # each method compiles one code object
    size = demo_model.CUDA if arguments.device == "cuda" else demo_model.FULL
    bench = Bench(replace(size, layers=arguments.layers), arguments.device)
    bench.add_all()
    seconds = in_turn(bench.steps, arguments.rounds)
    rows = [replace(row, seconds=seconds[row.method]) for row in bench.rows]
    shown = [table("Forward and backward, MiB above the step's start", [cells(row, rows[0]) for row in rows])]
    for other in ("torch", "checkpoint"):
        shown.append(f"ours lowest / {other}'s lowest, peaks above the parameter gradients: {ratio(rows, other):.3f}")
    size = asdict(bench.size) | {"dtype": str(bench.size.dtype)}
    write("rivals", arguments.output, shown, rows, device=bench.device, size=size, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
