"""The gain of running a Llama's MLP in tiles: norm, gated MLP and residual sum, forward and backward.

    python benchmarks/tiles.py            # by name for an H100, then measured on the CPU
    python benchmarks/tiles.py --planned  # by name alone, without running anything

By name: an MLP of Llama-3.1-8B in bfloat16 on the meta device, for the least peak that its plans reach. Measured: a small MLP
in 32 bits, with the largest difference of a gradient from that of the untiled step, as a share of its largest entry.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from harness import measured_peak, mebibytes, parser, run, table
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat
from autoremat.basics.errors import BudgetWarning

CARD = "H100-80GB"
LLAMA, LLAMA_TOKENS = (4096, 14336), (8192, 32768, 131072)
SMALL, SMALL_TOKENS = (128, 448), 4096
TILES = (1, 4, 16)
SMALL_TILES = (1, 8)


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
class Row:
    """One number of tiles, at the least peak that its plans reach.

    By name, bytes exclude weights and the input, and seconds are those of forward and backward by the cost model.
    """

    case: str
    """The number of tokens, or the compiler of a step that runs."""
    tiles: int
    simulated_bytes: int
    whole_bytes: int | None = None
    """Without recomputation."""
    seconds: float | None = None
    """Without recomputation."""
    least_seconds: float | None = None
    measured_bytes: int | None = None
    gradient_difference: float | None = None


def options(tiles: int, **more: Any) -> dict[str, Any]:
    return {
        "memory_budget": 1, "on_infeasible": "best_effort", "tiles": tiles if tiles > 1 else False, "chunk_loss": False,
        "cost_model": "roofline", **more,
    }  # fmt: skip


def planned(tokens: str) -> Iterator[Row]:
    for tiles in TILES:
        with torch.device("meta"):
            model = LlamaMLP(*LLAMA).bfloat16()
            x = torch.empty(1, int(tokens), LLAMA[0], dtype=torch.bfloat16, requires_grad=True)
        report = autoremat.explain(model, x, options=options(tiles), device=CARD)
        seconds = report.step_seconds
        peaks = (report.minimum_peak_bytes, report.baseline_peak_bytes)
        yield Row(tokens, tiles, *peaks, seconds, seconds + report.recompute_seconds)


def measured(compiler: str) -> Iterator[Row]:
    torch.manual_seed(0)
    model, x = LlamaMLP(*SMALL), torch.randn(2, SMALL_TOKENS // 2, SMALL[0], requires_grad=True)
    tangent = torch.randn_like(x)
    wanted: list[Tensor] = []
    for tiles in SMALL_TILES:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="autoremat", options=options(tiles, compiler=compiler))

        def step(compiled: nn.Module = compiled) -> None:
            x.grad = None
            compiled(x).backward(tangent)

        step()
        peak = measured_peak(step, model)
        gradients = [one.grad.clone() for one in (x, *model.parameters()) if one.grad is not None]
        wanted = wanted or gradients
        pairs = zip(gradients, wanted, strict=True)
        difference = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
        simulated = autoremat.reports()[-1].predicted_peak_bytes
        yield Row(compiler, tiles, simulated, measured_bytes=peak, gradient_difference=difference)


def measure(case: str) -> Iterator[Row]:
    return planned(case) if case.isdecimal() else measured(case)


def by_name(row: Row, rows: list[Row]) -> dict[str, str]:
    whole = next(one.simulated_bytes for one in rows if one.case == row.case and one.tiles == 1)
    return {
        "tokens": row.case,
        "tiles": str(row.tiles),
        "peak without recomputation, GiB": f"{(row.whole_bytes or 0) / 2**30:.2f}",
        "least peak, GiB": f"{row.simulated_bytes / 2**30:.2f}",
        "times less": f"{whole / row.simulated_bytes:.1f}",
        "ms": f"{1e3 * (row.seconds or 0):.1f}",
        "ms at the least peak": f"{1e3 * (row.least_seconds or 0):.1f}",
    }


def by_run(row: Row) -> dict[str, str]:
    sizes = {"simulated, MiB": mebibytes(row.simulated_bytes), "measured, MiB": mebibytes(row.measured_bytes)}
    difference = f"{row.gradient_difference:.1e}"
    return {"compiler": row.case, "tiles": str(row.tiles), **sizes, "difference of gradients": difference}


def shown(rows: list[Row]) -> list[Table]:
    planned, run = ([row for row in rows if (row.measured_bytes is None) == absent] for absent in (True, False))
    (width, hidden), (small, inner) = LLAMA, SMALL
    first = table(f"MLP of Llama-3.1-8B ({width} x {hidden}, bfloat16), {CARD}, predicted", [by_name(r, rows) for r in planned])
    title = f"MLP of {small} x {inner}, {SMALL_TOKENS} tokens, 32 bits, on a CPU, at the least peak"
    return [first, table(title, list(map(by_run, run)))]


def main() -> None:
    made = parser(__doc__, (*map(str, LLAMA_TOKENS), "aot_eager", "inductor"))
    made.add_argument("--planned", action="store_true", help="without running anything")
    arguments = made.parse_args()
    warnings.simplefilter("ignore", BudgetWarning)
    if arguments.planned:
        arguments.only = [case for case in arguments.only if case.isdecimal()]
    run("tiles", arguments, Row, measure, shown)


if __name__ == "__main__":
    main()
