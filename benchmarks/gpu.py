"""The checks of peaks.py on a CUDA device, with what only CUDA has: CUDA graphs, other streams, segments of the allocator.

    python benchmarks/gpu.py                          # writes gpu_peaks and gpu_modes; skipped without a CUDA device
    python benchmarks/gpu.py --models llama gpt2

Models are wider than on a CPU, so that the device has something to do. Each of ``MODES`` runs the same steps under the same
budget; its gradients are held against those of the model uncompiled.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import model_zoo
import torch
from lowering import KINDS, PATIENT, ROOT, Device, build, planned, uncached
from peaks import MARGIN_OF_MINIMUM, WARM_STEPS, Setting, mebibytes, sweep, write
from rich.table import Table
from torch._dynamo.exc import BackendCompilerFailed

import autoremat
from autoremat.basics.errors import BudgetInfeasible

SIZES = {"HIDDEN": 512, "HEADS": 8, "BATCH": 8, "LENGTH": 512, "VOCABULARY": 8192}
"""Of the language models, instead of those that suit a CPU."""

MODES: dict[str, dict[str, Any]] = {"launches": {}, "CUDA graphs": {"triton.cudagraphs": True}, "side stream": {}}
"""Options of each way to run the same step."""

MODELS_OF_MODES = ("llama", "gpt2", "unet")
"""Without dropout, whose masks differ from those of the uncompiled model."""

SHARE = 0.5
"""The budget of ``MODES``, as a share of the way from the smallest peak to that without a budget, both by the simulator."""


@dataclass(frozen=True)
class ModeRow:
    """One model in one mode. Bytes above what is live when the step begins."""

    model: str
    mode: str
    budget_bytes: int
    predicted_bytes: int
    allocated_bytes: int
    """Near nothing where a graph is replayed: its pool was allocated when it was recorded."""
    code_headroom_bytes: int
    """What the allocator's segments grew by, compiling and recording included: fragmentation and graph pools are in it."""
    gradient_error: float
    """The largest difference from the uncompiled gradient, over the largest gradient."""


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def uncompiled(name: str) -> list[torch.Tensor]:
    model, inputs = build(name)
    model(*inputs).backward()
    return gradients(model)


@contextlib.contextmanager
def stream_of(mode: str) -> Iterator[None]:
    """On a stream of its own if ``mode`` says so; other streams wait before and after."""
    if mode != "side stream":
        yield
        return
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        yield
    torch.cuda.current_stream().wait_stream(own)


def mode_row(name: str, mode: str, budget: int, expected: list[torch.Tensor]) -> ModeRow:
    model, inputs = build(name)
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    compiled = torch.compile(model, backend="autoremat", options=PATIENT | MODES[mode] | {"memory_budget": budget})

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)
        compiled(*inputs).backward()

    with stream_of(mode):
        with uncached():
            for _ in range(WARM_STEPS + 1):  # CUDA graphs are recorded in the second
                step()
        model.zero_grad(set_to_none=True)
        with autoremat.track_peak(Device.chosen) as peak:
            step()
    found = gradients(model)
    largest = max(float(tensor.abs().max()) for tensor in expected)
    error = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest
    return ModeRow(
        model=name,
        mode=mode,
        budget_bytes=budget,
        predicted_bytes=autoremat.reports()[-1].predicted_peak_bytes,
        allocated_bytes=peak.bytes,
        code_headroom_bytes=torch.cuda.memory_reserved() - reserved,
        gradient_error=error,
    )


def modes(names: list[str], folder: Path) -> None:
    rows: list[ModeRow] = []
    for name in names:
        report, expected = planned(name), uncompiled(name)
        least, most = (peak + report.code_headroom_bytes for peak in (report.minimum_peak_bytes, report.predicted_peak_bytes))
        for mode in MODES:
            try:
                rows.append(mode_row(name, mode, int(least + SHARE * (most - least)), expected))
            except BackendCompilerFailed as error:
                if not isinstance(error.inner_exception, BudgetInfeasible):
                    raise
                rows.append(mode_row(name, mode, int(error.inner_exception.minimum_bytes * MARGIN_OF_MINIMUM), expected))
            print(rows[-1], flush=True)
            write_modes(rows, folder)


def write_modes(rows: list[ModeRow], folder: Path) -> None:
    table = Table(title="One budget, run in several ways, MiB")
    for column in ("model", "mode", "budget", "predicted", "allocated", "reserved", "gradient's error"):
        table.add_column(column, justify="left" if column in ("model", "mode") else "right")
    for row in rows:
        amounts = (row.budget_bytes, row.predicted_bytes, row.allocated_bytes, row.code_headroom_bytes)
        table.add_row(row.model, row.mode, *map(mebibytes, amounts), f"{row.gradient_error:.1e}")
    write("gpu_modes", [table], {"rows": [asdict(row) for row in rows]}, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA device, and nothing was written")
        return
    Device.chosen = torch.device("cuda", torch.cuda.current_device())
    for size, amount in SIZES.items():
        setattr(model_zoo, size, amount)
    sweep(arguments.models, Setting(measured=True, times=True), arguments.output, resume=False, title="gpu_peaks")
    modes([name for name in MODELS_OF_MODES if name in arguments.models], arguments.output)


if __name__ == "__main__":
    main()
