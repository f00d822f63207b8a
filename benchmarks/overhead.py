"""What the backend costs where it has nothing to do: inference, and training under a budget that does not bind.

    python benchmarks/overhead.py                    # Inductor; --inner aot_eager for uncompiled graphs

For a small and a wider model: seconds per call, with the backend and without in turns, so that both see the same load;
processor seconds of a first call, compilers included, in fresh processes without caches and in turns; and whether both
generate the same code (Inductor). Run it on an idle machine: the load average at the beginning and at the end is part of the
result. Written to `benchmarks/results/overhead_*`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"small": (64, 4, 16), "wide": (512, 8, 256)}
"""Width, layers and rows."""
MODES = ("inference", "training")
GENEROUS = "1TiB"


@dataclass(frozen=True)
class Row:
    """Medians of one model in one mode: seconds of a call and processor seconds of a first call, plain and with the backend."""

    model: str
    mode: str
    plain_seconds: float
    our_seconds: float
    plain_first_seconds: float
    our_first_seconds: float
    same_code: bool | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15, help="turns of each backend, of 20 calls")
    parser.add_argument("--repeats", type=int, default=5, help="fresh processes of each backend for first calls")
    parser.add_argument("--first", nargs=3, metavar=("MODEL", "MODE", "BACKEND"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.first:
        print(first_call(*arguments.first, arguments.inner))
        return
    before = os.getloadavg()[0]
    rows = [measured(model, mode, arguments) for model in arguments.models for mode in MODES]
    load = (before, os.getloadavg()[0])
    write(rows, load, arguments)


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    width, layers, count = MODELS[name]
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    return nn.Sequential(*blocks), torch.randn(count, width)


def caller(name: str, mode: str, backend: str, inner: str) -> Callable[[], object]:
    """Calls a freshly compiled model once, with its backward in training."""
    model, x = build(name)
    options: dict[str, Any] = {"memory_budget": GENEROUS, "inner": inner}
    arguments = {"backend": "autoremat", "options": options} if backend == "autoremat" else {"backend": inner}

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    # Code of its own: Dynamo looks through all that it compiled for the same code, oldest first.
    own = types.FunctionType(loss.__code__.replace(co_name=f"loss_{backend}"), globals(), None, None, loss.__closure__)
    compiled = torch.compile(own, **arguments)

    def infer() -> object:
        with torch.no_grad():
            return compiled(x)

    def train() -> object:
        model.zero_grad(set_to_none=True)
        return compiled(x).backward()

    return infer if mode == "inference" else train


def first_call(name: str, mode: str, backend: str, inner: str) -> float:
    """Processor seconds of the first call, without those of starting Inductor: another small graph is compiled before."""
    import autoremat  # noqa: F401  # found by name all the same; its import is not what is measured

    caller("small", "training", backend, inner)()
    torch._dynamo.reset()
    call = caller(name, mode, backend, inner)
    begin = processor_seconds()
    call()
    return processor_seconds() - begin


def processor_seconds() -> float:
    """Of this process and of those that it has waited for: C++ compilers."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def first_seconds(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    """The median of each backend over fresh processes without caches, which do everything themselves."""
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    found: dict[str, list[float]] = {"plain": [], "autoremat": []}
    for _ in range(arguments.repeats):
        for backend, seconds in found.items():
            command = [sys.executable, __file__, "--inner", arguments.inner, "--first", name, mode, backend]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            seconds.append(float(run.stdout.split()[-1]))
    return {backend: statistics.median(seconds) for backend, seconds in found.items()}


def call_seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median seconds of a call of each, all in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(20):
                call()
            times[name].append((time.perf_counter() - begin) / 20)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def generated(call: Callable[[], object]) -> list[str]:
    """The code that Inductor generates in the first call, without comments, file names and addresses."""
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(call)
    return [re.sub(r"#.*|0x[0-9a-f]+|/\S+|c[0-9a-z]{30,}", "", source) for source in sources]


def measured(name: str, mode: str, arguments: argparse.Namespace) -> Row:
    calls = {backend: caller(name, mode, backend, arguments.inner) for backend in ("plain", "autoremat")}
    same = None
    if arguments.inner == "inductor":
        with torch._inductor.config.patch(force_disable_caches=True):
            plain, ours = (generated(call) for call in calls.values())
        same = plain == ours
    for call in calls.values():
        call()
    seconds = call_seconds(calls, arguments.rounds)
    first = first_seconds(name, mode, arguments)
    return Row(name, mode, seconds["plain"], seconds["autoremat"], first["plain"], first["autoremat"], same)


def write(rows: list[Row], load: tuple[float, float], arguments: argparse.Namespace) -> None:
    table = Table(title=f"{arguments.inner}, torch {torch.__version__}; load {load[0]:.1f} to {load[1]:.1f}")
    for column in ("model", "mode", "call, plain", "ours", "+", "first call, plain (processor)", "ours", "+", "same code"):
        table.add_column(column, justify="right")
    for r in rows:
        call, first = r.our_seconds / r.plain_seconds - 1, r.our_first_seconds / r.plain_first_seconds - 1
        table.add_row(
            r.model, r.mode, f"{1e6 * r.plain_seconds:.0f} us", f"{1e6 * r.our_seconds:.0f} us", f"{call:+.1%}",
            f"{r.plain_first_seconds:.2f} s", f"{r.our_first_seconds:.2f} s", f"{first:+.1%}", str(r.same_code),
        )  # fmt: skip
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / f"overhead_{arguments.inner}"
    with open(f"{stem}.txt", "w") as file:
        Console(file=file, width=140).print(table)
    Path(f"{stem}.json").write_text(json.dumps({"load": load, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
