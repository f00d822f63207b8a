"""Two threads that compile at the same time and must not disturb each other: plain Inductor in one, this backend in the other.

    python benchmarks/threads.py [--rounds 100]

In each round both threads begin together. One compiles a perceptron with plain Inductor and runs its first backward, which
Inductor compiles only then. The other compiles the same perceptron under a budget. Caches of generated graphs are off, so that
all code is generated anew. Gradients must have the bits, and reports the peaks, that the same work has in one thread. Written
to `benchmarks/results/threads.txt`; the exit code is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("AUTOREMAT_COST_MODEL", "roofline")
os.environ["AUTOREMAT_CACHE_DIR"] = tempfile.mkdtemp()
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import torch
from torch import Tensor, nn

import autoremat

ROOT = Path(__file__).resolve().parent.parent
ROWS, WIDTH = 256, 32
BUDGETS = (1.0, 0.9, 0.8)
"""Shares of the peak without recomputation, by turns."""

Outcome = tuple[list[Tensor], tuple[int | None, ...]]
"""Gradients; the peaks that were reported."""


def gradients(backend: str, options: dict[str, object]) -> list[Tensor]:
    """Returns the gradients of a perceptron that is made, compiled and differentiated afresh."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    torch.compile(model, backend=backend, options=options)(x).exp().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def plain() -> Outcome:
    """Returns the outcome by Inductor alone."""
    return gradients("inductor", {}), ()


def planned(share: float) -> Outcome:
    """Returns the outcome by this backend."""
    before = len(autoremat.reports())
    found = gradients("autoremat", {"memory_budget": share, "on_infeasible": "best_effort"})
    (report,) = autoremat.reports()[before:]
    return found, (report.budget_bytes, report.predicted_peak_bytes, report.compiled_peak_bytes, report.replans)


def same(one: Outcome, other: Outcome) -> bool:
    """Returns True if all bits of the gradients and all reported peaks are equal."""
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    for share in BUDGETS:  # later compilations take the margin up that the first ones had to find
        planned(share)
        torch._dynamo.reset()
    expected = {share: planned(share) for share in BUDGETS}
    expected_plain, differing, begin = plain(), [], time.perf_counter()
    for number in range(rounds):
        torch._dynamo.reset()
        share, together = BUDGETS[number % len(BUDGETS)], threading.Barrier(2)

        def work(by: str, share: float = share, together: threading.Barrier = together) -> Outcome:
            together.wait()
            return plain() if by == "plain" else planned(share)

        with ThreadPoolExecutor(2) as pool:
            by_inductor, by_us = pool.map(work, ("plain", "planned"))
        if not same(by_inductor, expected_plain):
            differing.append(f"round {number}: plain Inductor")
        if not same(by_us, expected[share]):
            differing.append(f"round {number}: budget {share}, {by_us[1]} in place of {expected[share][1]}")
    lines = [
        f"torch {torch.__version__}, {rounds} rounds, {(time.perf_counter() - begin) / max(rounds, 1):.2f} s each",
        f"gradients and reported peaks that differ from those of one thread: {len(differing)}",
        *differing,
    ]
    print("\n".join(lines))
    (ROOT / "benchmarks" / "results" / "threads.txt").write_text("\n".join(lines) + "\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
