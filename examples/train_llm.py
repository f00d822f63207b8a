"""Trains a small language model under memory budgets and compares peaks, step times and losses.

    python examples/train_llm.py            # about six minutes on two cores
    python examples/train_llm.py --quick    # about two
    python examples/train_llm.py --device cuda

Every setting starts from the same weights and sees the same batches. The budget bounds what forward and backward
allocate above what is live when the step begins. The exit status is 1 if a measured peak is above its budget or a loss
is not that of the run without a budget.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import demo_model
import torch
import torch._functorch.config as functorch_config
from demo_report import Result, failures, print_table, write_results
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch._dynamo.exc import BackendCompilerFailed

import autoremat

COMPILED_STEP, TRACKED_STEP = 0, 2
MARGIN_OF_MINIMUM = 1.02
TORCH_BUDGET = 0.5

SETTINGS = {
    "inductor": "Inductor alone",
    "torch": f"torch, memory budget {TORCH_BUDGET}",
    "70": "autoremat, 70 % of the first",
    "50": "autoremat, 50 % of the first",
    "35": "autoremat, 35 % of the first",
    "minimum": "autoremat, smallest + 2 %",
}
"""Key on the command line: title. Inductor alone always runs, first: it is what the others are compared with."""

QUICK_SETTINGS = ("inductor", "torch", "50", "minimum")


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
    parser.add_argument("--steps", type=int, help="training steps for each setting (20; 8 with --quick)")
    parser.add_argument("--layers", type=int, help="decoder layers (10; 4 with --quick)")
    parser.add_argument("--dropout", type=float, default=0.0, help="probability; on attention and residuals")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, help="which settings to run (default: all)")
    parser.add_argument("--output", type=Path, default=Path("demo-results"), help="folder for the table, JSON, picture")
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (8 if arguments.quick else 20)
    if arguments.steps <= TRACKED_STEP + 1:
        parser.error(f"--steps must be at least {TRACKED_STEP + 2}: one compiles and one is tracked")
    chosen = arguments.settings or (QUICK_SETTINGS if arguments.quick else SETTINGS)
    arguments.settings = [key for key in SETTINGS if key in chosen or key == "inductor"]
    return arguments


def chosen_size(arguments: argparse.Namespace) -> demo_model.ModelSize:
    size = demo_model.QUICK if arguments.quick else demo_model.FULL
    if arguments.device == "cuda":
        size = demo_model.CUDA
    return replace(size, layers=arguments.layers) if arguments.layers else size


def run_settings(
    arguments: argparse.Namespace, size: demo_model.ModelSize, batches: Sequence[torch.Tensor], console: Console
) -> tuple[list[Result], list[str]]:
    """The results of the chosen settings, and a message for each that has no plan within its budget."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    results: list[Result] = []
    infeasible: list[str] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for key in arguments.settings:
            budget = budget_of(key, results, size, batches[0], arguments.dropout)
            task = progress.add_task(SETTINGS[key], total=len(batches))
            try:
                result = train(key, budget, size, batches, arguments.dropout, lambda task=task: progress.advance(task))
            except BackendCompilerFailed as error:
                if not isinstance(error.inner_exception, autoremat.BudgetInfeasible):
                    raise
                infeasible.append(f"{SETTINGS[key]}: {error.inner_exception}")
            else:
                results.append(result)
                console.print(result.line(), highlight=False)
            progress.remove_task(task)
    return results, infeasible


def budget_of(
    key: str, results: Sequence[Result], size: demo_model.ModelSize, batch: torch.Tensor, dropout: float
) -> int | None:
    """Budget in bytes of a setting, from what was measured and reported before it."""
    if key in ("inductor", "torch"):
        return None
    if key != "minimum":
        return results[0].peak_bytes * int(key) // 100
    return int(demo_model.smallest_peak(size, batch, dropout) * MARGIN_OF_MINIMUM)


def compile_model(model: torch.nn.Module, budget: int | None) -> torch.nn.Module:
    if budget is None:
        return torch.compile(model)
    return torch.compile(model, backend="autoremat", options={"memory_budget": budget})


def train(
    key: str,
    budget: int | None,
    size: demo_model.ModelSize,
    batches: Sequence[torch.Tensor],
    dropout: float,
    advance: Callable[[], None],
) -> Result:
    """Trains a fresh model for one step a batch; the first step compiles, another one is tracked."""
    torch._dynamo.reset()
    gc.collect()
    device = batches[0].device.type
    reports_before = len(autoremat.reports()) if budget else 0
    model = demo_model.build_model(size, device=device, dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    compiled = compile_model(model, budget)
    tracker = autoremat.track_peak(device, timeline=True)
    seconds, losses = [], []
    torch_budget = functorch_config.patch(activation_memory_budget=TORCH_BUDGET)
    with torch_budget if key == "torch" else contextlib.nullcontext():
        for step, batch in enumerate(batches):
            optimizer.zero_grad(set_to_none=True)
            begin = time.perf_counter()
            with tracker if step == TRACKED_STEP else contextlib.nullcontext():
                loss = compiled(batch)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())  # waits for the device
            seconds.append(time.perf_counter() - begin)
            del loss
            advance()
    timed = [second for step, second in enumerate(seconds) if step not in (COMPILED_STEP, TRACKED_STEP)]
    return Result(
        key=key,
        title=SETTINGS[key],
        budget_bytes=budget,
        predicted_bytes=predicted_peak(reports_before) if budget else None,
        peak_bytes=tracker.bytes,
        step_seconds=statistics.median(timed),
        compile_seconds=seconds[COMPILED_STEP],
        losses=tuple(losses),
        timeline=tracker.timeline,
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
