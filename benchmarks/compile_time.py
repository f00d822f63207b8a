"""The seconds that autoremat's own work adds to a cold compilation by Inductor, by timers inside one compilation.

    python benchmarks/compile_time.py                    # nine models, without a budget, at 70 % and at 40 %
    python benchmarks/compile_time.py --only gpt2

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
from dataclasses import dataclass
from typing import Any

import torch
from harness import parser, percent, run, table
from lowering import KINDS, build
from rich.table import Table
from torch._inductor import compile_fx

from autoremat.basics.errors import BudgetInfeasible, find_cause
from autoremat.compiler import compile_loop
from autoremat.compiler.joint_graph import Partitioner
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
    """Returns the JSON that this script prints with ``arguments`` in a process of its own, whose caches are empty.

    None if there is no plan.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "AUTOREMAT_CACHE_DIR": f"{folder}/autoremat"}
        command = [sys.executable, __file__, "--only", *arguments]
        done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str) -> Iterator[Row]:
    partitioner = in_a_process(name, "--one", "torch")
    for budget in BUDGETS:
        found = in_a_process(name, "--one", str(budget))
        if found is not None:
            yield Row(name, budget, found["total"], found["attempts"], found["own"], partitioner)


def one(name: str, what: str) -> Any:
    """Returns the figures of one compilation in this process: by torch or for a budget. None if there is no plan."""
    try:
        return torchs(name) if what == "torch" else ours(name, None if what == "None" else float(what))
    except Exception as error:
        if find_cause(error, BudgetInfeasible) is None:
            raise
        return None


def cells(row: Row) -> dict[str, str]:
    return {
        "model": row.model,
        "budget": "none" if row.budget is None else f"{row.budget:.0%}",
        "total": f"{row.total:.1f}",
        "attempts": str(row.attempts),
        **{part: f"{row.own[part]:.2f}" for part in OWN},
        "torch's partitioner": f"{row.torch_partitioner:.2f}",
        "added %": percent(row.share),
    }


def shown(rows: list[Row]) -> list[Table | str]:
    shares = [row.share for row in rows]
    text = f"added to the compilation: median {statistics.median(shares):.1%}, worst {max(shares):.1%}"
    return [table("A cold compilation and the first step, seconds", list(map(cells, rows))), text]


def main() -> None:
    made = parser(__doc__, KINDS)
    made.add_argument("--one", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.only[0], arguments.one)))
    else:
        run("compile_time", arguments, Row, measure, shown)


if __name__ == "__main__":
    main()
