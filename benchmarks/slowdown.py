"""Measured slow-downs and peaks of plans for `max_slowdown`, beside torch's lowest peak at the same measured time.

    python benchmarks/slowdown.py                               # six models, about 40 minutes on two idle cores
    python benchmarks/slowdown.py --only gpt2-4 resnet-18       # measures these again; rows of other models stay
    python benchmarks/slowdown.py --free                        # peaks at no cost in time, of twelve models; some 20 minutes

Each model is compiled by Inductor for every plan: that without a budget, one for each `max_slowdown`, and torch's
own. Torch's are those at several values of `activation_memory_budget`, of which 1 is Inductor alone. All plans then
run in turn. Each round draws their order, and moves all parameters to other addresses.

Two times are measured under torch's profiler: that of the step, and the sum of its *kernels*. Pages that a tensor touches first
are in both, since a kernel touches them. Noise only adds time. So the time of a kernel is the tenth percentile of its rounds,
and the sum is that of these times. Rows of equal plans show what noise is left. Kernels say which of torch's plans is as fast
as ours: those at most one point slower. The lowest peak of these is torch's lowest. Only an idle machine gives figures worth
keeping.

With `--free` the plans are Inductor's alone, `max_slowdown=0` and `max_slowdown="free"`, and peaks alone are measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import model_zoo
import numpy as np
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from harness import measured_peak, mebibytes, parser, percent, run, table, training_step
from lowering import inductor_alone
from model_zoo import Built
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autoremat

SIZES = {"HIDDEN": 256, "BATCH": 4, "LENGTH": 256}
"""Constants of `model_zoo`: in its own sizes much of a step is the time of calls."""

TIMED: dict[str, Callable[[], Built]] = {
    "gpt2-4": lambda: model_zoo.gpt2(4),
    "llama-4": lambda: model_zoo.llama(4),
    "bert-4": lambda: model_zoo.bert(4),
    "t5-2": lambda: model_zoo.t5(2),
    "vit-4": lambda: model_zoo.vit(4),
    "resnet-18": lambda: model_zoo.resnet("basic", [2, 2, 2, 2]),
}
MODELS = TIMED | {
    "gpt2-12": lambda: model_zoo.gpt2(12),
    "bert-12": lambda: model_zoo.bert(12),
    "vit-8": lambda: model_zoo.vit(8),
    "resnet-50": lambda: model_zoo.resnet("bottleneck", [3, 4, 6, 3]),
    "vgg-11": model_zoo.vgg11,
    "dit-2": lambda: model_zoo.diffusion_transformer(2),
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


@dataclass(frozen=True)
class Free:
    """The measured peaks of one model, and the predicted slow-down of its plan for `"free"`."""

    model: str
    alone_bytes: int
    zero_bytes: int
    free_bytes: int
    slowdown: float | None


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

    def __init__(self, name: str) -> None:
        torch._dynamo.reset()
        self.name = name
        self.steps: dict[str, Callable[[], None]] = {}
        self.reports: dict[str, autoremat.Report] = {}
        self.models: list[nn.Module] = []
        self.gaps: list[torch.Tensor] = []
        """Tensors of random sizes between parameters."""

    def add(self, method: str, **options: Any) -> None:
        """Compiles a fresh model by running a first step; without options by Inductor alone."""
        torch.manual_seed(0)
        model, inputs = MODELS[self.name]()
        ours = {"backend": "autoremat", "options": {**options, "time_limit": 60}}
        step = training_step(model, inputs, **(ours if options else {"backend": inductor_alone()}))
        step()
        print(f"{self.name}, {method}: compiled", flush=True)
        self.steps[method] = step
        self.models.append(model)
        if options:
            self.reports[method] = autoremat.reports()[-1]

    def peaks(self) -> dict[str, int]:
        return {method: measured_peak(step, *self.models) for method, step in self.steps.items()}

    def samples(self, rounds: int) -> dict[str, list[Sample]]:
        """Returns the seconds of each plan's step in each round."""
        found: dict[str, list[Sample]] = {method: [] for method in self.steps}
        for turn in range(WARM_ROUNDS + rounds):
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


def timed(rounds: int, name: str) -> Iterator[Row]:
    """Yields one row for each plan, that without a budget first."""
    bench = Bench(name)
    bench.add(UNBOUNDED, memory_budget=None)
    for asked in ASKED:
        bench.add(f"max_slowdown={asked:g}", max_slowdown=asked)
    for budget in TORCH_BUDGETS:
        with functorch_config.patch(activation_memory_budget=budget):
            bench.add(f"torch {budget:g}")
    samples, peaks = bench.samples(rounds), bench.peaks()
    first_step, first_kernels = least(samples[UNBOUNDED])
    for method, own in samples.items():
        step, kernels = least(own)
        report = bench.reports.get(method)
        asked = report and report.max_slowdown
        figures = (asked, report.slowdown if asked is not None else None) if report else (None, None)
        costs = (report.compiled_peak_bytes, report.planning_seconds) if report else (None, None)
        yield Row(
            name, method, step, step / first_step - 1, kernels, kernels / first_kernels - 1, peaks[method], *figures, *costs
        )


def free(name: str) -> Iterator[Free]:
    bench = Bench(name)
    bench.add("Inductor alone")
    for asked in (0.0, "free"):
        bench.add(str(asked), max_slowdown=asked)
    for step in bench.steps.values():
        step()
    yield Free(name, *bench.peaks().values(), bench.reports["free"].slowdown)


def torchs_lowest(rows: list[Row], ours: Row) -> Row | None:
    """Returns torch's row with the lowest peak among those whose kernels are as fast as ours."""
    torchs = (row for row in rows if row.model == ours.model and row.method.startswith("torch"))
    fast = [row for row in torchs if row.kernel_slowdown <= ours.kernel_slowdown + TOLERANCE]
    return min(fast, key=lambda row: row.peak_bytes, default=None)


def cells(rows: list[Row], row: Row) -> dict[str, str]:
    theirs = torchs_lowest(rows, row)
    unbounded = next(one for one in rows if one.model == row.model and one.method == UNBOUNDED)
    return {
        "model": row.model,
        "asked": percent(row.asked, 0),
        "predicted": percent(row.predicted),
        "kernels": percent(row.kernel_slowdown),
        "step": percent(row.slowdown),
        "step, ms": f"{1e3 * row.step_seconds:.1f}",
        "peak": mebibytes(row.peak_bytes),
        "no budget's": mebibytes(unbounded.peak_bytes),
        "torch's lowest": mebibytes(theirs and theirs.peak_bytes),
        "ours/torch's": f"{row.peak_bytes / theirs.peak_bytes:.2f}" if theirs else "-",
        "planned, s": f"{row.planning_seconds or 0:.1f}",
    }


def cells_of_torch(row: Row) -> dict[str, str]:
    slowdowns = {"kernels": percent(row.kernel_slowdown), "step": percent(row.slowdown)}
    figures = {"step, ms": f"{1e3 * row.step_seconds:.1f}", "peak": mebibytes(row.peak_bytes)}
    return {"model": row.model, "budget": row.method.removeprefix("torch "), **slowdowns, **figures}


def verdicts(rows: list[Row], asked: list[Row]) -> Iterator[str]:
    """Yields the results of the rows, in a word each."""
    for what, slowdowns in (("kernels", [r.kernel_slowdown for r in asked]), ("step", [r.slowdown for r in asked])):
        kept = sum(own <= (row.asked or 0) + TOLERANCE for own, row in zip(slowdowns, asked, strict=True))
        yield f"slow-down of the {what} at most the asked one and a point: {kept} of {len(asked)}"
    pairs = [(one, other) for one, other in zip(asked, asked[1:], strict=False) if one.model == other.model]
    falling = sum(other.peak_bytes <= one.peak_bytes for one, other in pairs)
    yield f"peak no higher than for the next smaller max_slowdown: {falling} of {len(pairs)}"
    duels = [(row, torchs_lowest(rows, row)) for row in asked]
    ratios = [row.peak_bytes / theirs.peak_bytes for row, theirs in duels if theirs is not None]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        yield f"geometric mean of our peak over torch's lowest at the same time: {mean:.2f}"
    small = [theirs is None or row.peak_bytes <= theirs.peak_bytes for row, theirs in duels if row.asked in ASKED[:3]]
    yield f"at 0, 1, 3 %: peak at most torch's lowest, or none of torch's as fast: {sum(small)} of {len(small)}"
    yield f"lower peak than torch's: {sum(ratio < 1 for ratio in ratios)} of {len(ratios)}"


def shown(rows: list[Row]) -> list[Table | str]:
    asked, torchs = [r for r in rows if r.asked is not None], [r for r in rows if r.method.startswith("torch")]
    title = "Plans for max_slowdown; slow-downs of kernels and steps in % beside no budget, peaks in MiB"
    tables = [table(title, [cells(rows, row) for row in asked])]
    return [*tables, table("Torch's plans; 1 is Inductor alone", list(map(cells_of_torch, torchs))), *verdicts(rows, asked)]


def shown_free(rows: list[Free]) -> list[Table | str]:
    names = ("Inductor alone", "max_slowdown=0.0", "max_slowdown='free'")
    peaks = {row.model: (row.alone_bytes, row.zero_bytes, row.free_bytes) for row in rows}
    lines = [
        {
            "model": row.model,
            **dict(zip(names, map(mebibytes, peaks[row.model]), strict=True)),
            "predicted, %": percent(row.slowdown),
        }
        for row in rows
    ]
    kept = sum(max(others) <= alone for alone, *others in peaks.values())
    return [table("Measured peaks in MiB", lines), f"models whose peaks are no higher than Inductor's: {kept} of {len(rows)}"]


def main() -> None:
    made = parser(__doc__, MODELS)
    made.add_argument("--rounds", type=int, default=81, help="timed steps of each plan")
    made.add_argument("--free", action="store_true", help="measure peaks alone, of plans that cost no time")
    arguments = made.parse_args()
    for constant, size in SIZES.items():
        setattr(model_zoo, constant, size)
    inductor_config.cpp.enable_kernel_profile = True
    dynamo_config.recompile_limit = dynamo_config.accumulated_recompile_limit = 10_000  # one code object for all plans
    if arguments.free:
        run("free", arguments, Free, free, shown_free)
        return
    arguments.only = [name for name in arguments.only if name in TIMED]
    setup = {"threads": torch.get_num_threads(), "rounds": arguments.rounds, "percentile": BEST, "sizes": SIZES}
    run("slowdown", arguments, Row, partial(timed, arguments.rounds), shown, **setup)


if __name__ == "__main__":
    main()
