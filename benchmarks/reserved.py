"""Bytes that CUDA's caching allocator reserves for plans on a named card, by the replay of its rules; no GPU is needed.

    python benchmarks/reserved.py
    python benchmarks/reserved.py --models llama gpt2

Each model is planned without a budget, and under shares of its baseline that count allocated or reserved bytes. Inductor
generates the code of each plan and compiles no kernel. Rows of earlier runs stay unless they are measured again. Written to
`benchmarks/results/reserved.txt` and `.json`. The exit code is 1 if a budget on reserved bytes does not hold by the replay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import model_zoo
import torch
from rich.console import Console
from rich.table import Table

import autoremat

RESULTS = Path(__file__).resolve().parent / "results"
CARD = "H100-80GB"
SIZES = {"HIDDEN": 512, "HEADS": 8, "BATCH": 8, "LENGTH": 1024, "VOCABULARY": 8192, "IMAGES": 256}
"""Of the models, instead of those that suit a CPU."""

MODELS: dict[str, Callable[[], model_zoo.Built]] = {
    "llama": lambda: model_zoo.llama(2),
    "gpt2": lambda: model_zoo.gpt2(2),
    "vit": lambda: model_zoo.vit(2),
    "resnet": lambda: model_zoo.resnet("basic", [1, 1, 1, 1]),
    "unet": lambda: (model_zoo.UNet((32, 64)), model_zoo.images(128)),
}
SHARE = 0.7
EXPANDABLE = "expandable_segments:True"
CASES: tuple[tuple[str, str, float | None], ...] = (
    ("allocated", "", None),
    ("allocated", "", SHARE),
    ("reserved", "", SHARE),
    ("reserved", EXPANDABLE, SHARE),
)
"""The bytes that the budget counts, the settings of the allocator, and the budget as a share of the baseline."""

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One model under one budget, in bytes."""

    model: str
    count: str
    settings: str
    share: float | None
    budget_bytes: int | None
    allocated_bytes: int
    """Peak of the code, with workspaces and code headroom."""
    reserved_bytes: int
    """Under the settings."""
    default_bytes: int
    expandable_bytes: int
    least_bytes: int
    simulated_reserved_bytes: int
    """Of the plan that ``explain`` finds without code, which can be another one."""
    unused: float
    """Share of the reserved bytes that is not allocated at the peak."""
    overhead: float
    attempts: int
    seconds: float
    """Of ``explain`` with code."""


@contextlib.contextmanager
def allocator(settings: str) -> Iterator[None]:
    """Sets the allocator of this process."""
    torch._C._accelerator_setAllocatorSettings(settings)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def row(name: str, count: str, settings: str, share: float | None) -> Row:
    with torch.device("meta"):
        model, inputs = MODELS[name]()
    options: dict[str, Any] = {"cost_model": "roofline", "progress": False}
    if share is not None:
        options |= {"memory_budget": share, "count": count}
    with allocator(settings):
        simulated = autoremat.explain(model, *inputs, device=CARD, options=options)
        begin = time.perf_counter()
        report = autoremat.explain(model, *inputs, device=CARD, options=options, lower=True)
        seconds = time.perf_counter() - begin
    reserved = report.reserved
    assert reserved is not None
    assert reserved.of_code
    assert simulated.reserved is not None
    return Row(
        model=name,
        count=count if share is not None else "",
        settings=settings,
        share=share,
        budget_bytes=report.budget_bytes,
        allocated_bytes=report.peak_bytes,
        reserved_bytes=reserved.bytes,
        default_bytes=reserved.default_bytes,
        expandable_bytes=reserved.expandable_bytes,
        least_bytes=reserved.least_bytes,
        simulated_reserved_bytes=simulated.reserved.bytes,
        unused=reserved.fragmentation,
        overhead=report.overhead,
        attempts=report.replans + 1,
        seconds=seconds,
    )


def mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:.1f}"


def table_of(rows: list[Row]) -> Table:
    table = Table(title=f"Reserved bytes for {CARD}, by the replay of the generated code's allocations; MiB")
    for column in ("model", "budget counts", "segments"):
        table.add_column(column, no_wrap=True)
    for column in ("budget", "allocated", "reserved", "default", "expandable", "least", "simulated", "unused", "overhead",
                   "attempts"):  # fmt: skip
        table.add_column(column, justify="right")
    for one in rows:
        table.add_row(
            one.model,
            one.count or "-",
            "expandable" if one.settings else "default",
            *map(mebibytes, (one.budget_bytes, one.allocated_bytes, one.reserved_bytes, one.default_bytes)),
            *map(mebibytes, (one.expandable_bytes, one.least_bytes, one.simulated_reserved_bytes)),
            f"{one.unused:.1%}",
            f"{one.overhead:.1%}",
            str(one.attempts),
        )
    return table


HEAD = """\
"reserved": under the settings of the row ("segments"). "default", "expandable": the same code without settings, and with
expandable segments. "least": the least memory of the device with which the allocator gets by, if it gives free segments back to
the driver. "simulated": reserved bytes by the simulated plan, without code. "unused": share of the reserved bytes that is not
allocated at the peak. "overhead": recomputation, as a share of the forward.
"""


def verdict(rows: list[Row]) -> tuple[str, bool]:
    """Returns a summary, and True if all budgets on reserved bytes hold."""
    bounded = [one for one in rows if one.count == "reserved"]
    over = [one for one in bounded if one.budget_bytes is not None and one.reserved_bytes > one.budget_bytes]
    ignored = [one for one in rows if one.count == "allocated" and one.budget_bytes is not None]
    beyond = [one for one in ignored if one.reserved_bytes > (one.budget_bytes or 0)]
    largest = max((one.reserved_bytes / (one.budget_bytes or 1) - 1 for one in beyond), default=0.0)
    return (
        f"Budgets on reserved bytes: {len(bounded) - len(over)} of {len(bounded)} hold. Under budgets on allocated bytes, "
        f"{len(beyond)} of {len(ignored)} plans reserve more than the budget, at most {largest:.1%} more.",
        not over,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    for size, amount in SIZES.items():
        setattr(model_zoo, size, amount)
    for name in arguments.models:
        write([row(name, *case) for case in CASES])
    rows = known_rows()
    Console(width=160).print(table_of(rows))
    text, holds = verdict(rows)
    print(text)
    return 0 if holds else 1


def known_rows() -> list[Row]:
    """Returns the rows of this and earlier runs."""
    file = RESULTS / "reserved.json"
    return [Row(**one) for one in json.loads(file.read_text())] if file.exists() else []


def write(found: list[Row]) -> None:
    """Writes the rows of a model. Those of other models stay."""
    names = {one.model for one in found}
    rows = [one for one in known_rows() if one.model not in names] + found
    rows.sort(key=lambda one: list(MODELS).index(one.model))
    (RESULTS / "reserved.json").write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    with (RESULTS / "reserved.txt").open("w") as file:
        file.write(HEAD + "\n")
        Console(file=file, width=160).print(table_of(rows))
        file.write(verdict(rows)[0] + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
