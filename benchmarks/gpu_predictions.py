"""Steps that a card ran, beside their predictions by the rules of today for the card by its name.

    python benchmarks/gpu_predictions.py    # needs no card

The plans are those of `gpu_duels.py` and `gpu_offload.py` in `benchmarks/results/gpu_rows.jsonl`, planned again under their
budgets by the torch that is here. Written to `benchmarks/results/gpu_predictions.txt`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_duels import KINDS, default_dtype
from gpu_offload import HOST_MEMORY
from gpu_rows import Rows
from torch import nn

import autoremat

RESULTS = Path(__file__).resolve().parent / "results"
DEVICE, MODEL = "H100-80GB", "GPT-2 medium"
"""The card, and the model whose steps ran without an error."""


@dataclass(frozen=True)
class Ran:
    """A step of autoremat that ran on the card. ``to_plain`` is its time over that of Inductor alone."""

    way: str
    options: dict[str, Any]
    seconds: float
    to_plain: float


def steps() -> Iterator[Ran]:
    """Yields the steps of the model."""
    rows = Rows(RESULTS / "gpu_rows.jsonl")
    for row in rows.rows("duels"):
        if row["model"] == MODEL:
            budget = {"memory_budget": row["budget_bytes"]}
            yield Ran(f"at the peak of {row['rival']}", budget, row["our_result"]["seconds"], row["ours_to_plain"])
    for row in rows.rows("offload"):
        for way, others in (("alone", {}), ("together", {"host_memory": HOST_MEMORY})):
            if row["model"] == MODEL:
                one = row[way]
                options = {"memory_budget": one["budget_bytes"], **others}
                yield Ran(
                    f"at {row['share']:.0%}{', with offload' * bool(others)}",
                    options,
                    one["result"]["seconds"],
                    one["to_plain"],
                )


@functools.cache
def built() -> tuple[nn.Module, torch.Tensor]:
    kind = KINDS[MODEL]
    with torch.device("meta"), default_dtype(torch.bfloat16):
        return kind.build(kind.real).train(), torch.zeros(kind.real.batch, kind.real.length, dtype=torch.int64)


def predicted(**options: Any) -> float:
    """Returns the predicted seconds of a step for the card."""
    return float(autoremat.explain(*built(), device=DEVICE, options={"progress": False, **options}).predicted_seconds)


def main() -> None:
    free = predicted()
    columns = f"{'measured':>9} {'predicted':>9} {'to predicted':>12} {'to Inductor':>11} {'to no budget':>12}"
    lines = [f"{MODEL + ', ' + DEVICE:34} {columns}"]
    for one in steps():
        seconds = predicted(**one.options)
        lines.append(
            f"{one.way:34} {1e3 * one.seconds:6.2f} ms {1e3 * seconds:6.2f} ms {one.seconds / seconds:12.2f} "
            f"{one.to_plain:11.3f} {seconds / free:12.3f}"
        )
    lines += [
        "",
        "measured times over predicted ones; measured times over that of Inductor; predicted times over that without a budget",
    ]
    text = "\n".join(lines) + "\n"
    (RESULTS / "gpu_predictions.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
