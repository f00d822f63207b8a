"""Measured slow-downs and peaks of plans for `max_slowdown`, beside torch's lowest peak at the same measured time.

    python benchmarks/slowdown.py                                 # six models, about 40 minutes on two idle cores
    python benchmarks/slowdown.py --models gpt2-4 resnet-18       # measures these again; rows of other models stay

Each model is compiled by Inductor for every plan: that without a budget, one for each `max_slowdown`, and torch's
own. Torch's are those at several values of `activation_memory_budget`, of which 1 is Inductor alone. All plans then
run in turn. Each round draws their order, and moves all parameters to other addresses.

Two times are measured under torch's profiler: that of the step, and the sum of its *kernels*. Pages that a tensor touches first
are in both, since a kernel touches them. Noise only adds time. So the time of a kernel is the tenth percentile of its rounds,
and the sum is that of these times. Rows of equal plans show what noise is left. Kernels say which of torch's plans is as fast
as ours: those at most one point slower. The lowest peak of these is torch's lowest.

Only an idle machine gives figures worth keeping. Torch's caches stay on, so a second run compiles little. Written to
`benchmarks/results/slowdown.*`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import model_zoo
import numpy as np
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from model_zoo import Built
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch._inductor.compile_fx import compile_fx
from torch.profiler import ProfilerActivity, profile

import autoremat

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"HIDDEN": 256, "BATCH": 4, "LENGTH": 256}
"""Constants of `model_zoo`: in its own sizes much of a step is the time of calls."""

MODELS: dict[str, Callable[[], Built]] = {
    "gpt2-4": lambda: model_zoo.gpt2(4),
    "llama-4": lambda: model_zoo.llama(4),
    "bert-4": lambda: model_zoo.bert(4),
    "t5-2": lambda: model_zoo.t5(2),
    "vit-4": lambda: model_zoo.vit(4),
    "resnet-18": lambda: model_zoo.resnet("basic", [2, 2, 2, 2]),
}
ASKED = (0.0, 0.01, 0.03, 0.1)
TORCH_BUDGETS = (1.0, 0.9, 0.7, 0.5, 0.3)
UNBOUNDED = "no budget"
WARM_ROUNDS = 3
LARGEST_GAP = 2**14
"""Elements of the largest tensor between two parameters."""
KERNELS = ("aten::", "mkl::", "mkldnn::", "graph_", "cpp_fused")
"""Prefixes of the profiler's names of kernels: extern ones, and those that Inductor generates."""
BEST = 10
"""The percentile over rounds that stands for an undisturbed time."""
TOLERANCE = 0.01
"""Slow-down beyond the asked one that counts as met, and beyond ours at which a plan of torch's counts as equally fast."""


@dataclass(frozen=True)
class Row:
    """One plan of one model. Bytes are above those live when the step begins; slow-downs are beside no budget."""

    model: str
    method: str
    step_seconds: float
    slowdown: float
    kernel_seconds: float
    kernel_slowdown: float
    peak_bytes: int
    asked: float | None = None
    """`max_slowdown`; None for the plan without a budget and for torch's."""
    predicted: float | None = None
    """Slow-down by the cost model."""
    predicted_bytes: int | None = None
    """Peak of the generated code."""
    planning_seconds: float | None = None


def prepare() -> None:
    """Sets the sizes of the models, and lets one code object be compiled once for each plan."""
    for constant, size in SIZES.items():
        setattr(model_zoo, constant, size)
    inductor_config.cpp.enable_kernel_profile = True
    dynamo_config.recompile_limit = 10_000


class Sample(NamedTuple):
    """The seconds of one step, and of each of its kernels in turn."""

    step: float
    kernels: tuple[float, ...]


def least(samples: list[Sample]) -> tuple[float, float]:
    """Returns the undisturbed seconds of a step, and of the sum of its kernels, each of which has its own best rounds."""
    step = np.percentile([sample.step for sample in samples], BEST)
    kernels = np.percentile([sample.kernels for sample in samples], BEST, axis=0)
    return float(step), float(kernels.sum())


class Bench:
    """All plans of one model: compiled one after another, then run in turn."""

    def __init__(self, name: str, rounds: int) -> None:
        self.name, self.rounds = name, rounds
        self.steps: dict[str, Callable[[], None]] = {}
        self.reports: dict[str, autoremat.Report] = {}
        self.models: list[nn.Module] = []
        self.gaps: list[torch.Tensor] = []
        """Tensors of random sizes between parameters."""

    def rows(self) -> list[Row]:
        """Returns one row for each plan, that without a budget first."""
        self.add(UNBOUNDED, memory_budget=None)
        for asked in ASKED:
            self.add(f"max_slowdown={asked:g}", max_slowdown=asked)
        for budget in TORCH_BUDGETS:
            with functorch_config.patch(activation_memory_budget=budget):
                self.add(f"torch {budget:g}")
        samples, peaks = self.samples(), {method: self.peak(step) for method, step in self.steps.items()}
        rows = []
        for method, own in samples.items():
            (step, kernels), (first_step, first_kernels) = least(own), least(samples[UNBOUNDED])
            report = self.reports.get(method)
            ours = report is not None and report.max_slowdown is not None
            rows.append(
                Row(
                    model=self.name,
                    method=method,
                    step_seconds=step,
                    slowdown=step / first_step - 1,
                    kernel_seconds=kernels,
                    kernel_slowdown=kernels / first_kernels - 1,
                    peak_bytes=peaks[method],
                    asked=report.max_slowdown if report and ours else None,
                    predicted=report.slowdown if report and ours else None,
                    predicted_bytes=None if report is None else report.compiled_peak_bytes,
                    planning_seconds=None if report is None else report.planning_seconds,
                )
            )
        return rows

    def add(self, method: str, **options: Any) -> None:
        """Compiles a fresh model by running a first step; without options by Inductor alone."""
        torch.manual_seed(0)
        model, inputs = MODELS[self.name]()

        def plain(gm: fx.GraphModule, inputs: Any) -> Any:  # a backend of its own, for which Dynamo takes no earlier code
            return compile_fx(gm, inputs)

        keywords: dict[str, Any] = {"backend": "autoremat", "options": {**options, "time_limit": 60}}
        compiled = torch.compile(model, **(keywords if options else {"backend": plain}))

        def step() -> None:
            model.zero_grad(set_to_none=True)
            compiled(*inputs).backward()

        begin = time.perf_counter()
        step()
        print(f"{self.name}, {method}: compiled in {time.perf_counter() - begin:.1f} s", flush=True)
        self.steps[method] = step
        self.models.append(model)
        if options:
            self.reports[method] = autoremat.reports()[-1]

    def samples(self) -> dict[str, list[Sample]]:
        """Returns the seconds of each plan's step in each round."""
        found: dict[str, list[Sample]] = {method: [] for method in self.steps}
        for turn in range(WARM_ROUNDS + self.rounds):
            drawn = random.Random(turn)
            self.move_parameters(drawn)
            for method in drawn.sample(list(self.steps), len(self.steps)):
                with profile(activities=[ProfilerActivity.CPU]) as ran:
                    begin = time.perf_counter()
                    self.steps[method]()
                    seconds = time.perf_counter() - begin
                if turn >= WARM_ROUNDS:
                    events = sorted(ran.events(), key=lambda event: event.time_range.start)
                    own = (event.self_cpu_time_total for event in events if event.name.startswith(KERNELS))
                    found[method].append(Sample(seconds, tuple(microseconds / 1e6 for microseconds in own)))
        return found

    def move_parameters(self, drawn: random.Random) -> None:
        """Gives all parameters new addresses, so that no plan keeps a lucky place."""
        for parameter in (parameter for model in self.models for parameter in model.parameters()):
            self.gaps.append(torch.empty(drawn.randrange(LARGEST_GAP)))
            parameter.data = parameter.data.clone()
        del self.gaps[: -len(self.gaps) // 2]

    def peak(self, step: Callable[[], None]) -> int:
        """Returns the measured peak of a step that starts without gradients."""
        for model in self.models:
            model.zero_grad(set_to_none=True)
        gc.collect()
        with autoremat.track_peak("cpu") as peak:
            step()
        return peak.bytes


def torchs_lowest(rows: list[Row], slowdown: float) -> Row | None:
    """Returns torch's row with the lowest peak among those whose kernels are as fast as `slowdown`."""
    fast = [row for row in rows if row.method.startswith("torch") and row.kernel_slowdown <= slowdown + TOLERANCE]
    return min(fast, key=lambda row: row.peak_bytes, default=None)


def table_of(rows: list[Row]) -> Table:
    table = Table(title="Plans for max_slowdown; slow-downs of kernels and steps in % beside no budget, peaks in MiB")
    table.add_column("model", no_wrap=True)
    columns = ("asked", "predicted", "kernels", "step", "step, ms", "peak", "no budget's", "torch's lowest", "ours/torch's")
    for column in (*columns, "planned, s"):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == name]
        unbounded = next(row for row in own if row.method == UNBOUNDED)
        for row in own:
            if row.asked is None:
                continue
            theirs = torchs_lowest(own, row.kernel_slowdown)
            table.add_row(
                name, f"{100 * row.asked:.0f}", f"{100 * (row.predicted or 0):.1f}", f"{100 * row.kernel_slowdown:.1f}",
                f"{100 * row.slowdown:.1f}", f"{1e3 * row.step_seconds:.1f}", mebibytes(row.peak_bytes),
                mebibytes(unbounded.peak_bytes), mebibytes(None if theirs is None else theirs.peak_bytes),
                "-" if theirs is None else f"{row.peak_bytes / theirs.peak_bytes:.2f}", f"{row.planning_seconds or 0:.1f}",
            )  # fmt: skip
    return table


def torch_table_of(rows: list[Row]) -> Table:
    table = Table(title="Torch's plans; 1 is Inductor alone")
    table.add_column("model", no_wrap=True)
    for column in ("budget", "kernels", "step", "step, ms", "peak"):
        table.add_column(column, justify="right")
    for row in rows:
        if row.method.startswith("torch"):
            slowdowns = (f"{100 * row.kernel_slowdown:.1f}", f"{100 * row.slowdown:.1f}")
            figures = (*slowdowns, f"{1e3 * row.step_seconds:.1f}", mebibytes(row.peak_bytes))
            table.add_row(row.model, row.method.removeprefix("torch "), *figures)
    return table


def mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.2f}"


def verdicts(rows: list[Row]) -> dict[str, str]:
    """Returns the results of the rows, in a word each."""
    asked = [row for row in rows if row.asked is not None]
    kept = [row for row in asked if row.asked is not None and row.kernel_slowdown <= row.asked + TOLERANCE]
    steps = [row for row in asked if row.asked is not None and row.slowdown <= row.asked + TOLERANCE]
    falling = rising = 0
    for one, other in zip(asked, asked[1:], strict=False):
        if one.model == other.model:
            falling += other.peak_bytes <= one.peak_bytes
            rising += other.peak_bytes > one.peak_bytes
    pairs = [(row, torchs_lowest([r for r in rows if r.model == row.model], row.kernel_slowdown)) for row in asked]
    ratios = [row.peak_bytes / theirs.peak_bytes for row, theirs in pairs if theirs is not None]
    small = [(row, theirs) for row, theirs in pairs if row.asked in ASKED[:3]]
    lower = [row for row, theirs in small if theirs is None or row.peak_bytes <= theirs.peak_bytes]
    return {
        "slow-down of the kernels at most the asked one and a point": f"{len(kept)} of {len(asked)}",
        "slow-down of the step at most the asked one and a point": f"{len(steps)} of {len(asked)}",
        "peak no higher than for the next smaller max_slowdown": f"{falling} of {falling + rising}",
        "geometric mean of our peak over torch's lowest at the same time": f"{statistics.geometric_mean(ratios):.2f}"
        if ratios
        else "-",
        "at 0, 1, 3 %: peak at most torch's lowest, or none of torch's as fast": f"{len(lower)} of {len(small)}",
        "lower peak than torch's": f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)}",
    }


def write(rows: list[Row], setup: dict[str, Any], folder: Path) -> None:
    """Writes slowdown.txt and slowdown.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "slowdown.txt").open("w") as file:
        for console in (Console(width=130), Console(width=130, file=file)):
            console.print(", ".join(f"{key}: {value}" for key, value in setup.items()), highlight=False)
            console.print(table_of(rows))
            console.print(torch_table_of(rows))
            for what, verdict in verdicts(rows).items():
                console.print(f"{what}: {verdict}", highlight=False)
    record = setup | {"verdicts": verdicts(rows), "rows": [asdict(row) for row in rows]}
    (folder / "slowdown.json").write_text(json.dumps(record, indent=2) + "\n")


def known_rows(folder: Path, setup: dict[str, Any]) -> dict[str, list[Row]]:
    """Returns the rows, by model, that an earlier run with the same setup has written."""
    path = folder / "slowdown.json"
    record = json.loads(path.read_text()) if path.exists() else {"rows": []}
    same = all(record.get(key) == value for key, value in setup.items())
    found: dict[str, list[Row]] = {}
    for fields in record["rows"] if same else ():
        found.setdefault(fields["model"], []).append(Row(**fields))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=81, help="timed steps of each plan")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    prepare()
    setup = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "percentile": BEST,
        "sizes": SIZES,
    }
    rows = known_rows(arguments.output, setup)
    for name in arguments.models:
        torch._dynamo.reset()
        begin = time.perf_counter()
        rows[name] = Bench(name, arguments.rounds).rows()
        print(f"{name}: {time.perf_counter() - begin:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
        write([row for known in MODELS for row in rows.get(known, ())], setup, arguments.output)


if __name__ == "__main__":
    main()
