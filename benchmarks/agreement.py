"""Seconds that ranks spend on their agreement in each compilation: ``python benchmarks/agreement.py``.

Processes on this machine compile the same steps, uncompiled, with and without agreement. The time between the messages is
planning. The table therefore also has the seconds that a rank spends in rounds while all ranks are at the same point.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import distributed, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from processes import run_ranks, values  # noqa: E402

from autoremat.agreement.joining import session_at  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "agreement.txt"
REPETITIONS = 9
SIZES = {"1 KB": 1_000, "1 MB": 1_000_000}
"""Sizes of the plan that the leader sends. A plan of 1,000 ops has about 300 KB."""


def compilations(rank: int, agreement: str) -> list[float]:
    """Returns the seconds of each compilation of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)])
    options = {"memory_budget": 0.6, "compiler": "aot_eager", "cost_model": "roofline", "agreement": agreement}
    found = []
    for _ in range(REPETITIONS + 1):
        torch._dynamo.reset()
        if distributed.is_initialized():
            distributed.barrier()
        begin = time.perf_counter()
        torch.compile(model, backend="autoremat", options=options)(torch.randn(256, 64)).sum().backward()
        found.append(time.perf_counter() - begin)
    return found[1:]


def rounds(rank: int, size: int) -> list[float]:
    """Returns the seconds of the messages of one compilation, for each repetition.

    They are the meeting, four rounds, a plan of ``size`` characters, and the end.
    """
    found = []
    for _ in range(REPETITIONS + 1):
        distributed.barrier()
        begin = time.perf_counter()
        with session_at("a place", "auto") as session:
            assert session is not None
            for topic in ("options", "record", "graph", "verdict"):
                session.round(topic, {}, lambda parts: {})
            session.from_leader("plan", lambda: "x" * size)
        found.append(time.perf_counter() - begin)
    return found[1:]


def slowest(by_rank: list[list[float]]) -> float:
    """Returns the median over the repetitions of the slowest rank's seconds."""
    return statistics.median(map(max, zip(*by_rank, strict=True)))


def main() -> None:
    lines = ["Cost of agreement: median seconds of the slowest rank", ""]
    lines.append(f"{'processes':>9}  {'compilation, off':>16}  {'auto':>6}  " + "  ".join(f"messages, {s} plan" for s in SIZES))
    for ranks in (1, 2, 4):
        cells: list[Any] = [slowest(values(run_ranks(compilations, ranks, args=(mode,)))) for mode in ("off", "auto")]
        cells += [slowest(values(run_ranks(rounds, ranks, args=(size,)))) if ranks > 1 else 0.0 for size in SIZES.values()]
        off, auto, *messages = cells
        lines.append(f"{ranks:>9}  {off:>16.3f}  {auto:>6.3f}  " + "  ".join(f"{one:>19.3f}" for one in messages))
    text = "\n".join(lines) + "\n"
    RESULTS.write_text(text)
    Console().print(text, markup=False, highlight=False)


if __name__ == "__main__":
    from agreement import main as by_name  # the processes import the functions under the module's name

    by_name()
