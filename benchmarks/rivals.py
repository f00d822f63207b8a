"""Peak memory and step time of the demo's model: torch's activation budget, checkpointing of each layer, and autoremat.

    python benchmarks/rivals.py            # about a quarter of an hour on two idle cores
    python benchmarks/rivals.py --layers 4 --rounds 1 --repeats 3 --output /tmp/rivals

A step is forward and backward. Every method must hold the parameter gradients at the end, so peaks are also given
above them. Step times say something only on an idle machine: a busy core slows all of them many times over. The speed
of an idle machine drifts within minutes, so every round measures all methods again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch._functorch.config as functorch_config
from rich.console import Console
from rich.table import Table
from torch._dynamo.exc import BackendCompilerFailed

import autoremat
from autoremat.basics.errors import BudgetInfeasible

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import demo_model  # noqa: E402

TORCH_BUDGETS = tuple(tenths / 10 for tenths in range(9, -1, -1))
"""Below 1, which is torch's default and Inductor alone."""

SHARES = (0.9, 0.7, 0.5, 0.4, 0.35, 0.3, 0.25)
"""autoremat's budgets as shares of the peak of Inductor alone; the last two may not be feasible."""

MARGIN_OF_MINIMUM = 1.02
WARM_STEPS = 2


@dataclass(frozen=True)
class Row:
    """One measured method; bytes above those live when the step begins."""

    method: str
    peak_bytes: int
    peak_above_gradients_bytes: int
    seconds: tuple[float, ...]
    """Of each timed step."""
    step_seconds: float
    """Their median."""
    loss: float
    budget_bytes: int | None = None
    predicted_bytes: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=demo_model.FULL.layers)
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all methods")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps for each method in a round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    size = demo_model.CUDA if arguments.device == "cuda" else demo_model.FULL
    bench = Bench(replace(size, layers=arguments.layers), arguments.device, arguments.repeats)
    rows: dict[str, Row] = {}
    for _ in range(arguments.rounds):
        for row in bench.rows():
            print(f"{row.method}: peak {row.peak_bytes / 2**20:.1f} MiB, step {row.step_seconds:.3f} s", flush=True)
            rows[row.method] = joined(rows[row.method], row) if row.method in rows else row
    write(list(rows.values()), bench, arguments.output)


def joined(first: Row, later: Row) -> Row:
    """Returns the row of a method that was measured in two rounds."""
    seconds = first.seconds + later.seconds
    peaks = {name: max(getattr(first, name), getattr(later, name)) for name in ("peak_bytes", "peak_above_gradients_bytes")}
    return replace(first, seconds=seconds, step_seconds=statistics.median(seconds), **peaks)


@dataclass(frozen=True)
class Bench:
    """The model, the device, and the number of timed steps in a round."""

    size: demo_model.ModelSize
    device: str
    repeats: int

    def rows(self) -> Iterator[Row]:
        """Yields the row of every method in turn. Each method compiles a fresh model with the same weights."""
        plain = self.measure("torch budget 1")
        yield plain
        for budget in TORCH_BUDGETS:
            with functorch_config.patch(activation_memory_budget=budget):
                yield self.measure(f"torch budget {budget:g}")
        yield self.measure("checkpoint each layer", checkpoint=True)
        for share in SHARES:
            yield from self.budgeted(f"autoremat {share:.0%} of torch's at 1", int(plain.peak_bytes * share))
        yield from self.budgeted("autoremat, smallest + 2 %", int(self.smallest_peak * MARGIN_OF_MINIMUM))

    @cached_property
    def smallest_peak(self) -> int:
        """Bytes of the minimum peak found."""
        (batch,) = demo_model.token_batches(self.size, 1, self.device)
        return demo_model.smallest_peak(self.size, batch)

    def budgeted(self, method: str, budget: int) -> Iterator[Row]:
        """Yields one row; none, and prints a line, if there is no plan for `budget` bytes."""
        try:
            yield self.measure(method, budget=budget)
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, BudgetInfeasible):
                raise
            print(f"{method}: infeasible, the smallest peak is {error.inner_exception.minimum_bytes / 2**20:.1f} MiB")

    def measure(self, method: str, *, budget: int | None = None, checkpoint: bool = False) -> Row:
        torch._dynamo.reset()
        gc.collect()
        model = demo_model.build_model(self.size, device=self.device)
        if checkpoint:
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # of new and of earlier transformers
            enable = next(getattr(model.model, name) for name in names if hasattr(model.model, name))
            enable({"use_reentrant": False})
        compiled = torch.compile(model)
        if budget is not None:
            compiled = torch.compile(model, backend="autoremat", options={"memory_budget": budget})
        (batch,) = demo_model.token_batches(self.size, 1, self.device)
        tracker = autoremat.track_peak(self.device)
        seconds = []
        for step in range(1 + WARM_STEPS + self.repeats):
            model.zero_grad(set_to_none=True)
            begin = time.perf_counter()
            with tracker if step == WARM_STEPS else contextlib.nullcontext():
                loss = compiled(batch)
                loss.backward()
            final_loss = loss.item()  # waits for the device
            seconds.append(time.perf_counter() - begin)
            del loss
        gradients = sum(parameter.grad.untyped_storage().nbytes() for parameter in model.parameters())
        return Row(
            method=method,
            peak_bytes=tracker.bytes,
            peak_above_gradients_bytes=tracker.bytes - gradients,
            seconds=tuple(seconds[1 + WARM_STEPS :]),
            step_seconds=statistics.median(seconds[1 + WARM_STEPS :]),
            loss=final_loss,
            budget_bytes=budget,
            predicted_bytes=None if budget is None else autoremat.reports()[-1].compiled_peak_bytes,
        )


def lowest(rows: list[Row], prefix: str) -> int:
    return min(row.peak_above_gradients_bytes for row in rows if row.method.startswith(prefix))


def write(rows: list[Row], bench: Bench, folder: Path) -> None:
    """Prints the table and the ratios, and writes them to rivals.txt and rivals.json in `folder`."""
    ours, theirs, checkpoint = (lowest(rows, prefix) for prefix in ("autoremat", "torch", "checkpoint"))
    ratios = {"ours lowest / torch's lowest": ours / theirs, "ours lowest / per-layer checkpoint": ours / checkpoint}
    setup = {
        "torch": torch.__version__,
        "device": bench.device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "size": asdict(bench.size) | {"dtype": str(bench.size.dtype)},
        "timed steps": len(rows[0].seconds),
    }
    table = Table(title="Forward and backward, MiB above the step's start")
    table.add_column("method", no_wrap=True)
    for column in ("budget", "predicted", "peak", "above gradients", "step, s", "to first, x"):
        table.add_column(column, justify="right")
    for row in rows:
        mebibytes = ["" if count is None else f"{count / 2**20:.2f}" for count in (row.budget_bytes, row.predicted_bytes)]
        table.add_row(
            row.method,
            *mebibytes,
            f"{row.peak_bytes / 2**20:.2f}",
            f"{row.peak_above_gradients_bytes / 2**20:.2f}",
            f"{row.step_seconds:.3f}",
            f"{row.step_seconds / rows[0].step_seconds:.2f}",
        )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rivals.txt").open("w") as file:
        for console in (Console(width=120), Console(width=120, file=file)):
            console.print(", ".join(f"{key}: {value}" for key, value in setup.items()), highlight=False)
            console.print(table)
            for name, ratio in ratios.items():
                console.print(f"{name}, peaks above the parameter gradients: {ratio:.3f}", highlight=False)
    record = setup | {"ratios": ratios, "rows": [asdict(row) for row in rows]}
    (folder / "rivals.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
