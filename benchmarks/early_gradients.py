"""AdamW in the backward of a Llama of twelve layers: as a whole graph, in parts, and by one compiled graph for each layer.

    python benchmarks/early_gradients.py                       # uncompiled planned graphs: peaks, times and bits
    python benchmarks/early_gradients.py --compiler inductor   # generated code
    python benchmarks/early_gradients.py --layers 4 --steps 5 --output /tmp/early

Each way starts from the same weights and sees the same batches. The peak is that of a later step, above the live bytes at its
start: gradients, activations and temporaries of the optimizer. The ways take their steps in turn, in rounds that begin with
another way each. The table has the median seconds of the processor, and the median and the quartiles of the ratio to the first
way in the same round. It also has the number of planned graphs, and whether all losses and parameters have the bits of the
first row. A minimum is the smallest budget that has a plan.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from harness import measured_peak, mebibytes, parser, percent, table, write
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoremat
from autoremat.basics.errors import BudgetInfeasible, find_cause

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


def minimum(compile: Callable[[TokenLoss], Any], layers: int) -> int:
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


def train(ways: list[Way], layers: int, rounds: int) -> None:
    """Trains by all ways in turn, and notes peaks, times and bits."""
    torch.compiler.reset()
    models = [TokenLoss(layers) for _ in ways]
    steps = [way.compile(model) for way, model in zip(ways, models, strict=True)]
    for model in models:
        step_in_backward(model)
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
        way.same_bits &= all(map(torch.equal, model.parameters(), models[0].parameters()))
    for way, step in zip(ways, steps, strict=True):
        way.peak_bytes = min(measured_peak(lambda step=step: step(tokens).backward()) for _ in range(PEAKS))


def cells(way: Way, first: Way) -> dict[str, object]:
    ratios = [own / other for own, other in zip(way.seconds, first.seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "way": way.name,
        "graphs": way.graphs,
        "budget": mebibytes(way.budget_bytes),
        "peak": mebibytes(way.peak_bytes),
        "processor, ms": f"{1000 * statistics.median(way.seconds):.1f}",
        "time, %": percent(middle),
        "quartiles": f"{low:.1%} to {high:.1%}",
        "bits": "same" if way.same_bits else "others",
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--compiler", choices=("aot_eager", "inductor"), default="aot_eager")
    made.add_argument("--layers", type=int, default=LAYERS)
    made.add_argument("--steps", type=int, default=STEPS)
    given = made.parse_args()
    compiler: str = given.compiler
    whole = minimum(planned(compiler, memory_budget=1, early_gradients=False), given.layers)
    parts = minimum(planned(compiler, memory_budget=1), given.layers)
    ways = [
        Way("whole, no budget", planned(compiler, early_gradients=False)),
        *(Way(f"{count} parts, no budget", planned(compiler, early_gradients=count)) for count in (4, 8, 16)),
        Way("whole, its minimum", planned(compiler, early_gradients=False, memory_budget=whole), whole),
        Way("4 parts, the minimum of the whole", planned(compiler, memory_budget=whole), whole),
        Way("4 parts, their minimum", planned(compiler, memory_budget=parts), parts),
        Way("8 parts, the minimum of 4", planned(compiler, early_gradients=8, memory_budget=parts), parts),
        Way(f"each layer by {compiler}", per_layer(compiler)),
    ]
    train(ways, given.layers, given.steps)
    title = f"AdamW in the backward of a Llama of {given.layers} layers, {compiler}; MiB"
    rows = [{key: value for key, value in asdict(way).items() if key != "compile"} for way in ways]
    write(f"early_gradients_{compiler}", given.output, [table(title, [cells(way, ways[0]) for way in ways])], rows)


if __name__ == "__main__":
    main()
