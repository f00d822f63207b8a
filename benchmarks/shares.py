"""Shares of the peak without autoremat: measured peaks against those of plain Inductor.

    python benchmarks/shares.py                          # twelve models, shares of 0.9, 0.7 and 0.5
    python benchmarks/shares.py --resume                 # goes on from the rows that are there
    python benchmarks/shares.py --only gpt2

A cell is *over* if the measured peak exceeds the share of plain Inductor's measured peak by more than two points and no warning
names the least share. A reference is *off* if it differs from that peak by more than three per cent. Peaks are the same on a
busy machine as on an idle one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import model_zoo
import torch
from harness import measured_peak, mebibytes, parser, run, table, training_step
from lowering import PATIENT
from model_zoo import Built
from rich.table import Table
from torch import nn

import autoremat

SHARES = (0.9, 0.7, 0.5)
TOLERANCE, OFF = 0.02, 0.03


def experts() -> Built:
    """Returns a mixture of experts without random draws."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    return model_zoo.TokenLoss(MixtralForCausalLM(config)), (torch.randint(0, 1000, (8, 64)),)


def convnext() -> Built:
    """Returns a ConvNeXt of two stages."""
    small, large = ([model_zoo.ConvNextBlock(width) for _ in range(3)] for width in (16, 32))
    layers = [nn.Conv2d(3, 16, 4, stride=4), *small, nn.Conv2d(16, 32, 2, stride=2), *large]
    return model_zoo.Classifier(nn.Sequential(*layers), 32), model_zoo.images(128)


MODELS: dict[str, Callable[[], Built]] = {
    "gpt2": lambda: model_zoo.gpt2(2),
    "llama": lambda: model_zoo.llama(2),
    "bert": lambda: model_zoo.bert(2),
    "t5": lambda: model_zoo.t5(2),
    "vit": lambda: model_zoo.vit(2),
    "resnet": lambda: model_zoo.resnet("basic", [1, 1, 1, 1]),
    "unet": model_zoo.MODELS["unet"],
    "densenet": model_zoo.densenet,
    "vgg": model_zoo.vgg11,
    "convnext": convnext,
    "experts": experts,
    "diffusion": lambda: model_zoo.diffusion_transformer(1),
}
"""Small models, for seconds of compilation. The embeddings of ``gpt2``, ``bert`` and ``t5`` are tied."""


@dataclass(frozen=True)
class Row:
    """One model under one share; bytes above those live when the step begins."""

    model: str
    share: float
    plain_bytes: int
    """Measured, of Inductor alone."""
    reference_bytes: int
    reference_source: str
    budget_bytes: int
    measured_bytes: int
    least_share: float | None
    """The least share that a warning names; None if the budget is feasible."""

    @property
    def ratio(self) -> float:
        return self.measured_bytes / self.plain_bytes

    @property
    def excess(self) -> float:
        """The reference peak above the measured one, as a share of that."""
        return self.reference_bytes / self.plain_bytes - 1

    @property
    def is_over(self) -> bool:
        return self.least_share is None and self.ratio > self.share + TOLERANCE


def measured(name: str, backend: str, options: dict[str, Any] | None) -> int:
    """Returns the measured peak of a warm step in bytes."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs = MODELS[name]()
    step = training_step(model.train(), inputs, backend=backend, options=options)
    step()
    return measured_peak(step, model)


def measure(name: str) -> Iterator[Row]:
    plain = measured(name, "inductor", None)
    for share in SHARES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", autoremat.BudgetWarning)
            ours = measured(name, "autoremat", PATIENT | {"memory_budget": share, "cost_model": "roofline"})
        named = [re.search(r"least share that works is ([\d.]+\d)", str(warning.message)) for warning in caught]
        least = next((float(found[1]) for found in named if found), None)
        report = autoremat.reports()[-1]
        reference = report.reference_bytes or 0, report.reference_source
        yield Row(name, share, plain, *reference, report.budget_bytes or 0, ours, least)


def cells(row: Row) -> dict[str, str]:
    return {
        "model": row.model,
        "share": f"{row.share:g}",
        "Inductor alone": mebibytes(row.plain_bytes),
        "reference": mebibytes(row.reference_bytes),
        "off by": f"{row.excess:+.1%}",
        "of": row.reference_source,
        "budget": mebibytes(row.budget_bytes),
        "measured": mebibytes(row.measured_bytes),
        "ratio": f"{row.ratio:.3f}",
        "share + 2 %": "NO" if row.is_over else "held" if row.least_share is None else f"least share {row.least_share:g}",
    }


def shown(rows: list[Row]) -> list[Table | str]:
    feasible, off = [row for row in rows if row.least_share is None], [row for row in rows if abs(row.excess) > OFF]
    verdict = f"{len(feasible)} of {len(rows)} cells are feasible, {sum(row.is_over for row in rows)} are over. "
    verdict += f"{len(off)} references are off by more than {OFF:.0%}."
    return [table("Peaks of forward and backward, MiB above the step's start", list(map(cells, rows))), verdict]


if __name__ == "__main__":
    run("shares", parser(__doc__, MODELS).parse_args(), Row, measure, shown)
