"""The peak of a whole process over training steps, predicted by ``autoremat.device_budget``, against measured peaks.

    python benchmarks/device.py [--models llama unet] [--compiler inductor] [--steps 3]

A cell is a model, an optimizer and a number of accumulated micro-batches. The device is the CPU. Its memory is chosen between
the least for which a plan exists and the need of the plan without recomputation. It is the share ``SHARE`` of the way, or the
need of the optimizer's own step if that is more. The model is compiled under the device budget and trained for some steps, the
optimizer's own step included. The measured peak is that of torch's allocator events above an empty process. The events begin
after the first backward has compiled the graph and its gradients are freed. Parameters and buffers that are live then are
added. "first" is the peak of the first step, and "later" that of later ones, which hold the optimizer's state.

A cell fails if the prediction is more than 3 % off, or if a step that "fits" exceeds the device. Rows of earlier runs stay
unless they are measured again. Writes benchmarks/results/device.txt and .json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import models  # noqa: E402
import torch  # noqa: E402
from eight_bit import EightBitAdam  # noqa: E402

import autoremat  # noqa: E402
from autoremat.report.report import Report  # noqa: E402

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
MODELS = ("gpt2", "llama", "resnet", "unet", "lstm", "wide")
ACCUMULATED = (1, 4)


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
    ends = list(tracker.marks)
    found = []
    for begin, end in zip((-1.0, *ends[:-1]), ends, strict=True):
        found.append(max(level for time, level in tracker.timeline if begin <= time <= end) + sum(own.values()))
    return found


def measure(name: str, optimizer: str, accumulate: int, compiler: str, steps: int) -> dict[str, Any]:
    """Returns the row of one cell."""
    total = device_bytes(name, optimizer, accumulate, compiler)
    torch.compiler.reset()
    model, batch, stepper = made(name, optimizer)
    budget = autoremat.device_budget(total, model, stepper, accumulate=accumulate)
    compiled = torch.compile(model, backend="autoremat", options={"memory_budget": budget, "compiler": compiler})
    before = len(autoremat.reports())
    measured = peaks(compiled, model, batch, stepper, accumulate, steps)
    reports: list[Report] = autoremat.reports()[before:]
    report = max(reports, key=lambda one: one.peak_bytes)
    ledger = report.device_ledger
    assert ledger is not None
    predicted, peak = report.predicted_device_bytes, max(measured)
    assert predicted is not None
    return {
        "model": name, "optimizer": optimizer, "accumulate": accumulate, "compiler": compiler, "device": total,
        "predicted": predicted, "measured": peak, "off": predicted / peak - 1,
        "first_measured": measured[0], "later_measured": max(measured[1:]),
        "binds": ledger.binding(report.peak_bytes).name, "recomputed": report.recomputed_ops, "graphs": len(reports),
        "fits": report.fits,
    }  # fmt: skip


def fails(row: dict[str, Any]) -> bool:
    """Returns True for a cell outside of what is allowed."""
    return abs(row["off"]) > ALLOWED or (row["fits"] and row["measured"] > row["device"])


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as text."""
    lines = [
        f"{'model':8} {'optimizer':13} {'accumulate':>10} {'compiler':9} {'device MiB':>10} {'predicted':>9} {'measured':>8} "
        f"{'off':>7} {'first step':>10} {'later':>7} {'recomputed':>10}  binds"
    ]
    for row in rows:
        lines.append(
            f"{row['model']:8} {row['optimizer']:13} {row['accumulate']:10} {row['compiler']:9} {row['device'] / 2**20:10.2f} "
            f"{row['predicted'] / 2**20:9.2f} {row['measured'] / 2**20:8.2f} {row['off']:+7.2%} "
            f"{row['first_measured'] / 2**20:10.2f} {row['later_measured'] / 2**20:7.2f} {row['recomputed']:10}  {row['binds']}"
        )
    worst = max((abs(row["off"]) for row in rows), default=0.0)
    over = sum(row["fits"] and row["measured"] > row["device"] for row in rows)
    lines.append(f"{len(rows)} cells; at most {worst:.2%} off; {over} above a device that is said to fit")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--compiler", default="aot_eager", choices=["aot_eager", "inductor"])
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    file = ROOT / "benchmarks" / "results" / "device"
    json_file = file.with_suffix(".json")
    rows: list[dict[str, Any]] = json.loads(json_file.read_text()) if json_file.exists() else []
    key = ("compiler", "model", "optimizer", "accumulate")
    for name in arguments.models:
        for optimizer in arguments.optimizers:
            for accumulate in ACCUMULATED:
                row = measure(name, optimizer, accumulate, arguments.compiler, arguments.steps)
                rows = [one for one in rows if any(one[k] != row[k] for k in key)] + [row]
                print(table([row]).splitlines()[1], flush=True)
                rows.sort(key=lambda one: (one["compiler"], MODELS.index(one["model"])))
                title = f"torch {torch.__version__}, Python {platform.python_version()}, CPU, {arguments.steps} steps"
                file.with_suffix(".txt").write_text(f"{title}\n{table(rows)}\n")
                json_file.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(map(fails, rows)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("AUTOREMAT_COST_MODEL", "roofline")
    os.environ.setdefault("AUTOREMAT_PROGRESS", "0")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as caches:
        os.environ["AUTOREMAT_CACHE_DIR"] = caches
        sys.exit(main())
