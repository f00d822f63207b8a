"""The seconds that autoremat's own work adds to a cold compilation by Inductor, by timers inside one compilation.

    python benchmarks/compile_time.py                    # nine models, without a budget, at 70 % and at 40 %
    python benchmarks/compile_time.py --models gpt2-12

Each compilation runs in a process and with caches of its own. Own work is the fingerprint, the partitioner (capture,
planning, rewriting) and the replay of the generated code. An attempt that was given up counts as a whole. The timers run in
the same compilation as all else, so a busy machine slows both sides. Torch's own partitioner, which ours stands in for, is
timed in a compilation of the same model by Inductor alone.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lowering import BUILDERS, KINDS, ROOT, build
from rich.console import Console
from rich.table import Table
from torch._inductor import compile_fx

from autoremat.basics.errors import BudgetInfeasible
from autoremat.compiler import compile_loop
from autoremat.compiler.partitioner import Partitioner
from autoremat.torch_private import inductor_lowering

BUDGETS = (None, 0.7, 0.4)
"""None, or a share of the peak without recomputation by the simulator. Infeasible budgets are left out."""

OWN = ("fingerprint", "partitioner", "replay", "given up")


@dataclass(frozen=True)
class Row:
    """One cold compilation: forward, backward and the first step, in seconds."""

    model: str
    budget: float | None
    total: float
    attempts: int
    own: dict[str, float]
    torch_partitioner: float

    @property
    def share(self) -> float:
        """Own work, less the seconds of torch's partitioner, over the compilation without own work."""
        own = sum(self.own.values())
        return (own - self.torch_partitioner) / (self.total - own + self.torch_partitioner)


class Timers:
    """Seconds spent inside some functions. A call from one timed function to another is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.busy = False

    @contextlib.contextmanager
    def around(self, owner: Any, name: str, label: str) -> Iterator[None]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.busy:
                return original(*args, **kwargs)
            self.busy, begin = True, time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.busy = False
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - begin

        with unittest.mock.patch.object(owner, name, timed):
            yield


@contextlib.contextmanager
def attempts_timed(timers: Timers) -> Iterator[list[float]]:
    """Yields a list that receives the seconds of each attempt of a compilation.

    All attempts but the last were given up, and hold no other own work.
    """
    spans: list[float] = []
    original = compile_loop.lower

    def lower(*arguments: Any) -> Any:
        begin, before = time.perf_counter(), dict(timers.seconds)
        compiled, lowered, verdict = original(*arguments)
        if compiled is None:
            timers.seconds = before
        spans.append(time.perf_counter() - begin)
        return compiled, lowered, verdict

    with unittest.mock.patch.object(compile_loop, "lower", lower):
        yield spans


def first_step(name: str, **keywords: Any) -> float:
    """Returns the seconds of compiling the model and running one step."""
    model, inputs = build(name)
    compiled = torch.compile(model, **keywords)
    begin = time.perf_counter()
    compiled(*inputs).backward()
    return time.perf_counter() - begin


def ours(name: str, budget: float | None) -> dict[str, Any]:
    """Returns total seconds, attempts and own seconds of one compilation in this process."""
    timers = Timers()
    with (
        timers.around(compile_loop, "fingerprint", "fingerprint"),
        timers.around(Partitioner, "__call__", "partitioner"),
        timers.around(inductor_lowering, "_lowered_peak", "replay"),
        attempts_timed(timers) as spans,
    ):
        total = first_step(name, backend="autoremat", options={"memory_budget": budget})
    own = dict.fromkeys(OWN, 0.0) | timers.seconds | {"given up": sum(spans[:-1])}
    return {"total": total, "attempts": len(spans), "own": own}


def torchs(name: str) -> float:
    """Returns the seconds of torch's partitioner in a compilation by Inductor alone in this process."""
    timers = Timers()
    with timers.around(compile_fx, "min_cut_rematerialization_partition", "partitioner"):
        first_step(name)
    return timers.seconds["partitioner"]


def in_a_process(*arguments: str) -> Any:
    """Returns the JSON that this script prints with ``arguments`` in a process of its own; None if there is no plan.

    The caches of that process are empty.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "AUTOREMAT_CACHE_DIR": f"{folder}/autoremat"}
        command = [sys.executable, __file__, *arguments]
        done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(name: str) -> Iterator[Row]:
    partitioner = in_a_process("--one", name, "--torch")
    for budget in BUDGETS:
        found = in_a_process("--one", name, *([] if budget is None else ["--budget", str(budget)]))
        if found is not None:
            yield Row(name, budget, found["total"], found["attempts"], found["own"], partitioner)


def one(name: str, budget: float | None, by_torch: bool) -> None:
    """Prints the figures of one compilation as JSON, in a process of its own."""
    try:
        print(json.dumps(torchs(name) if by_torch else ours(name, budget)))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, BudgetInfeasible):
            raise
        print("null")


def write(rows: list[Row], folder: Path) -> None:
    table = Table(title="A cold compilation and the first step, seconds")
    columns = ("model", "budget", "total", "attempts", *OWN, "torch's partitioner", "added %")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        budget = "none" if row.budget is None else f"{row.budget:.0%}"
        own = [f"{row.own[part]:.2f}" for part in OWN]
        table.add_row(row.model, budget, f"{row.total:.1f}", str(row.attempts), *own, f"{row.torch_partitioner:.2f}",
                      f"{100 * row.share:.1f}")  # fmt: skip
    shares = [row.share for row in rows]
    text = f"added to the compilation: median {statistics.median(shares):.1%}, worst {max(shares):.1%}"
    setup = {"torch": torch.__version__, "cores": os.cpu_count()}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "compile_time.txt").open("w") as file:
        for console in (Console(width=140), Console(width=140, file=file)):
            console.print(", ".join(f"{key}: {value}" for key, value in setup.items()), highlight=False)
            console.print(table)
            console.print(text, highlight=False)
    record = setup | {"rows": [asdict(row) | {"share": row.share} for row in rows]}
    (folder / "compile_time.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(BUILDERS), default=list(KINDS))
    parser.add_argument("--one", choices=sorted(BUILDERS), help="compile once in this process and print its figures")
    parser.add_argument("--budget", type=float, help="for --one: a share of the peak without recomputation")
    parser.add_argument("--torch", action="store_true", help="for --one: time torch's partitioner under Inductor alone")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one, arguments.budget, arguments.torch)
        return
    rows = []
    for name in arguments.models:
        for row in rows_of(name):
            print(row, flush=True)
            rows.append(row)
    write(rows, arguments.output)


if __name__ == "__main__":
    main()
