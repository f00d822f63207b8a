"""What the demo shows and writes: a table, a JSON file, a picture of the memory over one step, and its verdict."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from demo_model import ModelSize
from rich.console import Console
from rich.table import Table

from autoremat.basics.units import format_bytes

LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Relative: the same arithmetic in other kernels rounds differently, and training amplifies that step by step."""

BUSY_SHARE = 0.05
"""Share of the timed steps that threads wait for a processor, above which the machine counts as busy."""


def run_delays() -> dict[str, float]:
    """Seconds for which each thread of this process has waited for a processor; empty where the system counts none.

    Linux counts them (https://docs.kernel.org/scheduler/sched-stats.html).
    """
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[task.name] = int((task / "schedstat").read_text().split()[1]) * 1e-9
    return found


def longest_delay(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """The largest increase of the run delay of one thread, in seconds."""
    return max((seconds - before.get(task, 0.0) for task, seconds in after.items()), default=0.0)


@dataclass(frozen=True)
class Timing:
    """The seconds of a step, and those of them in which one of its threads waited for a processor."""

    seconds: float
    delay: float


@dataclass(frozen=True)
class Result:
    """One setting's run. Peaks and budgets: bytes that forward and backward hold above the step's start."""

    key: str
    title: str
    budget_bytes: int | None
    predicted_bytes: int | None
    peak_bytes: int
    compile_seconds: float
    timings: tuple[Timing, ...]
    """Of one step in each round. In a round every setting takes one step."""
    losses: tuple[float, ...]
    timeline: tuple[tuple[float, int], ...]

    @property
    def fits(self) -> bool:
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True)
class Times:
    """Step times of all settings in the quieter half of the rounds."""

    results: Sequence[Result]

    @property
    def rounds(self) -> list[int]:
        """Numbers of the rounds in which threads waited least for a processor."""
        count = len(self.results[0].timings)
        delays = [sum(result.timings[number].delay for result in self.results) for number in range(count)]
        return sorted(sorted(range(count), key=delays.__getitem__)[: (count + 1) // 2])

    @property
    def busy_share(self) -> float:
        """Share of the step times in which a thread waited because other programs ran."""
        timings = [result.timings[number] for result in self.results for number in self.rounds]
        return sum(one.delay for one in timings) / sum(one.seconds for one in timings)

    def seconds(self, result: Result) -> float:
        return statistics.median(result.timings[number].seconds for number in self.rounds)

    def ratios(self, result: Result) -> list[float]:
        """Step times over those of the first setting in the same rounds, from the least."""
        plain = self.results[0].timings
        return sorted(result.timings[number].seconds / plain[number].seconds for number in self.rounds)

    def error(self, result: Result) -> float:
        """The largest deviation of a round's ratio from the median, which is the ratio in the table."""
        ratios = self.ratios(result)
        return max(ratios[-1] - statistics.median(ratios), statistics.median(ratios) - ratios[0])

    def caption(self) -> str:
        """What the step times are, and how far to trust them."""
        text = (
            f"Step times are medians of {len(self.rounds)} rounds, in which the settings take one step each in turn. "
            "± is the largest deviation in a round."
        )
        if self.busy_share <= BUSY_SHARE:
            return text
        worst = max(self.error(result) for result in self.results)
        return (
            f"{text} The machine was busy: for {self.busy_share:.0%} of their time, these steps waited for a processor that "
            f"other programs used. The ratios may err by {worst:.2f}; run the demo on an idle machine for better ones."
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
    times = Times(results)
    title = "Peak memory of forward and backward above the step's start, MiB"
    table = Table(title=title, caption=times.caption(), caption_justify="left")
    table.add_column("setting", no_wrap=True)
    for column in ("budget", "predicted", "measured", "fits", "share", "step", "to first", "final loss"):
        table.add_column(column, justify="right")
    for result in results:
        fits = "" if result.budget_bytes is None else "[green]yes" if result.fits else "[bold red]no"
        ratio = f"{statistics.median(times.ratios(result)):.2f}"
        table.add_row(
            result.title,
            mebibytes(result.budget_bytes),
            mebibytes(result.predicted_bytes),
            mebibytes(result.peak_bytes),
            fits,
            f"{result.peak_bytes / results[0].peak_bytes:.0%}",
            f"{times.seconds(result):.3f} s",
            f"{ratio} x" if result is results[0] else f"{ratio} ± {times.error(result):.2f} x",
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
    times = Times(results)
    settings = [
        {key: value for key, value in asdict(result).items() if key != "timeline"}
        | {"fits": result.fits, "step_seconds": times.seconds(result), "ratio": statistics.median(times.ratios(result))}
        | {"ratio_error": times.error(result)}
        for result in results
    ]
    machine = {"torch": torch.__version__, "device": device, "cores": os.cpu_count(), "busy_share": times.busy_share}
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
