"""Places of the cuts for early gradients: balanced ones against random ones, by predicted peaks and seconds.

    python benchmarks/cut_places.py              # four parts of four models
    python benchmarks/cut_places.py --draws 20

Balanced cuts are those that `early_gradients=4` makes. Random ones lie at gaps between the first reads of parameters, among the
half of the gaps that the fewest bytes cross. All gradients count as freed by hooks. For each division the parts are planned
together, without generated code: the table has the minimum peak found, and the predicted seconds under a budget 25 % above the
minimum of the balanced cuts. Nothing is timed. Written to `benchmarks/results/cut_places.txt` and `.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from early_gradients import TOKENS, TokenLoss
from model_zoo import bert, resnet, t5
from torch import fx, nn

from autoremat.basics.units import format_bytes
from autoremat.compiler.cuts import Cuts, Division
from autoremat.compiler.split_budget import planned_together
from autoremat.options.options import Options
from autoremat.planner.multigraph.step_profile import Step
from autoremat.request.budgets import request_of
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private import split_graphs
from autoremat.torch_private.split_graphs import GradientHooks

ROOT = Path(__file__).resolve().parent.parent
PARTS = 4
BUDGET = 1.25
"""The budget as a multiple of the minimum peak of balanced cuts."""

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "llama-4": lambda: (TokenLoss(4), (torch.zeros(TOKENS, dtype=torch.int64),)),
    "bert-6": lambda: bert(6),
    "t5-3": lambda: t5(3),
    "resnet-18": lambda: resnet("basic", [2, 2, 2, 2]),
}
"""Gradients take most memory of the first one, activations that of the others."""


@dataclass(frozen=True)
class Found:
    """What the planner finds for one division."""

    gradient_bytes: int
    crossing_bytes: int
    minimum_bytes: int
    seconds: float | None
    """Predicted seconds of the step under the budget; None if it does not fit."""


def random_places(cuts: Cuts, draw: random.Random) -> list[int]:
    """Returns places for ``PARTS`` parts among the narrow gaps between first reads of parameters."""
    narrowest: dict[int, int] = {}
    for place in cuts.allowed:
        gap = cuts.arrived[place - 1]
        if gap not in narrowest or (cuts.crossing[place] or 0) < (cuts.crossing[narrowest[gap]] or 0):
            narrowest[gap] = place
    narrow = sorted(narrowest.values(), key=lambda place: cuts.crossing[place] or 0)[: max(PARTS, len(narrowest) // 2)]
    return draw.sample(narrow, PARTS - 1)


def searched(build: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]], draws: int) -> list[Found]:
    """Returns what the planner finds for balanced cuts, and then for ``draws`` random ones."""
    found: list[Found] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        around = Surroundings.of(module, inputs)
        options = Options.parse({"compiler": "aot_eager", "cost_model": "roofline", "memory_budget": 1 << 40})
        request, cuts = request_of(options, around), Cuts(module, inputs, "cpu")
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        trained = (name for name, tensor in zip(names, inputs, strict=True) if isinstance(tensor, nn.Parameter))
        hooks = GradientHooks(frozenset(trained))

        def planned(division: Division) -> Step:
            with split_graphs.split_to_plan(module, inputs, division.part_of, hooks) as split:
                parts = planned_together(split, request, {})
            assert parts is not None
            return parts.agreed.step

        draw = random.Random(0)
        divisions = [cuts.divided(PARTS), *(cuts.divided_at(random_places(cuts, draw)) for _ in range(draws))]
        budget = 0
        for division in divisions:
            step = planned(division)
            budget = budget or int(BUDGET * step.minimum_peak_bytes)
            seconds = step.shared_out(budget).predicted_seconds if step.minimum_peak_bytes <= budget else None
            found.append(Found(division.gradient_bytes, sum(division.crossing_bytes), step.minimum_peak_bytes, seconds))
        return module

    torch.compiler.reset()
    model, inputs = build()
    torch.compile(model, backend=backend)(*inputs)
    return found


def line(name: str, kind: str, figures: list[str], above: float) -> str:
    return f"{name:10} {kind:11} " + " ".join(f"{one:>11}" for one in figures) + f" {above:20.1%}"


def table(found: dict[str, list[Found]]) -> str:
    """Returns the results as text."""
    lines = [f"{PARTS} parts, and {len(next(iter(found.values()))) - 1} random places of the cuts", ""]
    lines += [f"{'model':10} {'':11} {'balanced':>11} {'best':>11} {'median':>11} {'balanced above best':>20}"]
    for name, (balanced, *others) in found.items():
        peaks = [one.minimum_bytes for one in others]
        figures = map(format_bytes, (balanced.minimum_bytes, min(peaks), int(statistics.median(peaks))))
        lines.append(line(name, "minimum", [*figures], balanced.minimum_bytes / min(peaks) - 1))
        seconds = [one.seconds for one in others if one.seconds is not None]
        assert balanced.seconds is not None
        if seconds:
            times = [f"{1000 * one:.2f} ms" for one in (balanced.seconds, min(seconds), statistics.median(seconds))]
            lines.append(line("", "step", times, balanced.seconds / min(seconds) - 1))
        else:
            lines.append(f"{'':10} {'step':11} {1000 * balanced.seconds:8.2f} ms  no random division fits")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4)
    draws: int = parser.parse_args().draws
    found = {name: searched(build, draws) for name, build in MODELS.items()}
    text = table(found)
    print(text)
    results = ROOT / "benchmarks" / "results" / "cut_places"
    results.with_suffix(".txt").write_text(text)
    rows = {name: [asdict(one) for one in ones] for name, ones in found.items()}
    results.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
