"""The gain of computing the projection onto the vocabulary and the loss in parts, for GPT-2's vocabulary of 50257 words.

    python benchmarks/chunk_loss.py            # compiled by Inductor: peaks of the code and measured peaks
    python benchmarks/chunk_loss.py --times    # with step times, which say something only on an idle machine
    python benchmarks/chunk_loss.py --planned  # by the simulator and the cost model alone, without compiling

Each number of parts is planned without a budget, then compiled for the smallest peak that its plans reach.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import autoremat

ROOT = Path(__file__).resolve().parent.parent
WORDS, LENGTH, HIDDEN, HEADS = 50257, 512, 256, 4
PARTS = (1, 2, 4, 8, 16)
TIMED_STEPS, WARM_STEPS = 7, 2


@dataclass(frozen=True)
class Row:
    """One number of parts; bytes above those live when the step begins, seconds of forward and backward."""

    parts: int
    unbounded_peak_bytes: int
    """Without recomputation, by the simulator."""
    smallest_peak_bytes: int
    """That any plan found reaches, by the simulator."""
    unbounded_seconds: float
    """Without recomputation, by the cost model."""
    smallest_seconds: float
    """At the smallest peak, by the cost model."""
    same_peak_seconds: float
    """Within the smallest peak of one part, by the cost model."""
    code_bytes: int | None = None
    """Of the code for the smallest peak."""
    measured_bytes: int | None = None
    measured_seconds: float | None = None


class Loss(nn.Module):
    """A Hugging Face model with its own loss and nothing else returned."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, labels=tokens).loss


def build(layers: int, batch: int) -> tuple[nn.Module, torch.Tensor]:
    """Returns a GPT-2, small but for its vocabulary, and tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_embd=HIDDEN, n_layer=layers, n_head=HEADS, n_positions=LENGTH, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else the library warns that this model names no loss, which breaks the graph
    return Loss(model), torch.randint(0, WORDS, (batch, LENGTH))


def planned(model: nn.Module, tokens: torch.Tensor, parts: int, whole: Row | None) -> Row:
    """Returns the row by simulator and cost model. ``whole`` is that of one part."""
    options: dict[str, Any] = {"chunk_loss": parts if parts > 1 else False}

    def explained(**more: Any) -> tuple[autoremat.Plan, float]:
        plan = autoremat.explain(model, tokens, options=options | more).plan
        assert plan is not None
        return plan, plan.graph.step_seconds + plan.added_seconds

    free, free_seconds = explained()
    tight, tight_seconds = explained(memory_budget=1, on_infeasible="best_effort")
    same = explained(memory_budget=whole.smallest_peak_bytes, on_infeasible="best_effort")[1] if whole else tight_seconds
    return Row(parts, free.peak_bytes, tight.peak_bytes, free_seconds, tight_seconds, same)


def measured(row: Row, model: nn.Module, tokens: torch.Tensor, times: bool) -> Row:
    """Returns ``row`` with the peaks of the code for the smallest peak."""
    torch._dynamo.reset()
    gc.collect()
    options: dict[str, Any] = {"chunk_loss": row.parts if row.parts > 1 else False, "memory_budget": row.smallest_peak_bytes,
                               "on_infeasible": "best_effort"}  # fmt: skip
    compiled = torch.compile(model, backend="autoremat", options=options)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(tokens).backward()

    with warnings.catch_warnings():  # the code may need more than was simulated; that is in the table
        warnings.simplefilter("ignore", autoremat.BudgetWarning)
        for _ in range(WARM_STEPS):
            step()
    model.zero_grad(set_to_none=True)
    with autoremat.track_peak("cpu") as peak:
        step()
    code = autoremat.reports()[-1].compiled_peak_bytes
    return replace(row, code_bytes=code, measured_bytes=peak.bytes, measured_seconds=median_seconds(step) if times else None)


def median_seconds(step: Callable[[], None]) -> float:
    samples = []
    for _ in range(TIMED_STEPS):
        begin = time.perf_counter()
        step()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def write(rows: list[Row], setup: dict[str, Any], folder: Path) -> None:
    """Prints the table and writes it to chunk_loss.txt and chunk_loss.json in ``folder``."""
    table = Table(title="The loss in parts: peaks in MiB, predicted seconds of a step")
    peaks = ("peak without a budget", "smallest peak", "of its code", "measured")
    seconds = ("seconds without a budget", "within 1 part's smallest", "within the smallest", "measured there")
    for column in ("parts", *peaks, *seconds):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = (row.unbounded_peak_bytes, row.smallest_peak_bytes, row.code_bytes, row.measured_bytes)
        times = (row.unbounded_seconds, row.same_peak_seconds, row.smallest_seconds, row.measured_seconds)
        texts = ["" if size is None else f"{size / 2**20:.1f}" for size in sizes]
        texts += ["" if one is None else f"{one:.3f}" for one in times]
        table.add_row(str(row.parts), *texts)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "chunk_loss.txt").open("w") as file:
        for console in (Console(width=120), Console(width=120, file=file)):
            console.print(", ".join(f"{key}: {value}" for key, value in setup.items()), highlight=False)
            console.print(table)
    (folder / "chunk_loss.json").write_text(json.dumps(setup | {"rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--parts", type=int, nargs="+", default=list(PARTS))
    parser.add_argument("--planned", action="store_true", help="without compiling")
    parser.add_argument("--times", action="store_true", help="measure step times too")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    model, tokens = build(arguments.layers, arguments.batch)
    rows: list[Row] = []
    for parts in arguments.parts:
        row = planned(model, tokens, parts, rows[0] if rows else None)
        rows.append(row if arguments.planned else measured(row, model, tokens, arguments.times))
        print(rows[-1], flush=True)
    setup = {"torch": torch.__version__, "threads": torch.get_num_threads(), "layers": arguments.layers, "hidden": HIDDEN,
             "words": WORDS, "tokens": f"{arguments.batch} x {LENGTH}"}  # fmt: skip
    write(rows, setup, arguments.output)


if __name__ == "__main__":
    main()
