"""The gain of computing the projection onto the vocabulary and the loss in parts, for GPT-2's vocabulary of 50257 words.

    python benchmarks/chunk_loss.py            # compiled by Inductor: peaks of the code and measured peaks
    python benchmarks/chunk_loss.py --planned  # by the simulator and the cost model alone, without compiling

Each number of parts is planned without a budget, then compiled for the smallest peak that its plans reach.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness import measured_peak, mebibytes, parser, run, table, training_step
from rich.table import Table
from torch import nn

import autoremat

WORDS, LENGTH, HIDDEN, HEADS = 50257, 512, 256, 4
PARTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Row:
    """One number of parts; bytes above those live when the step begins, seconds of forward and backward."""

    parts: str
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


def options_of(parts: str) -> dict[str, Any]:
    return {"chunk_loss": int(parts) if parts != "1" else False}


def planned(model: nn.Module, tokens: torch.Tensor, parts: str, whole: Row | None) -> Row:
    """Returns the row by simulator and cost model. ``whole`` is that of one part."""

    def explained(**more: Any) -> tuple[autoremat.Plan, float]:
        plan = autoremat.explain(model, tokens, options=options_of(parts) | more).plan
        assert plan is not None
        return plan, plan.graph.step_seconds + plan.added_seconds

    free, free_seconds = explained()
    tight, tight_seconds = explained(memory_budget=1, on_infeasible="best_effort")
    same = explained(memory_budget=whole.smallest_peak_bytes, on_infeasible="best_effort")[1] if whole else tight_seconds
    return Row(parts, free.peak_bytes, tight.peak_bytes, free_seconds, tight_seconds, same)


def measured(row: Row, model: nn.Module, tokens: torch.Tensor) -> Row:
    """Returns ``row`` with the peaks of the code for the smallest peak."""
    torch._dynamo.reset()
    gc.collect()
    options = options_of(row.parts) | {"memory_budget": row.smallest_peak_bytes, "on_infeasible": "best_effort"}
    step = training_step(model, (tokens,), backend="autoremat", options=options)
    with warnings.catch_warnings():  # the code may need more than was simulated; that is in the table
        warnings.simplefilter("ignore", autoremat.BudgetWarning)
        for _ in range(2):
            step()
    peak = measured_peak(step, model)
    return replace(row, code_bytes=autoremat.reports()[-1].compiled_peak_bytes, measured_bytes=peak)


def cells(row: Row) -> dict[str, str]:
    return {
        "parts": row.parts,
        "peak without a budget": mebibytes(row.unbounded_peak_bytes),
        "smallest peak": mebibytes(row.smallest_peak_bytes),
        "of its code": mebibytes(row.code_bytes),
        "measured": mebibytes(row.measured_bytes),
        "seconds without a budget": f"{row.unbounded_seconds:.3f}",
        "within 1 part's smallest": f"{row.same_peak_seconds:.3f}",
        "within the smallest": f"{row.smallest_seconds:.3f}",
    }


def shown(rows: list[Row]) -> list[Table]:
    return [table("The loss in parts: peaks in MiB, predicted seconds of a step", list(map(cells, rows)))]


def main() -> None:
    made = parser(__doc__, map(str, PARTS))
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--planned", action="store_true", help="without compiling")
    arguments = made.parse_args()
    model, tokens = build(arguments.layers, arguments.batch)
    whole: list[Row] = []

    def measure(parts: str) -> Iterator[Row]:
        row = planned(model, tokens, parts, whole[0] if whole else None)
        whole.append(row)
        yield row if arguments.planned else measured(row, model, tokens)

    setup = {"layers": arguments.layers, "hidden": HIDDEN, "words": WORDS, "tokens": f"{arguments.batch} x {LENGTH}"}
    run("chunk_loss", arguments, Row, measure, shown, **setup)


if __name__ == "__main__":
    main()
