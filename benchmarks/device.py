"""The peak of a whole process over training steps, predicted by ``autoremat.device_budget``, against measured peaks.

    python benchmarks/device.py [--only llama "llama inductor"] [--steps 3]

A cell is a model, an optimizer and a number of accumulated micro-batches. The device is the CPU. Its memory is chosen between
the least for which a plan exists and the need of the plan without recomputation. It is the share ``SHARE`` of the way, or the
need of the optimizer's own step if that is more. The model is compiled under the device budget and trained for some steps, the
optimizer's own step included. The measured peak is that of torch's allocator events above an empty process. The events begin
after the first backward has compiled the graph and its gradients are freed. Parameters and buffers that are live then are
added. "first" is the peak of the first step, and "later" that of later ones, which hold the optimizer's state.

A cell fails if the prediction is more than 3 % off, or if a step that "fits" exceeds the device.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "AUTOREMAT_COST_MODEL": "roofline",
    "AUTOREMAT_PROGRESS": "0",
}  # before torch is imported

import torch
from harness import ROOT, mebibytes, parser, run, table
from rich.table import Table

import autoremat
from autoremat.report.report import Report

sys.path.insert(0, str(ROOT / "tests"))
import models  # noqa: E402
from measured_optimizers import EightBitAdam  # noqa: E402

SHARE = 0.15
"""Memory of the device, from the least that fits to the need without recomputation."""

ALLOWED = 0.03

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, fused=True),
    "AdamW loop": functools.partial(torch.optim.AdamW, foreach=False),
    "Adafactor": torch.optim.Adafactor,
    "8-bit Adam": EightBitAdam,
}
MODELS = ("gpt2", "llama", "resnet", "unet", "lstm", "wide", "llama inductor", "wide inductor")
"""Uncompiled planned graphs, unless the name ends with the compiler."""
ACCUMULATED = (1, 4)


@dataclass(frozen=True)
class Row:
    """One cell; bytes above an empty process."""

    model: str
    optimizer: str
    accumulate: int
    compiler: str
    device: int
    predicted: int
    measured: int
    off: float
    first_measured: int
    later_measured: int
    binds: str
    recomputed: int
    graphs: int
    fits: bool

    @property
    def is_over(self) -> bool:
        return self.fits and self.measured > self.device


class Wide(torch.nn.Module):
    """Wide layers and few samples: the optimizer's own step needs the most memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(384, 384), torch.nn.GELU()) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def wide() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Returns the wide model and its batch."""
    torch.manual_seed(0)
    return Wide(), (torch.randn(128, 384),)


def made(name: str, optimizer: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], torch.optim.Optimizer]:
    """Returns a model, its batch and its optimizer."""
    model, batch = wide() if name == "wide" else models.build(name)
    return model, batch, OPTIMIZERS[optimizer](model.parameters())


def device_bytes(name: str, optimizer: str, accumulate: int, compiler: str) -> int:
    """Returns the memory of the device of a cell."""
    model, batch, stepper = made(name, optimizer)
    huge = autoremat.device_budget("1TiB", model, stepper, accumulate=accumulate)
    report = autoremat.explain(model, *batch, options={"memory_budget": huge, "compiler": compiler})
    ledger = report.device_ledger
    assert ledger is not None
    held = ledger.total_bytes - ledger.budget_bytes
    least, most = report.minimum_peak_bytes + report.code_headroom_bytes, report.baseline_peak_bytes
    wanted = held + least + int(SHARE * max(0, most - least))
    return max(wanted, ledger.update_bytes + ledger.reserve_bytes)


def peaks(
    step: Callable[..., torch.Tensor], model: torch.nn.Module, batch: Iterable[torch.Tensor], optimizer: Any, accumulate: int,
    steps: int,
) -> list[int]:  # fmt: skip
    """Returns the measured peak of each step, in bytes above an empty process."""
    shapes = [tensor.clone() for tensor in batch]
    step(*shapes).backward()  # compiles
    model.zero_grad(set_to_none=True)
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    gc.collect()
    tracker = autoremat.track_peak("cpu")
    with tracker:
        for _ in range(steps):
            for _ in range(accumulate):
                inputs = [tensor.clone() for tensor in shapes]
                (step(*inputs) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tracker.mark()
        del inputs
    return [reading.peak_bytes + sum(own.values()) for reading in tracker.readings[:-1]]  # the last one is that of the end


def cell(case: str, optimizer: str, accumulate: int, steps: int) -> Row:
    name, _, compiler = case.partition(" ")
    compiler = compiler or "aot_eager"
    total = device_bytes(name, optimizer, accumulate, compiler)
    torch.compiler.reset()
    model, batch, stepper = made(name, optimizer)
    budget = autoremat.device_budget(total, model, stepper, accumulate=accumulate)
    compiled = torch.compile(model, backend="autoremat", options={"memory_budget": budget, "compiler": compiler})
    before = len(autoremat.reports())
    measured = peaks(compiled, model, batch, stepper, accumulate, steps)
    reports: list[Report] = autoremat.reports()[before:]
    report = max(reports, key=lambda one: one.peak_bytes)
    ledger, predicted, peak = report.device_ledger, report.predicted_device_bytes, max(measured)
    assert ledger is not None
    assert predicted is not None
    binds = ledger.binding(report.peak_bytes).name
    later = (measured[0], max(measured[1:]), binds, report.recomputed_ops, len(reports), report.fits)
    return Row(case, optimizer, accumulate, compiler, total, predicted, peak, predicted / peak - 1, *later)


def measure(steps: int, name: str) -> Iterator[Row]:
    for optimizer in OPTIMIZERS:
        for accumulate in ACCUMULATED:
            yield cell(name, optimizer, accumulate, steps)


def cells(row: Row) -> dict[str, object]:
    return {
        "model": row.model,
        "optimizer": row.optimizer,
        "accumulate": row.accumulate,
        "compiler": row.compiler,
        "device MiB": mebibytes(row.device),
        "predicted": mebibytes(row.predicted),
        "measured": mebibytes(row.measured),
        "off": f"{row.off:+.2%}",
        "first step": mebibytes(row.first_measured),
        "later": mebibytes(row.later_measured),
        "recomputed": row.recomputed,
        "binds": row.binds,
    }


def shown(rows: list[Row]) -> list[Table | str]:
    worst, over = max(abs(row.off) for row in rows), sum(row.is_over for row in rows)
    verdict = f"{len(rows)} cells; at most {worst:.2%} off; {over} above a device that is said to fit"
    return [table("Peaks of the process", list(map(cells, rows))), verdict]


def main() -> int:
    parsed = parser(__doc__, MODELS)
    parsed.add_argument("--steps", type=int, default=3)
    arguments = parsed.parse_args()
    torch.set_num_threads(1)
    rows = run("device", arguments, Row, functools.partial(measure, arguments.steps), shown)
    return int(any(abs(row.off) > ALLOWED or row.is_over for row in rows))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as caches:
        os.environ["AUTOREMAT_CACHE_DIR"] = caches
        sys.exit(main())
