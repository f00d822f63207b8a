"""Trains a small language model under memory budgets and compares peaks, step times and losses.

    python examples/train_llm.py            # about three minutes on two cores
    python examples/train_llm.py --quick    # about one and a half
    python examples/train_llm.py --device cuda

Every setting starts from the same weights and sees the same batches. The budget bounds what forward and backward
allocate above what is live when the step begins. After the first steps, the settings take their steps in turn, so that
whatever slows the machine down for a while slows all of them down. The exit status is 1 if a measured peak is above its
budget or a loss is not that of the run without a budget.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

# Threads that wait by spinning take the processor from those that they wait for, if other programs run.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import demo_model  # noqa: E402
import torch  # noqa: E402
import torch._functorch.config as functorch_config  # noqa: E402
from demo_report import Result, Timing, failures, longest_delay, print_table, run_delays, write_results  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.text import Text  # noqa: E402
from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402
from torch._inductor.compile_fx import compile_fx  # noqa: E402

import autoremat  # noqa: E402
from autoremat.basics.units import format_bytes  # noqa: E402

FIRST_STEPS = 3
"""One compiles, one warms up, one is tracked. None is timed."""

MARGIN_OF_MINIMUM = 1.02
TORCH_BUDGET = 0.5

SETTINGS = {
    "inductor": "Inductor alone",
    "torch": f"torch, memory budget {TORCH_BUDGET}",
    "70": "autoremat, 70 % of the first",
    "50": "autoremat, 50 % of the first",
    "minimum": "autoremat, smallest + 2 %",
}
"""Key on the command line: title. Inductor alone always runs, first: it is what the others are compared with."""

QUICK_SETTINGS = ("inductor", "50", "minimum")


def main() -> int:
    arguments = parse_arguments()
    # A pipe has no width: without one the table would be cut at 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    size = chosen_size(arguments)
    batches = demo_model.token_batches(size, arguments.steps, arguments.device)
    console.print(
        f"Llama, {size.layers} layers, hidden {size.hidden}, batch {size.batch} x {size.sequence} tokens, vocabulary "
        f"{size.vocabulary}, dropout {arguments.dropout:g}; {arguments.steps} steps each; torch {torch.__version__}, "
        f"{arguments.device}"
    )
    results, infeasible = run_settings(arguments, size, batches, console)
    print_table(results, console)
    write_results(results, size, arguments.device, arguments.output)
    problems = infeasible + failures(results, dtype=size.dtype)
    for problem in problems:
        console.print(Text("FAILED: ", style="bold red").append(problem, style="not bold default"))
    return 1 if problems else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps and settings")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a larger model in bfloat16")
    parser.add_argument("--steps", type=int, help="training steps for each setting (12; 9 with --quick)")
    parser.add_argument("--layers", type=int, help="decoder layers (2)")
    parser.add_argument("--dropout", type=float, default=0.0, help="probability; on attention and residuals")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="which settings to run (default: all)")
    parser.add_argument("--output", type=Path, default=Path("demo-results"), help="folder for the table, JSON, picture")
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (9 if arguments.quick else 12)
    if arguments.steps <= FIRST_STEPS:
        parser.error(f"--steps must be at least {FIRST_STEPS + 1}: the first {FIRST_STEPS} are not timed")
    chosen = arguments.settings or (QUICK_SETTINGS if arguments.quick else SETTINGS)
    arguments.settings = [key for key in SETTINGS if key in chosen or key == "inductor"]
    return arguments


def chosen_size(arguments: argparse.Namespace) -> demo_model.ModelSize:
    size = demo_model.QUICK if arguments.quick else demo_model.DEMO
    if arguments.device == "cuda":
        size = demo_model.CUDA
    return replace(size, layers=arguments.layers) if arguments.layers else size


def run_settings(
    arguments: argparse.Namespace, size: demo_model.ModelSize, batches: Sequence[torch.Tensor], console: Console
) -> tuple[list[Result], list[str]]:
    """The results of the chosen settings, and a message for each that has no plan within its budget."""
    first, rounds = batches[:FIRST_STEPS], batches[FIRST_STEPS:]
    runs: list[Run] = []
    infeasible: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("first steps", total=len(arguments.settings))
        for key in arguments.settings:
            progress.update(task, description=f"compiling: {SETTINGS[key]}")
            budget = budget_of(key, runs, size, batches[0], arguments.dropout)
            try:
                run = Run.begun(key, budget, size, first, arguments.dropout)
            except BackendCompilerFailed as error:
                if not isinstance(error.inner_exception, autoremat.BudgetInfeasible):
                    raise
                infeasible.append(f"{SETTINGS[key]}: {error.inner_exception}")
            else:
                runs.append(run)
                console.print(run.line(), highlight=False)
            progress.advance(task)
        task = progress.add_task("steps in turn", total=len(rounds))
        for number, batch in enumerate(rounds):
            turn = number % len(runs)  # no setting always follows the same one
            for run in runs[turn:] + runs[:turn]:
                run.step(batch)
            progress.advance(task)
    return [run.result() for run in runs], infeasible


def budget_of(key: str, runs: Sequence[Run], size: demo_model.ModelSize, batch: torch.Tensor, dropout: float) -> int | None:
    """Budget in bytes of a setting, from what was measured before it."""
    if key in ("inductor", "torch"):
        return None
    if key != "minimum":
        return runs[0].tracker.bytes * int(key) // 100
    return int(demo_model.smallest_peak(size, batch, dropout) * MARGIN_OF_MINIMUM)


def compile_model(key: str, model: torch.nn.Module, budget: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if budget is not None:
        return torch.compile(model, backend="autoremat", options={"memory_budget": budget})
    return torch.compile(model, backend=within_torch_budget) if key == "torch" else torch.compile(model)


def within_torch_budget(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
    """Inductor under torch's own setting. A backend of its own keeps the compiled code apart from that of Inductor alone."""
    with functorch_config.patch(activation_memory_budget=TORCH_BUDGET):
        return compile_fx(graph, inputs)


@dataclass
class Run:
    """One setting: a fresh model in training, with what was measured so far."""

    key: str
    budget_bytes: int | None
    optimizer: torch.optim.Optimizer
    compiled: Callable[[torch.Tensor], torch.Tensor]
    tracker: autoremat.track_peak
    predicted_bytes: int | None = None
    compile_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    @classmethod
    def begun(
        cls, key: str, budget: int | None, size: demo_model.ModelSize, batches: Sequence[torch.Tensor], dropout: float
    ) -> Run:
        """Returns the run of a setting after one step on each of `batches`. The first step compiles, the last is tracked."""
        device = batches[0].device.type
        reports_before = len(autoremat.reports())
        model = demo_model.build_model(size, device=device, dropout=dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        run = cls(key, budget, optimizer, compile_model(key, model, budget), autoremat.track_peak(device, timeline=True))
        for number, batch in enumerate(batches):
            run.step(batch, tracked=number == len(batches) - 1)
        run.compile_seconds = run.timings[0].seconds
        run.timings.clear()
        run.predicted_bytes = None if budget is None else predicted_peak(reports_before)
        return run

    def step(self, batch: torch.Tensor, *, tracked: bool = False) -> None:
        delays, begin = run_delays(), time.perf_counter()
        with self.tracker if tracked else contextlib.nullcontext():
            loss = self.compiled(batch)
            loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        seconds = time.perf_counter() - begin
        self.timings.append(Timing(seconds, longest_delay(delays, run_delays())))
        self.optimizer.zero_grad(set_to_none=True)

    def line(self) -> str:
        return (
            f"{SETTINGS[self.key]}: compiled in {self.compile_seconds:.1f} s, "
            f"peak {format_bytes(self.tracker.bytes)}, loss {self.losses[-1]:.5f}"
        )

    def result(self) -> Result:
        return Result(
            key=self.key,
            title=SETTINGS[self.key],
            budget_bytes=self.budget_bytes,
            predicted_bytes=self.predicted_bytes,
            peak_bytes=self.tracker.bytes,
            compile_seconds=self.compile_seconds,
            timings=tuple(self.timings),
            losses=tuple(self.losses),
            timeline=self.tracker.timeline,
        )


def predicted_peak(reports_before: int) -> int:
    """The peak known before the first step: by the code generator's own schedule, or the simulated one where that was
    not seen. The model must have compiled to one graph since `reports_before`."""
    new = autoremat.reports()[reports_before:]
    if len(new) != 1:
        raise SystemExit(f"Expected one compiled graph for the model, found {len(new)} reports.")
    (report,) = new
    return report.predicted_peak_bytes if report.compiled_peak_bytes is None else report.compiled_peak_bytes


if __name__ == "__main__":
    sys.exit(main())
