"""AdamW in the backward of a Llama of twelve layers whose weights are sharded over two processes with gloo.

    python benchmarks/sharded_gradients.py                       # uncompiled planned graphs
    python benchmarks/sharded_gradients.py --compiler inductor   # generated code

Each way to shard has a table as that of `early_gradients.py`: `fully_shard` of the model as one group, `fully_shard` of each
layer, and gathers in the graph. The hooks are on the shards. A peak is the larger one of both ranks, of the least of several
steps each: a thread of gloo can hold a buffer longer than the step needs it. One row cuts a graph that autoremat leaves whole.
Written to `benchmarks/results/sharded_gradients_COMPILER.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from early_gradients import TokenLoss, Way, minimum, planned, row_of, steps_of, table  # noqa: E402
from processes import run_ranks, values  # noqa: E402
from sharded_models import shard_weights  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from autoremat.compiler import early_gradients  # noqa: E402


def by_fully_shard(compile: Callable[[TokenLoss], Any], by_layer: bool) -> Callable[[TokenLoss], Any]:
    """Returns a function that shards the model, as one group or by layer, and then compiles it."""

    def shard_and_compile(model: TokenLoss) -> Any:
        for layer in model.model.model.layers if by_layer else ():
            fully_shard(layer)
        return compile(fully_shard(model))

    return shard_and_compile


def layer_by_layer(compiler: str) -> Callable[[TokenLoss], Any]:
    """Returns a function that compiles each layer with a plan, and shards it."""

    def compile_and_shard(model: TokenLoss) -> Any:
        for layer in model.model.model.layers:
            layer.compile(backend="autoremat", options={"compiler": compiler, "cost_model": "roofline"})
        return by_fully_shard(lambda model: model, by_layer=True)(model)

    return compile_and_shard


def cut_anyway(compile: Callable[[TokenLoss], Any]) -> Callable[[TokenLoss], Any]:
    """Returns a function that compiles as ``compile`` does, without a look at ``fully_shard``."""

    def compile_blindly(model: TokenLoss) -> Any:
        step = compile(model)

        def call(tokens: torch.Tensor) -> Any:
            with mock.patch.object(early_gradients, "sharded_inputs", return_value=frozenset()):
                return step(tokens)

        return call

    return compile_blindly


def ways_to_shard(compiler: str) -> Iterator[list[Way]]:
    """Yields the ways of one table after the other."""
    whole = planned(compiler, hooks_free_gradients=False, early_gradients="auto")
    parts = planned(compiler, hooks_free_gradients=False)
    yield [
        Way("fully_shard of the model, then compile", by_fully_shard(whole, by_layer=False)),
        Way("the same, cut in 4 parts", cut_anyway(by_fully_shard(parts, by_layer=False))),
        Way("compile, then fully_shard of the model", lambda model: fully_shard(whole(model))),
    ]
    yield [
        Way("fully_shard of each layer, then compile", by_fully_shard(whole, by_layer=True)),
        Way("each layer compiled, then fully_shard", layer_by_layer(compiler)),
    ]

    def gathered(**options: Any) -> Callable[[TokenLoss], Any]:
        compile = planned(compiler, chunk_loss=False, **options)
        return lambda model: compile(shard_weights(model))

    least = minimum(gathered(early_gradients=False, memory_budget=1))
    least_of_parts = minimum(gathered(memory_budget=1))
    yield [
        Way("gathers in the graph, whole, no budget", gathered(early_gradients=False)),
        Way("4 parts, no budget", gathered()),
        Way("whole, its minimum", gathered(early_gradients=False, memory_budget=least), least),
        Way("4 parts, the minimum of the whole", gathered(memory_budget=least), least),
        Way("4 parts, their minimum", gathered(memory_budget=least_of_parts), least_of_parts),
    ]


def on_rank(rank: int, compiler: str) -> list[list[dict[str, Any]]]:
    """Returns the rows of the tables on one rank."""
    found = []
    for ways in ways_to_shard(compiler):
        steps_of(ways)
        found.append([row_of(way) for way in ways])
    return found


def measured(compiler: str) -> list[list[Way]]:
    """Returns the tables of both ranks: times of the first, peaks of the larger, and bits of both."""
    import sharded_gradients as here  # the ranks import the function by its module's name

    ranks = values(run_ranks(here.on_rank, 2, 1800.0, (compiler,), {"AUTOREMAT_PROGRESS": "0"}))

    def joint(rows: tuple[dict[str, Any], ...]) -> Way:
        worst = {"peak_bytes": max(row["peak_bytes"] for row in rows), "same_bits": all(row["same_bits"] for row in rows)}
        return Way(**(rows[0] | worst), compile=lambda model: model)

    return [[joint(rows) for rows in zip(*tables, strict=True)] for tables in zip(*ranks, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", choices=("aot_eager", "inductor"), default="aot_eager")
    compiler: str = parser.parse_args().compiler
    torch.set_num_threads(1)  # those of a rank, for the title
    tables = measured(compiler)
    text = "\n".join(table(ways, compiler) for ways in tables)
    print(text)
    results = ROOT / "benchmarks" / "results" / f"sharded_gradients_{compiler}"
    results.with_suffix(".txt").write_text(text)
    results.with_suffix(".json").write_text(json.dumps([row_of(way) for ways in tables for way in ways], indent=1) + "\n")


if __name__ == "__main__":
    main()
