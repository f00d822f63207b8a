"""AdamW in the backward of a Llama of twelve layers: as a whole graph, in parts, and by one compiled graph for each layer.

    python benchmarks/early_gradients.py                       # uncompiled planned graphs: peaks, times and bits
    python benchmarks/early_gradients.py --compiler inductor   # generated code
    python benchmarks/early_gradients.py --layers 4 --steps 5  # a quick look, which writes no results

Each way starts from the same weights and sees the same batches. The peak is that of a later step, above the live bytes at its
start: gradients, activations and temporaries of the optimizer. The ways take their steps in turn, in rounds that begin with
another way each. The table has the median seconds of the processor, and the median and the quartiles of the ratio to the first
way in the same round. It also has the number of planned graphs, and whether all losses and parameters have the bits of the
first row. A minimum is the smallest budget that has a plan. Written to `benchmarks/results/early_gradients_COMPILER.txt` and
`.json`.
`sharded_gradients.py` does the same with sharded weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoremat
from autoremat.basics.errors import BudgetInfeasible, find_cause
from autoremat.basics.units import format_bytes

ROOT = Path(__file__).resolve().parent.parent
TOKENS, VOCABULARY = (1, 64), 1024
LAYERS, STEPS = 12, 15
PEAKS = 4
"""Steps whose peak is measured."""


class TokenLoss(nn.Module):
    """A language model that returns only its loss."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=192,
                intermediate_size=512,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=4,
                vocab_size=VOCABULARY,
                use_cache=False,
            )
        )

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens, labels=tokens).loss


def step_in_backward(model: nn.Module) -> None:
    """Gives each parameter an AdamW that steps, and frees its gradient, as soon as that is made."""
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@dataclass
class Way:
    """A way to compile the model, and what was measured."""

    name: str
    compile: Callable[[TokenLoss], Any] = field(repr=False)
    budget_bytes: int | None = None
    peak_bytes: int = 0
    graphs: int = 0
    seconds: list[float] = field(default_factory=list)
    same_bits: bool = True


def planned(compiler: str, **options: Any) -> Callable[[TokenLoss], Any]:
    """Returns a function that compiles the whole model with a plan, in four parts unless ``options`` say otherwise."""
    own = {"compiler": compiler, "cost_model": "roofline", "hooks_free_gradients": True, "early_gradients": 4} | options
    return lambda model: torch.compile(model, backend="autoremat", options=own)


def per_layer(compiler: str) -> Callable[[TokenLoss], Any]:
    """Returns a function that compiles each layer by torch's own backend."""

    def compile_layers(model: TokenLoss) -> TokenLoss:
        for layer in model.model.model.layers:
            layer.compile(backend=compiler)
        return model

    return compile_layers


def minimum(compile: Callable[[TokenLoss], Any], layers: int = LAYERS) -> int:
    """Returns the smallest budget that has a plan. ``compile`` asks for one byte."""
    torch.compiler.reset()
    model = TokenLoss(layers)
    step = compile(model)
    step_in_backward(model)
    try:
        step(torch.zeros(TOKENS, dtype=torch.int64))
    except Exception as error:
        found = find_cause(error, BudgetInfeasible)
        if found is None:
            raise
        return found.minimum_bytes
    raise AssertionError("one byte is no budget")


def steps_of(ways: list[Way], layers: int = LAYERS, rounds: int = STEPS) -> None:
    """Trains by all ways in turn, and notes peaks, times and bits."""
    torch.compiler.reset()
    models = [TokenLoss(layers) for _ in ways]
    steps = [way.compile(model) for way, model in zip(ways, models, strict=True)]
    for model in models:
        step_in_backward(model)  # after compile, which may shard the parameters
    for number in range(2 + rounds):
        tokens = torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(number))
        losses = [0.0] * len(ways)
        for place in (*range(number % len(ways), len(ways)), *range(number % len(ways))):
            way, planned_before = ways[place], len(autoremat.reports())
            begun = time.process_time()
            loss = steps[place](tokens)
            loss.backward()
            if number >= 2:
                way.seconds.append(time.process_time() - begun)
            way.graphs += len(autoremat.reports()) - planned_before
            losses[place] = loss.item()
            del loss
        for way, one in zip(ways, losses, strict=True):
            way.same_bits &= one == losses[0]
    for way, model in zip(ways, models, strict=True):
        pairs = zip(model.parameters(), models[0].parameters(), strict=True)
        way.same_bits &= all(torch.equal(local(own), local(first)) for own, first in pairs)
    for way, step in zip(ways, steps, strict=True):
        peaks = []
        for _ in range(PEAKS):
            with autoremat.track_peak("cpu") as peak:
                step(tokens).backward()
            peaks.append(peak.bytes)
        way.peak_bytes = min(peaks)


def local(parameter: Any) -> torch.Tensor:
    """Returns what this rank has of a parameter."""
    own: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return own


def row_of(way: Way) -> dict[str, Any]:
    """Returns what was measured."""
    return {key: value for key, value in asdict(way).items() if key != "compile"}


def table(ways: list[Way], compiler: str, layers: int = LAYERS) -> str:
    """Returns the results as text."""
    lines = [f"AdamW in the backward of a Llama of {layers} layers, {compiler}, {torch.get_num_threads()} threads", ""]
    lines += [f"{'way':44} {'graphs':>6} {'budget':>11} {'peak':>11} {'CPU, ms':>7} {'time':>7} {'quartiles':>15}  bits"]
    for way in ways:
        ratios = [own / first for own, first in zip(way.seconds, ways[0].seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        budget = "" if way.budget_bytes is None else format_bytes(way.budget_bytes)
        line = f"{way.name:44} {way.graphs or '':>6} {budget:>11} {format_bytes(way.peak_bytes):>11}"
        line += f" {1000 * statistics.median(way.seconds):7.1f} {middle:6.1%} {low:6.1%}-{high:6.1%}"
        lines.append(f"{line}  {'same' if way.same_bits else 'others'}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    compiler: str = given.compiler
    whole = minimum(planned(compiler, memory_budget=1, early_gradients=False), given.layers)
    parts = minimum(planned(compiler, memory_budget=1), given.layers)
    ways = [
        Way("whole, no budget", planned(compiler, early_gradients=False)),
        *(Way(f"{count} parts, no budget", planned(compiler, early_gradients=count)) for count in (4, 8, 16)),
        Way("whole, its minimum", planned(compiler, early_gradients=False, memory_budget=whole), whole),
        Way("4 parts, the minimum of the whole", planned(compiler, memory_budget=whole), whole),
        Way("4 parts, their minimum", planned(compiler, memory_budget=parts), parts),
        Way("chosen parts, the minimum of 4", planned(compiler, early_gradients="auto", memory_budget=parts), parts),
        Way(f"each layer by {compiler}", per_layer(compiler)),
    ]
    steps_of(ways, given.layers, given.steps)
    text = table(ways, compiler, given.layers)
    print(text)
    if (given.layers, given.steps) != (LAYERS, STEPS):
        return
    results = ROOT / "benchmarks" / "results" / f"early_gradients_{compiler}"
    results.with_suffix(".txt").write_text(text)
    results.with_suffix(".json").write_text(json.dumps([row_of(way) for way in ways], indent=1) + "\n")


if __name__ == "__main__":
    main()
