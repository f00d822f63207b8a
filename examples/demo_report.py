"""What the demo shows and writes: a table, a JSON file, a picture of the memory over one step, and its verdict."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from demo_model import ModelSize
from rich.console import Console
from rich.table import Table

from autoremat.basics.units import format_bytes

LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Relative: the same arithmetic in other kernels rounds differently, and training amplifies that step by step."""


@dataclass(frozen=True)
class Result:
    """One setting's run. Peaks and budgets: bytes that forward and backward hold above the step's start."""

    key: str
    title: str
    budget_bytes: int | None
    predicted_bytes: int | None
    peak_bytes: int
    step_seconds: float
    compile_seconds: float
    losses: tuple[float, ...]
    timeline: tuple[tuple[float, int], ...]

    @property
    def fits(self) -> bool:
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    def line(self) -> str:
        return (
            f"{self.title}: compiled in {self.compile_seconds:.1f} s, peak {format_bytes(self.peak_bytes)}, "
            f"step {self.step_seconds:.3f} s, loss {self.losses[-1]:.5f}"
        )


def failures(results: Sequence[Result], dtype: torch.dtype) -> list[str]:
    """What went wrong, one sentence each: a peak above its budget, or a loss that is not that of the first result.

    The loss under torch's own budget is only shown: with dropout its gradients are not those of the forward pass.
    """
    problems = []
    tolerance = LOSS_TOLERANCE[dtype]
    expected = results[0].losses[-1]
    for result in results:
        loss = result.losses[-1]
        if not result.fits:
            problems.append(
                f"{result.title}: the measured peak of {result.peak_bytes} bytes ({format_bytes(result.peak_bytes)}) "
                f"is above the budget of {result.budget_bytes} ({format_bytes(result.budget_bytes)})."
            )
        if result.key != "torch" and not abs(loss - expected) <= tolerance * abs(expected):
            problems.append(
                f"{result.title}: the final loss is {loss:.6f}; without a budget it is {expected:.6f} "
                f"(allowed difference: {tolerance:g} of it)."
            )
    return problems


def results_table(results: Sequence[Result]) -> Table:
    table = Table(title="Peak memory of forward and backward above the step's start, MiB")
    table.add_column("setting", no_wrap=True)
    for column in ("budget", "predicted", "measured", "fits", "share", "step", "to first", "final loss"):
        table.add_column(column, justify="right")
    plain = results[0]
    for result in results:
        fits = "" if result.budget_bytes is None else "[green]yes" if result.fits else "[bold red]no"
        table.add_row(
            result.title,
            mebibytes(result.budget_bytes),
            mebibytes(result.predicted_bytes),
            mebibytes(result.peak_bytes),
            fits,
            f"{result.peak_bytes / plain.peak_bytes:.0%}",
            f"{result.step_seconds:.3f} s",
            f"{result.step_seconds / plain.step_seconds:.2f} x",
            f"{result.losses[-1]:.5f}",
        )
    return table


def mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.2f}"


def print_table(results: Sequence[Result], console: Console) -> None:
    console.print(results_table(results))


def write_results(results: Sequence[Result], size: ModelSize, device: str, folder: Path) -> None:
    """Writes table.txt, results.json and memory.png into `folder`, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "table.txt").open("w") as file:
        print_table(results, Console(file=file, width=120))
    settings = [
        {key: value for key, value in asdict(result).items() if key != "timeline"} | {"fits": result.fits} for result in results
    ]
    machine = {"torch": torch.__version__, "device": device, "cores": os.cpu_count()}
    record = machine | {"size": asdict(size) | {"dtype": str(size.dtype)}, "settings": settings}
    (folder / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    draw_memory(results, folder / "memory.png")


def draw_memory(results: Sequence[Result], path: Path) -> None:
    """The memory over the tracked step, a line for each setting; its budget is a dashed line of the same colour."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("The picture needs matplotlib: pip install 'autoremat[examples]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5.5), layout="constrained")
    for result in results:
        seconds, held = zip(*result.timeline, strict=True)
        share_of_step = [100 * second / (seconds[-1] or 1) for second in seconds]
        (line,) = axes.step(share_of_step, [count / 2**20 for count in held], where="post", linewidth=1.3, label=result.title)
        if result.budget_bytes is not None:
            axes.axhline(result.budget_bytes / 2**20, color=line.get_color(), linestyle="--", linewidth=0.9)
    axes.set_xlabel("forward and backward of one step, % of its time")
    axes.set_ylabel("MiB above the step's start")
    axes.set_title("Memory over one training step (dashed: the budgets)")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    # Outside the axes: inside it would cover the descent of some line.
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
