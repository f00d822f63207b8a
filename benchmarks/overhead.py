"""The cost of the backend where it has nothing to do: inference, and training under a budget that does not bind.

    python benchmarks/overhead.py                    # Inductor; --inner aot_eager for uncompiled graphs

The models are a small one, a wider one and a GPT-2. A row has the seconds of a call, and the processor seconds of a first call
without caches, compilers included. It also says if both generate the same code (Inductor). All calls run in turns, so that both
see the same load, in an order that reverses each time. The figure of first calls is the median of the ratios within a turn,
because the machine's own speed drifts. Inductor alone is compiled twice a turn; the difference between its two figures is the
error of this method. Work of the first compilation of a process alone, such as imports, is done before. Run it on an idle
machine: the load average at the beginning and at the end is part of the result. Written to `benchmarks/results/overhead_*`;
rows that are there and are not asked for stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import resource
import statistics
import time
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import model_zoo
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
PERCEPTRONS = {"small": (64, 4, 16), "wide": (512, 8, 256)}
"""Width, layers and rows."""
MODELS = (*PERCEPTRONS, "gpt2-4")
BACKENDS = ("plain", "plain again", "autoremat")
MODES = ("inference", "training")
GENEROUS = "1TiB"
CALLS = 10
"""Timed together."""


@dataclass(frozen=True)
class Row:
    """One model in one mode: by backend, median seconds of a call, and processor seconds of the first call of each turn."""

    model: str
    mode: str
    call: dict[str, float]
    first: dict[str, list[float]]
    same_code: bool | None
    load: tuple[float, float]
    """The load average of the machine before and after."""

    def call_share(self, backend: str) -> float:
        """Returns the share by which a call takes longer than plain's first figure."""
        return self.call[backend] / self.call["plain"] - 1

    def first_share(self, backend: str) -> float:
        """Returns the same share for first calls."""
        return statistics.median(a / b for a, b in zip(self.first[backend], self.first["plain"], strict=True)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=60, help="turns of each backend, of 10 calls")
    parser.add_argument("--repeats", type=int, default=8, help="first calls of each backend")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    rows = known_rows(arguments)
    for backend in ("plain", "autoremat"):  # what only the first compilation of a process does
        caller("small", "training", backend, arguments.inner)()
    for model in arguments.models:
        for mode in arguments.modes:
            rows[model, mode] = measured(model, mode, arguments)
            write([rows[key] for key in itertools.product(MODELS, MODES) if key in rows], arguments)


def known_rows(arguments: argparse.Namespace) -> dict[tuple[str, str], Row]:
    """Returns the rows that an earlier run has written, by model and mode."""
    path = arguments.output / f"overhead_{arguments.inner}.json"
    rows = [Row(**fields) for fields in json.loads(path.read_text())["rows"]] if path.exists() else []
    return {(row.model, row.mode): row for row in rows}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == "gpt2-4":
        model, (tokens,) = model_zoo.gpt2(4)
        return model, tokens
    width, layers, count = PERCEPTRONS[name]
    blocks = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    return nn.Sequential(*blocks), torch.randn(count, width)


def caller(name: str, mode: str, backend: str, inner: str) -> Callable[[], object]:
    """Calls a freshly compiled model once, with its backward in training."""
    model, x = build(name)
    options: dict[str, Any] = {"memory_budget": GENEROUS, "compiler": inner}
    arguments = {"backend": "autoremat", "options": options} if backend == "autoremat" else {"backend": inner}

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    # Code of its own: Dynamo looks through all that it compiled for the same code, oldest first.
    own_name = f"loss_{backend}".replace(" ", "_")
    own = types.FunctionType(loss.__code__.replace(co_name=own_name), globals(), None, None, loss.__closure__)
    compiled = torch.compile(own, **arguments)

    def infer() -> object:
        with torch.no_grad():
            return compiled(x)

    def train() -> object:
        model.zero_grad(set_to_none=True)
        return compiled(x).backward()

    return infer if mode == "inference" else train


def processor_seconds() -> float:
    """Returns the processor seconds of this process and of those that it has waited for: C++ compilers."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def first_seconds(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the seconds of a first call of each backend in each turn, without caches."""
    found: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for turn in range(arguments.repeats):
        for backend in BACKENDS if turn % 2 else reversed(BACKENDS):
            torch._dynamo.reset()
            call = caller(name, mode, backend, arguments.inner)
            begin = processor_seconds()
            with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
                call()
            found[backend].append(processor_seconds() - begin)
    return found


def call_seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the median seconds of a call of each, all in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in calls if turn % 2 else reversed(calls):
            begin = time.perf_counter()
            for _ in range(CALLS):
                calls[name]()
            times[name].append((time.perf_counter() - begin) / CALLS)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def generated(call: Callable[[], object]) -> list[str]:
    """Returns the code that Inductor generates in the first call, without comments, file names and addresses."""
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(call)
    return [re.sub(r"#.*|0x[0-9a-f]+|/\S+|c[0-9a-z]{30,}", "", source) for source in sources]


def measured(name: str, mode: str, arguments: argparse.Namespace) -> Row:
    torch._dynamo.reset()
    before = os.getloadavg()[0]
    calls = {backend: caller(name, mode, backend, arguments.inner) for backend in BACKENDS}
    same = None
    if arguments.inner == "inductor":
        with torch._inductor.config.patch(force_disable_caches=True):
            plain, _, ours = (generated(call) for call in calls.values())
        same = plain == ours
    for call in calls.values():
        call()
    call, first = call_seconds(calls, arguments.rounds), first_seconds(name, mode, arguments)
    return Row(name, mode, call, first, same, (before, os.getloadavg()[0]))


def write(rows: list[Row], arguments: argparse.Namespace) -> None:
    """Writes the table so far. `again` and `ours` are above plain's first figure."""
    table = Table(title=f"{arguments.inner}, torch {torch.__version__}")
    columns = ("model", "mode", "call, plain", "again", "ours", "first call, plain (processor)", "again", "ours", "same code",
               "load")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for r in rows:
        calls, firsts = ([f"{of(b):+.1%}" for b in BACKENDS[1:]] for of in (r.call_share, r.first_share))
        first = f"{statistics.median(r.first['plain']):.2f} s"
        load = " to ".join(f"{average:.1f}" for average in r.load)
        table.add_row(r.model, r.mode, f"{1e6 * r.call['plain']:.0f} us", *calls, first, *firsts, str(r.same_code), load)
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / f"overhead_{arguments.inner}"
    with open(f"{stem}.txt", "w") as file:
        Console(file=file, width=150).print(table)
    Path(f"{stem}.json").write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
