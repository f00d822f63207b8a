"""The gain of running a Llama's MLP in tiles: norm, gated MLP and residual sum, forward and backward.

    python benchmarks/tiles.py            # by name for an H100, then measured on the CPU
    python benchmarks/tiles.py --planned  # by name alone, without running anything

By name: an MLP of Llama-3.1-8B in bfloat16 on the meta device, for the least peak that its plans reach. Measured: a small MLP
in 32 bits, with the largest difference of a gradient from that of the untiled step, as a share of its largest entry.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat
from autoremat.basics.errors import BudgetWarning

ROOT = Path(__file__).resolve().parent.parent
CARD = "H100-80GB"
LLAMA, LLAMA_TOKENS = (4096, 14336), (8192, 32768, 131072)
SMALL, SMALL_TOKENS = (128, 448), 4096
TILES = (1, 4, 16)


class LlamaMLP(nn.Module):
    """The second half of a Llama's layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@dataclass(frozen=True)
class Planned:
    """One number of tiles at one length, by simulator and cost model. Bytes exclude weights and the input."""

    tokens: int
    tiles: int
    whole_peak_bytes: int
    """Without recomputation."""
    least_peak_bytes: int
    seconds: float
    """Forward and backward without recomputation."""
    least_seconds: float
    """Forward and backward at the least peak."""


@dataclass(frozen=True)
class Measured:
    """One number of tiles under one compiler, at the least peak that its plans reach."""

    compiler: str
    tiles: int
    stretches: int
    simulated_bytes: int
    measured_bytes: int
    gradient_difference: float


def options(tiles: int, **more: Any) -> dict[str, Any]:
    return {
        "memory_budget": 1, "on_infeasible": "best_effort", "tiles": tiles if tiles > 1 else False, "chunk_loss": False,
        "cost_model": "roofline", **more,
    }  # fmt: skip


def planned(tokens: int, tiles: int) -> Planned:
    with torch.device("meta"):
        model = LlamaMLP(*LLAMA).bfloat16()
        x = torch.empty(1, tokens, LLAMA[0], dtype=torch.bfloat16, requires_grad=True)
    report = autoremat.explain(model, x, options=options(tiles), device=CARD)
    seconds = report.step_seconds
    return Planned(
        tokens, tiles, report.baseline_peak_bytes, report.minimum_peak_bytes, seconds, seconds + report.recompute_seconds
    )


def measured(compiler: str) -> list[Measured]:
    torch.manual_seed(0)
    model, x = LlamaMLP(*SMALL), torch.randn(2, SMALL_TOKENS // 2, SMALL[0], requires_grad=True)
    tangent = torch.randn_like(x)
    found: list[Measured] = []
    wanted: list[Tensor] = []
    for tiles in (1, 8):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="autoremat", options=options(tiles, compiler=compiler))
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            x.grad = None
            gc.collect()
            with autoremat.track_peak("cpu") as peak:
                compiled(x).backward(tangent)
        gradients = [one.grad.clone() for one in (x, *model.parameters()) if one.grad is not None]
        wanted = wanted or gradients
        pairs = zip(gradients, wanted, strict=True)
        difference = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
        report = autoremat.reports()[-1]
        found.append(Measured(compiler, tiles, report.tiled_stretches, report.predicted_peak_bytes, peak.bytes, difference))
        print(found[-1], flush=True)
    return found


def write(by_name: list[Planned], by_run: list[Measured], folder: Path) -> None:
    """Prints the tables and writes them to tiles.txt and tiles.json in ``folder``."""
    width, hidden = LLAMA
    table = Table(title=f"MLP of Llama-3.1-8B ({width} x {hidden}, bfloat16), {CARD}, predicted")
    columns = (
        "tokens",
        "tiles",
        "peak without recomputation, GiB",
        "least peak, GiB",
        "times less",
        "ms",
        "ms at the least peak",
    )
    for column in columns:
        table.add_column(column, justify="right")
    whole = {row.tokens: row.least_peak_bytes for row in by_name if row.tiles == 1}
    for row in by_name:
        sizes = (f"{row.whole_peak_bytes / 2**30:.2f}", f"{row.least_peak_bytes / 2**30:.2f}")
        gain = f"{whole[row.tokens] / row.least_peak_bytes:.1f}"
        table.add_row(
            str(row.tokens), str(row.tiles), *sizes, gain, f"{1e3 * row.seconds:.1f}", f"{1e3 * row.least_seconds:.1f}"
        )
    runs = Table(title=f"MLP of {SMALL[0]} x {SMALL[1]}, {SMALL_TOKENS} tokens, 32 bits, on a CPU, at the least peak")
    for column in ("compiler", "tiles", "simulated, MiB", "measured, MiB", "difference of gradients"):
        runs.add_column(column, justify="right")
    for one in by_run:
        sizes = (f"{one.simulated_bytes / 2**20:.2f}", f"{one.measured_bytes / 2**20:.2f}")
        runs.add_row(one.compiler, str(one.tiles), *sizes, f"{one.gradient_difference:.1e}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tiles.txt").open("w") as file:
        for console in (Console(width=120), Console(width=120, file=file)):
            console.print(f"torch {torch.__version__}", highlight=False)
            console.print(table)
            if by_run:
                console.print(runs)
    data = {
        "torch": torch.__version__,
        "planned": [asdict(row) for row in by_name],
        "measured": [asdict(one) for one in by_run],
    }
    (folder / "tiles.json").write_text(json.dumps(data, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LLAMA_TOKENS))
    parser.add_argument("--tiles", type=int, nargs="+", default=list(TILES))
    parser.add_argument("--planned", action="store_true", help="without running anything")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", BudgetWarning)
    by_name: list[Planned] = []
    for tokens in arguments.tokens:
        for tiles in arguments.tiles:
            by_name.append(planned(tokens, tiles))
            print(by_name[-1], flush=True)
    by_run = [] if arguments.planned else [one for compiler in ("aot_eager", "inductor") for one in measured(compiler)]
    write(by_name, by_run, arguments.output)


if __name__ == "__main__":
    main()
