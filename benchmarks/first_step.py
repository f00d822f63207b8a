"""Processor seconds of a first step with empty caches, of whole processes with their C++ compilers, beside plain Inductor's.

    python benchmarks/first_step.py                      # GPT-2 of 4 layers: Inductor alone, a share, and the same bytes
    python benchmarks/first_step.py --rounds 5

Every round runs each of them once, and the ratios are those within a round: a busy machine makes all of a round dearer.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness import parser, run, table
from rich.table import Table

BUDGETS = {"Inductor alone": None, "a share of 0.7": 0.7, "the same in bytes": "353.75MiB"}
CODE = """
import torch
from model_zoo import TokenLoss
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=4, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = TokenLoss(GPT2LMHeadModel(config))
torch.compile(model, **{keywords})(torch.randint(0, 50257, (2, 256))).backward()
"""


@dataclass(frozen=True)
class Row:
    """The processor seconds of each round."""

    model: str
    budget: str
    seconds: list[float]
    ratios: list[float]


def spent(budget: object) -> float:
    """Returns the processor seconds of a process and of all that it starts."""
    ours = {"backend": "autoremat", "options": {"memory_budget": budget, "cost_model": "roofline"}}
    code = CODE.format(keywords={"backend": "inductor"} if budget is None else ours)
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "AUTOREMAT_CACHE_DIR": f"{folder}/autoremat"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=os.environ | caches, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(rounds: int, model: str) -> Iterator[Row]:
    taken = [[spent(budget) for budget in BUDGETS.values()] for _ in range(rounds)]
    for place, name in enumerate(BUDGETS):
        yield Row(model, name, [one[place] for one in taken], [one[place] / one[0] for one in taken])


def shown(rows: list[Row]) -> list[Table]:
    cells = [{"model": row.model, "budget": row.budget, "seconds": f"{statistics.median(row.seconds):.1f}",
              "ratio": f"{statistics.median(row.ratios):.3f}", "rounds": " ".join(f"{one:.3f}" for one in row.ratios)}
             for row in rows]  # fmt: skip
    return [table("Processor seconds of a first step", cells)]


if __name__ == "__main__":
    made = parser(__doc__, ["gpt2"])
    made.add_argument("--rounds", type=int, default=3)
    arguments = made.parse_args()
    run("first_step", arguments, Row, partial(measure, arguments.rounds), shown)
