"""Seconds to plan one budget as the backend does it, with default options and a bound, beside torch's own partitioner.

    python benchmarks/speed.py                          # GPT-2 and Llama with 12, 32 and 80 layers
    python benchmarks/speed.py --only llama-12
    python benchmarks/speed.py --explain                # a Llama of 70B for a CUDA card that is not there
    python benchmarks/speed.py --explain --lower        # with the code that Inductor generates

Joint graphs are those that Inductor hands over. Ours are planned for a share of the simulated peak; torch's partitioner gets
the same share as its `activation_memory_budget`. Seconds are the processor's, the median of a few runs. The exponent is that of
seconds against ops between the shortest and the longest model of a kind.

With `--explain`, 80 layers and one sequence of 8192 tokens in bfloat16 have no weights (meta device), and nothing runs. The
result is the report, the seconds of its parts, and the largest resident memory of this process.
"""

from __future__ import annotations

import copy
import math
import resource
import statistics
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config as functorch_config
from harness import parser, percent, run, table, write
from lowering import Lowered, build, uncached, without_kernels
from rich.table import Table
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers import LlamaConfig, LlamaForCausalLM

import autoremat
from autoremat.basics.units import format_bytes
from autoremat.compiler import compile_loop
from autoremat.compiler.joint_graph import JointGraph, PricedGraph
from autoremat.compiler.lowering import Partitioning
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.compiler.problem import Searches
from autoremat.torch_private import joint_graphs

MODELS = tuple(f"{kind}-{layers}" for kind in ("gpt2", "llama") for layers in (12, 32, 80))
SHARE, REPEATS = 0.5, 3


LLAMA: dict[str, Any] = {
    "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0, "use_cache": False,
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
}  # fmt: skip
"""Llama 3's configuration of 70B, without the number of layers."""
CARD, LONGEST = "H100-80GB", 8192


@dataclass(frozen=True)
class Row:
    """One model; processor seconds."""

    model: str
    ops: int
    seconds: float
    added: float
    """Recomputation as a share of the step."""
    gap: float
    torch_seconds: float


def measure(name: str) -> Iterator[Row]:
    """Yields the row of a model whose joint graph is planned by us and by torch. Nothing is lowered."""
    model, inputs = build(name)
    rows: list[Row] = []
    partition, plan_graph = Partitioning.__call__, compile_loop.plan_graph

    def timed(self: Partitioning[Any], joint: JointGraph) -> Any:
        torchs = seconds_of(lambda: by_torch(joint.module, joint.inputs, dict(joint.keywords)), 1)

        def plan_and_stop(priced: PricedGraph) -> PlannedGraph:
            ours = seconds_of(lambda: plan_graph(alone(priced)), REPEATS)
            planned = plan_graph(priced)
            added = planned.plan.added_seconds / priced.graph.step_seconds
            rows.append(Row(name, len(priced.graph.ops), ours, added, planned.report.gap, torchs))
            raise Lowered

        self.plan = plan_and_stop
        return partition(self, joint)

    options = {"memory_budget": SHARE, "on_planning_error": "raise"}
    with uncached(), unittest.mock.patch.object(Partitioning, "__call__", timed), without_kernels():
        torch.compile(model, backend="autoremat", options=options)(*inputs)
    yield rows[0]


def alone(priced: PricedGraph) -> PricedGraph:
    return replace(priced, problem=replace(priced.problem, searches=Searches()))


def by_torch(joint: fx.GraphModule, inputs: Any, keywords: dict[str, Any]) -> None:
    copied = fx.GraphModule(joint, copy.deepcopy(joint.graph))
    prepared = joint_graphs.prepare_joint(copied, keywords["num_fwd_outputs"])
    with warnings.catch_warnings(), functorch_config.patch(activation_memory_budget=SHARE):
        warnings.simplefilter("ignore", FutureWarning)
        min_cut_rematerialization_partition(prepared, inputs, **keywords)


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        samples.append(time.process_time() - begin)
    return statistics.median(samples)


def exponents(rows: list[Row]) -> dict[str, float]:
    """Returns the exponents of planning time in the number of ops, by kind of model."""
    found = {}
    for kind in dict.fromkeys(row.model.rpartition("-")[0] for row in rows):
        of_kind = sorted((row.ops, row.seconds) for row in rows if row.model.startswith(f"{kind}-"))
        (few, least), (many, most) = of_kind[0], of_kind[-1]
        if many > few:
            found[kind] = math.log(most / least) / math.log(many / few)
    return found


def cells(row: Row) -> dict[str, str]:
    shares = {"added %": percent(row.added), "gap %": percent(row.gap, 2)}
    times = {"ours": f"{row.seconds:.2f}", "torch's partitioner": f"{row.torch_seconds:.2f}"}
    return {"model": row.model, "ops": str(row.ops), **times, **shares}


def shown(rows: list[Row]) -> list[Table | str]:
    growth = ", ".join(f"{kind} {exponent:.2f}" for kind, exponent in exponents(rows).items())
    title = f"Planning for {SHARE:.0%} of the peak, processor seconds"
    return [table(title, list(map(cells, rows))), f"exponent of the seconds against the ops: {growth}"]


def explain(layers: int, lower: bool) -> tuple[dict[str, Any], autoremat.Report]:
    """Returns the figures of an explained step of a large model, and its report."""
    begin = time.perf_counter()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, num_hidden_layers=layers)).to(torch.bfloat16).train()
        tokens = torch.zeros((1, LONGEST), dtype=torch.int64)
    built = time.perf_counter()

    def step(tokens: torch.Tensor) -> Any:
        return model(input_ids=tokens, labels=tokens).loss

    report = autoremat.explain(step, tokens, options={"memory_budget": 0.6}, device=CARD, lower=lower)
    figures = {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds to build the model": round(built - begin, 1),
        "seconds to explain": round(time.perf_counter() - built, 1),
        "processor seconds in all": round(time.process_time(), 1),
        "seconds to plan": round(report.planning_seconds, 1),
        "largest resident memory": format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }
    return figures, report


def main() -> None:
    made = parser(__doc__, MODELS)
    made.add_argument("--explain", action="store_true", help="explain a step of a large model in place of the others")
    made.add_argument("--layers", type=int, default=80, help="of the large model")
    made.add_argument("--lower", action="store_true", help="also generate the code of the large model")
    arguments = made.parse_args()
    if not arguments.explain:
        run("speed", arguments, Row, measure, shown)
        return
    figures, report = explain(arguments.layers, arguments.lower)
    lines = [f"{name}: {value}" for name, value in figures.items()]
    write(
        "explain_70b" + "_lowered" * arguments.lower,
        arguments.output,
        [*lines, "", f"{report}\n\n{report.details}"],
        [figures],
    )


if __name__ == "__main__":
    main()
