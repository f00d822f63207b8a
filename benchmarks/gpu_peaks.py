"""Predicted and measured peaks on a CUDA device: six models under six budgets, with and without CUDA graphs.

`benchmarks/gpu.py` runs this script, several times if need be. Budgets lie between the smallest peak and the peak without a
budget, both by the simulator. Each row has the peak of the plan, the replayed peak of its code and the allocator's peak.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import model_zoo
import torch
from gpu_rows import Line, Rows, Skipped, Unit, parser_of
from gpu_steps import WARM_STEPS, Memory, in_turn, largest_difference, memory_of, reserved_bytes, summary_of, training_step
from lowering import PATIENT, Device, build, planned, replayed_peaks, uncached, watching
from peaks import MARGIN_OF_MINIMUM, SHARES, mebibytes
from rich.table import Table
from torch._dynamo.exc import BackendCompilerFailed

import autoremat
from autoremat.basics.errors import BudgetInfeasible
from autoremat.compiler.lowering import code_peaks

SIZES = {"HIDDEN": 512, "HEADS": 8, "BATCH": 8, "LENGTH": 512, "VOCABULARY": 8192, "IMAGES": 64}
"""Of the models, instead of those that suit a CPU."""

TINY = {"HIDDEN": 32, "HEADS": 2, "BATCH": 1, "LENGTH": 16, "VOCABULARY": 64, "IMAGES": 2}
"""The same for a rehearsal."""

MODELS = ("llama", "gpt2", "bert", "vit", "resnet", "unet")

RANDOM = ("bert",)
"""Models with dropout, whose masks differ from those of the uncompiled model."""

MODES: dict[str, dict[str, Any]] = {
    "launches": {},
    "CUDA graphs": {"triton.cudagraphs": True},
}
"""Options of each way to run the same step, by the name of its stage."""

ROUNDS, STEPS_PER_SAMPLE = 5, 2


@dataclass(frozen=True)
class Row:
    """One model under one budget, run in one way. Bytes above those live when the step begins."""

    model: str
    mode: str
    share: float
    budget_bytes: int
    planned_bytes: int
    """By the simulator, with code headroom, for the first attempt."""
    replayed_bytes: int
    """Of the code that runs, with workspaces and code headroom."""
    tensor_bytes: int
    """The same without both."""
    pool_bytes: int | None
    """The part of the replayed peak that the pool of CUDA graphs keeps. None without CUDA graphs."""
    measured: Memory
    """With CUDA graphs it is near nothing: the pool was allocated when the step was recorded."""
    reserved_since_compilation_bytes: int
    """Growth of the allocator's segments by compiling, recording and running: gradients and graph pools are in it."""
    attempts: int
    predicted_seconds: float
    """Of the step with its recomputation."""
    measured_seconds: float
    gradient_error: float | None
    """The largest difference from the uncompiled gradient, over the largest gradient."""


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@functools.cache
def uncompiled(name: str) -> list[torch.Tensor] | None:
    """Returns the gradients of the model without compilation; None if it draws random numbers."""
    if name in RANDOM:
        return None
    model, inputs = build(name)
    model(*inputs).backward()
    return gradients(model)


@functools.cache
def bounds(name: str) -> tuple[float, float]:
    """Returns the least and the largest budget of a model."""
    report = planned(name)
    least, most = (peak + report.code_headroom_bytes for peak in (report.minimum_peak_bytes, report.predicted_peak_bytes))
    return least * MARGIN_OF_MINIMUM, most


def row(name: str, mode: str, share: float) -> Line:
    """Returns the row of one unit. A budget below the smallest peak is replaced by one slightly above it."""
    least, most = bounds(name)
    try:
        return asdict(budgeted(name, mode, share, int(least + share * (most - least))))
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, BudgetInfeasible):
            raise
        return asdict(budgeted(name, mode, share, int(error.inner_exception.minimum_bytes * MARGIN_OF_MINIMUM)))


def budgeted(name: str, mode: str, share: float, budget: int) -> Row:
    expected = uncompiled(name)
    model, inputs = build(name)
    reserved = reserved_bytes()
    compiled = torch.compile(model, backend="autoremat", options=PATIENT | MODES[mode] | {"memory_budget": budget})
    step = training_step(model, compiled, inputs)
    with uncached(), watching(kernels=True) as watch, replayed_peaks() as halves:
        for _ in range(WARM_STEPS):
            step()
    measured = memory_of(model, step)
    reserved = reserved_bytes() - reserved
    error = None if expected is None else largest_difference(gradients(model), expected)
    report = autoremat.reports()[-1]
    seconds = in_turn({name: step}, ROUNDS, STEPS_PER_SAMPLE)[name]
    return Row(
        model=name,
        mode=mode,
        share=share,
        budget_bytes=budget,
        planned_bytes=watch.attempts[0].planned_bytes,
        replayed_bytes=watch.attempts[-1].code_bytes,
        tensor_bytes=max(code_peaks(halves).values()),
        pool_bytes=report.graph_pool_bytes,
        measured=measured,
        reserved_since_compilation_bytes=reserved,
        attempts=len(watch.attempts),
        predicted_seconds=report.predicted_seconds,
        measured_seconds=summary_of(seconds).median,
        gradient_error=error,
    )


def not_recorded() -> Line:
    raise Skipped("the emulated card records CUDA graphs and cannot replay them")


def units(mode: str, rehearsed: bool) -> list[Unit]:
    """Returns the units of a mode, the tightest budget of all models first."""
    shares = SHARES[1:2] if rehearsed else SHARES
    names = [(share, name) for share in shares for name in MODELS]
    recorded = mode != "CUDA graphs" or not rehearsed
    return [
        Unit(f"{name} at {share:.0%}", functools.partial(row, name, mode, share) if recorded else not_recorded)
        for share, name in names
    ]


def to_replayed(row: Line) -> float:
    """Returns the difference of the measured bytes from the replayed ones, as a share.

    They are the allocated ones. With CUDA graphs they are the segments since the compilation, because a step that is replayed
    allocates next to nothing.
    """
    if row["pool_bytes"] is None:
        return float(row["measured"]["allocated_bytes"] / row["replayed_bytes"] - 1)
    return float(row["reserved_since_compilation_bytes"] / row["replayed_bytes"] - 1)


def table_of(mode: str, rows: Sequence[Line]) -> Table:
    """Returns the peaks side by side, with the differences of the measured peaks from those predicted."""
    table = Table(title=f"{mode}: peaks of forward and backward, MiB above the step's start; seconds of a step")
    table.add_column("model", no_wrap=True)
    for column in ("budget", "planned", "replayed", "allocated", "to replayed", "tensors", "requested", "to tensors",
                   "reserved", "since compiled", "pool", "attempts", "predicted, ms",
                   "measured, ms", "gradient's error"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        measured = row["measured"]
        allocated, requested, tensors = measured["allocated_bytes"], measured["requested_bytes"], row["tensor_bytes"]
        table.add_row(
            row["model"],
            *map(mebibytes, (row["budget_bytes"], row["planned_bytes"], row["replayed_bytes"])),
            *(mebibytes(allocated), f"{to_replayed(row):+.1%}"),
            *map(mebibytes, (tensors, requested)),
            "" if row["pool_bytes"] is not None else f"{requested / tensors - 1:+.1%}",
            *map(mebibytes, (measured["reserved_bytes"], row["reserved_since_compilation_bytes"])),
            "" if row["pool_bytes"] is None else mebibytes(row["pool_bytes"]),
            str(row["attempts"]),
            *(f"{1e3 * row[key]:.2f}" for key in ("predicted_seconds", "measured_seconds")),
            "" if row["gradient_error"] is None else f"{row['gradient_error']:.1e}",
        )
    return table


def verdict(rows: Sequence[Line]) -> str:
    """Returns how the predictions compare with the card."""
    excess = {f"{row['model']} at {row['share']:.0%}": row["measured"]["allocated_bytes"] - row["budget_bytes"] for row in rows}
    over = [f"{name} by {by:,} bytes" for name, by in excess.items() if by > 0]
    errors = sorted(map(to_replayed, rows))
    parts = [f"{len(rows)} rows", ": ".join([f"{len(over)} over their budget", *([", ".join(over)] if over else [])])]
    if rows[0]["pool_bytes"] is None:
        beyond = sorted(row["measured"]["allocated_bytes"] - row["replayed_bytes"] for row in rows)
        parts.append(f"allocated less replayed from {beyond[0]:,} to {beyond[-1]:,} bytes")
    needed = "allocated" if rows[0]["pool_bytes"] is None else "segments since compilation"
    return "; ".join([*parts, f"{needed} against replayed from {errors[0]:+.1%} to {errors[-1]:+.1%}"])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--stage", choices=MODES, required=True)
    arguments = parser.parse_args()
    for size, amount in (TINY if arguments.rehearse else SIZES).items():
        setattr(model_zoo, size, amount)
    Device.chosen = torch.device("cuda", torch.cuda.current_device())
    Rows(arguments.rows).run(arguments.stage, units(arguments.stage, arguments.rehearse), arguments.until, arguments.units)


if __name__ == "__main__":
    main()
