"""Each mechanism of the planner and of the backend switched off: the difference that it makes, in one table for each kind.

    python benchmarks/ablation.py planners       # about 15 minutes
    python benchmarks/ablation.py cost_models    # about two minutes
    python benchmarks/ablation.py workarounds    # about twelve minutes
    python benchmarks/ablation.py runs           # about two minutes
    python benchmarks/ablation.py tables         # the tables of what is stored
    python benchmarks/ablation.py planners --fresh --time-limit 10

A run goes on where an earlier one ended. `planners`: the cost over the cheapest plan that any variant found, by the cost model
and the simulator. `cost_models`: the measured plans of costs.json, ranked again. `workarounds`: the peak of the code that
Inductor generates for the plan of one budget, without planning again. `runs`: steps that do run, for the workarounds that save
time or keep gradients right.
"""

from __future__ import annotations

import os

os.environ["AUTOREMAT_PROGRESS"] = "0"

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import cost_scores
import lowering
import model_zoo
import torch
from random_layered import WIDTHS, generate
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import autoremat
from autoremat import passes
from autoremat.compiler import compile_loop
from autoremat.compiler import lowering as lowering_stage
from autoremat.compiler.attempts import Accept, Attempt, Rules
from autoremat.options.options import COST_MODELS
from autoremat.planner import api
from autoremat.planner.exact import annealing, driver, large_neighborhood, time_indexed_bound
from autoremat.planner.graph.graph import Graph
from autoremat.planner.search.candidates import EVERY_STRATEGY, Search, Strategies
from autoremat.planner.search.planner import Planner
from autoremat.planner.settings import SETTINGS
from autoremat.torch_private import inductor_lowering

RESULTS = Path(__file__).resolve().parent / "results"
TIME_LIMIT = 5.0
"""Seconds of one planning; the default of `autoremat.plan` is 10."""

PROCESSOR = "the processor"

Switch = Callable[[], contextlib.AbstractContextManager[Any]]
"""Switches a mechanism off, inside."""


# -- planners ------------------------------------------------------------------------------------------------------------

LAYERED = ((100, 0), (100, 1), (250, 0))
LAYERED_SHARES = (0.9, 0.8, 0.7)
MODELS: dict[str, Callable[[], model_zoo.Built]] = {
    "gpt2-4": lambda: model_zoo.gpt2(4),
    "llama-4": lambda: model_zoo.llama(4),
    "bert-4": lambda: model_zoo.bert(4),
    "t5-2": lambda: model_zoo.t5(2),
    "vit-4": lambda: model_zoo.vit(4),
    "resnet-18": model_zoo.MODELS["resnet-18"],
    "densenet": model_zoo.densenet,
    "unet": model_zoo.MODELS["unet"],
}
BETWEEN = (0.05, 0.15, -0.05, 0.3, 0.5, 0.7)
"""Budgets: so far from the least peak that the search finds to that without recomputation. Below 0 the search has no plan."""


def nothing(*_: Any, **__: Any) -> int:
    return 0


def as_found(*arguments: Any) -> Any:
    """Returns the outcome of a search among ``arguments`` as it is, in place of a function that would improve it."""
    return next(argument for argument in arguments if isinstance(argument, api.PlanningResult))


def without_neighbourhoods(self: large_neighborhood.Improvement, start: Any, neighbourhoods: int, within_gap: Any) -> Any:
    """Returns the outcome of a search that solves small models whole and keeps the first plan of large ones."""
    whole = self.model.columns <= SETTINGS.neighborhood.whole_model_columns
    return RUN(self, start, neighbourhoods if whole else 0, within_gap)


RUN = large_neighborhood.Improvement.run
OFF: dict[str, Switch] = {
    "recreate": lambda: mock.patch.object(Search, "recreate", nothing),
    "bound": lambda: mock.patch.object(time_indexed_bound, "tighten", as_found),
    "annealing": lambda: mock.patch.object(annealing, "improve", as_found),
    "polish": lambda: mock.patch.object(annealing, "polished", return_value=[]),
    "afresh": lambda: mock.patch.object(annealing, "recompute_per_use", return_value=None),
    "exact": lambda: mock.patch.object(driver, "improve", as_found),
    "neighbourhoods": lambda: mock.patch.object(large_neighborhood.Improvement, "run", without_neighbourhoods),
}
FILLED_ALONE, SEARCH_ALONE = "search alone, filled", "+ ruin and recreate: search alone"
IMPROVERS: dict[str, tuple[str, ...]] = {
    FILLED_ALONE: ("recreate", "bound", "annealing", "exact"),
    SEARCH_ALONE: ("bound", "annealing", "exact"),
    "+ better bound": ("annealing", "exact"),
    "+ annealing": ("polish", "exact"),
    "+ polish": ("exact",),
    "+ exact model": ("neighbourhoods",),
    "+ neighbourhoods: all": (),
    "all but ruin and recreate": ("recreate",),
    "all but better bound": ("bound",),
    "all but annealing": ("annealing",),
    "all but polish": ("polish",),
    "all but plans made afresh": ("afresh",),
}
"""The switches that are off, by the name of the variant."""

FAMILIES: dict[str, Strategies] = {
    "every family": EVERY_STRATEGY,
    "without minimum cuts": EVERY_STRATEGY & ~Strategies.CURVE,
    "without segments": EVERY_STRATEGY & ~Strategies.SEGMENTS,
    "without ruin and recreate": EVERY_STRATEGY & ~Strategies.RECREATE,
    "without filling": EVERY_STRATEGY & ~Strategies.FILL & ~Strategies.RECREATE,
}


@dataclass(frozen=True)
class Planned:
    """One planning of one graph for one budget. Costs are shares of the graph's seconds."""

    kind: str
    cell: str
    variant: str
    cost: float | None
    """None if the plan is over the budget."""
    gap: float | None
    peak: float
    """In budgets."""
    seconds: float

    @property
    def key(self) -> tuple[str, ...]:
        return self.kind, self.cell, self.variant


def plannings(known: dict[tuple[str, ...], Planned], limit: float) -> Iterator[Planned]:
    """Yields the plans that are not known yet."""
    for place in BETWEEN:
        for name in MODELS:
            for fuses in (False, True):
                cell, kind = f"{name} at {place}", "fused" if fuses else "unfused"
                if not fuses:
                    yield from improved(kind, cell, partial(joint, name, False), place, known, limit)
                yield from searched(f"{kind}, search", cell, partial(joint, name, fuses), place, known, limit)
    for size, seed in LAYERED:
        for share in LAYERED_SHARES:
            yield from improved("layered", f"{size} seed {seed} at {share}", partial(layered, size, seed), share, known, limit)


@cache
def layered(size: int, seed: int) -> Graph:
    drawn = generate(size, WIDTHS[size], seed)
    return Graph.from_dag(drawn.seconds, drawn.sizes, drawn.edges)


@cache
def joint(name: str, fuses: bool) -> Graph:
    """Returns the joint graph of a model's step, priced by data sheets."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    options = {"cost_model": "roofline", "compiler": "inductor" if fuses else "aot_eager", "memory_budget": 1.0}
    report = autoremat.explain(model, *inputs, options=options)
    assert report.plan is not None
    return report.plan.graph


@cache
def ends(graph: Graph) -> tuple[int, int]:
    """Returns the least peak that the search finds, and the peak without recomputation."""
    planner = Planner(graph, 60.0)
    return planner.search.smallest.peak_bytes, planner.baseline.peak_bytes


def budget_of(graph: Graph, place: float) -> int:
    """Returns the budget in bytes: a share of the peak for a graph of one phase, else a place between the ends."""
    if graph.single_phase:
        return int(place * peak_of_all(graph))
    least, most = ends(graph)
    return int(least + place * (most - least))


@cache
def peak_of_all(graph: Graph) -> int:
    return autoremat.plan(graph, solver="none").peak_bytes


def improved(
    kind: str, cell: str, graph_of: Callable[[], Graph], place: float, known: dict[tuple[str, ...], Planned], limit: float
) -> Iterator[Planned]:
    """Yields plans of the improvers of `autoremat.plan`, one after another.

    Where the search is within the gap, nothing else runs.
    """
    missing = [variant for variant in IMPROVERS if (kind, cell, variant) not in known]
    if not missing:
        return
    graph = graph_of()
    budget = budget_of(graph, place)
    good_gap = SETTINGS.portfolio.single_phase_good_gap if graph.single_phase else SETTINGS.portfolio.good_gap
    rows: dict[str, Planned] = {}
    for variant, off in IMPROVERS.items():
        search = rows.get(SEARCH_ALONE if "recreate" not in off else FILLED_ALONE)
        if (kind, cell, variant) in known:
            rows[variant] = known[kind, cell, variant]
            continue
        if search is not None and search.cost is not None and search.gap is not None and search.gap <= good_gap:
            rows[variant] = replace(search, variant=variant)
        else:
            with contextlib.ExitStack() as stack:
                # Others who use the machine must not shorten what is tried.
                stack.enter_context(mock.patch("time.monotonic", time.process_time))
                for mechanism in off:
                    stack.enter_context(OFF[mechanism]())
                begun = time.process_time()
                found = autoremat.plan(graph, budget, time_limit=limit)
                seconds = time.process_time() - begun
            rows[variant] = planned(kind, cell, variant, graph, found, budget, seconds)
        yield rows[variant]


def searched(
    kind: str, cell: str, graph_of: Callable[[], Graph], place: float, known: dict[tuple[str, ...], Planned], limit: float
) -> Iterator[Planned]:
    """Yields plans of the search that the backend makes, by each strategy of candidates."""
    for variant, strategies in FAMILIES.items():
        if (kind, cell, variant) not in known:
            graph = graph_of()
            budget = budget_of(graph, place)
            begun = time.process_time()
            outcome = Planner(graph, limit, strategies).find(budget)
            seconds = time.process_time() - begun
            yield planned(kind, cell, variant, graph, outcome.plan or outcome.smallest, budget, seconds)


def planned(
    kind: str, cell: str, variant: str, graph: Graph, found: autoremat.Plan, budget: int, seconds: float
) -> Planned:  # fmt: skip
    cost = found.cost_seconds / graph.step_seconds if found.peak_bytes <= budget else None
    gap = found.gap if cost is not None and math.isfinite(found.gap) else None
    return Planned(kind, cell, variant, cost, gap, found.peak_bytes / budget, seconds)


def tables_of_planners(rows: list[Planned]) -> Iterator[Table]:
    titles = {
        "layered": "Random layered graphs",
        "unfused": "Joint graphs without fusion",
        "unfused, search": "Joint graphs without fusion: the search",
        "fused, search": "Joint graphs that Inductor fuses: the search, which alone plans them",
    }
    for kind, title in titles.items():
        chosen = [row for row in rows if row.kind == kind]
        if not chosen:
            continue
        best: dict[str, float] = {}
        for row in chosen:
            if row.cost is not None:
                best[row.cell] = min(best.get(row.cell, math.inf), row.cost)
        bounded = kind in ("layered", "unfused")
        table = Table(title=f"{title}; {len({row.cell for row in chosen})} cells, costs in % of the step")
        columns = ("variant", "plans that fit", "best or 0.01 near", "over the best, mean", "worst")
        for column in (*columns, *(("gap, mean", "gap <= 1 %") if bounded else ()), "seconds, mean", "worst"):
            table.add_column(column, justify="left" if column == "variant" else "right")
        for variant in dict.fromkeys(row.variant for row in chosen):
            own = [row for row in chosen if row.variant == variant]
            over = [100 * (row.cost - best[row.cell]) for row in own if row.cost is not None]
            gaps = [100 * row.gap for row in own if row.gap is not None]
            figures = [str(len(over)), str(sum(x <= 0.01 for x in over)), mean(over), f"{max(over, default=math.nan):.2f}"]
            if bounded:
                figures += [mean(gaps), str(sum(gap <= 1.0 for gap in gaps))]
            seconds = [row.seconds for row in own]
            table.add_row(variant, *figures, f"{statistics.fmean(seconds):.2f}", f"{max(seconds):.1f}")
        yield table


def mean(figures: Sequence[float]) -> str:
    return f"{statistics.fmean(figures):.2f}" if figures else "-"


# -- cost models ---------------------------------------------------------------------------------------------------------

TIMED = ("gpt2",)


@dataclass(frozen=True)
class Timed:
    """Seconds until a model's step is planned, in a process that has measured nothing yet."""

    model: str
    cost_model: str
    first: float
    again: float
    """The seconds for the same step in another process, which finds the measurements of the first in the cache."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.cost_model


def explained_in(model: str, cost_model: str, folder: str) -> float:
    """Returns the seconds of an explanation in a process of its own."""
    code = (
        "import time, lowering, autoremat\n"
        f"model, inputs = lowering.build({model!r})\n"
        "begun = time.perf_counter()\n"
        f"autoremat.explain(model, *inputs, options={{'cost_model': {cost_model!r}, 'memory_budget': 0.7}})\n"
        "print('seconds', time.perf_counter() - begun)"
    )
    environment = os.environ | {"AUTOREMAT_CACHE_DIR": folder}
    here = str(Path(__file__).resolve().parent)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=here, env=environment, check=True, capture_output=True, text=True
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def timings(known: dict[tuple[str, ...], Timed]) -> Iterator[Timed]:
    for model in TIMED:
        for cost_model in COST_MODELS:
            if (model, cost_model) not in known:
                with tempfile.TemporaryDirectory() as folder:
                    first, again = (explained_in(model, cost_model, folder) for _ in range(2))
                yield Timed(model, cost_model, first, again)


def regrets(rows: list[cost_scores.Row], cost_model: str) -> list[float]:
    """Returns, for each measured peak, the regret of a cost model as a share of a step.

    The regret is the time of the plan that the cost model takes above that of the fastest plan within that peak.
    """
    found = []
    for limit in rows:
        within = [row for row in rows if row.model == limit.model and row.peak_bytes <= limit.peak_bytes]
        chosen = min(within, key=lambda row: row.predicted[cost_model])
        found.append(chosen.step_seconds / min(row.step_seconds for row in within) - 1)
    return found


def tables_of_cost_models(rows: list[Timed]) -> Iterator[Table]:
    measured = [cost_scores.Row(**entry) for entry in json.loads((RESULTS / "costs.json").read_text())["rows"]]
    scores = cost_scores.scores(measured)
    table = Table(title=f"Cost models on {len(measured)} measured plans (costs.json), and the seconds of the first explanation")
    columns = (
        "cost model",
        "median error, % of the step",
        "pairs ranked rightly",
        "slower than the fastest, mean %",
        "worst %",
    )
    for column in (*columns, *(f"{model}: {when}" for model in TIMED for when in ("first s", "again s"))):
        table.add_column(column, justify="left" if column == "cost model" else "right")
    for name in measured[0].predicted:
        score, lost = scores.get(name), [100 * regret for regret in regrets(measured, name)]
        if score is not None:
            ranked = f"{100 * (score.ranked_rightly or 0):.1f} % of {score.pairs}"
            timed = {row.model: row for row in rows if row.cost_model == name}
            seconds = [f"{x:.1f}" for model in TIMED if model in timed for x in (timed[model].first, timed[model].again)]
            table.add_row(name, f"{100 * score.median_error:.1f}", ranked, mean(lost), f"{max(lost):.1f}", *seconds)
    yield table


# -- workarounds for Inductor --------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Three attentions with one mask, which the backward reads too."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        mask = torch.where(allowed, 0.0, -torch.inf)
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (2, -1)).transpose(1, 2)
            x = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)
        return x.square().mean()


@torch.compiler.nested_compile_region
def region(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.gelu(x @ up) @ down


class Regions(nn.Module):
    """Four calls of a nested compile region."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.ParameterList(torch.randn(width, 4 * width) / 8 for _ in range(4))
        self.down = nn.ParameterList(torch.randn(4 * width, width) / 16 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = region(x, up, down)
        return x.square().mean()


class Strided(nn.Module):
    """Images that are convolved channels last and read by their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = (x * self.scale).relu()
        rows = hidden.as_strided((4, 8, 16, 16), (2048, 256, 16, 1))
        return self.convolve(hidden).square().mean() + (rows.sin() * torch.arange(16.0)).sum()


CASES: dict[str, Callable[[], model_zoo.Built]] = {
    **lowering.KINDS,
    "masked": lambda: (Masked(), (torch.randn(4, 128, 32), torch.rand(4, 1, 128, 128) > 0.1)),
    "regions": lambda: (Regions(), (torch.randn(512, 64),)),
    "strided": lambda: (Strided(), (torch.randn(4, 8, 16, 16),)),
}
CODE_BETWEEN = (0.05, 0.4, 1.0)


@contextlib.contextmanager
def reading_through_regions() -> Iterator[None]:
    with mock.patch.object(passes, "forward_region_operands", nothing):
        yield


class ReusingBuffers:
    """Inductor's settings, of which the one that forbids to reuse buffers cannot be patched."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settings, name)

    def patch(self, changes: dict[str, Any]) -> Any:
        return self.settings.patch({} if changes == {"allow_buffer_reuse": False} else changes)


def reusing_buffers() -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which buffers are kept for others of their size, as Inductor does; the kernels stay in order."""
    return mock.patch.object(inductor_lowering, "inductor_config", ReusingBuffers(inductor_lowering.inductor_config))


WORKAROUNDS: dict[str, tuple[Switch, tuple[str, ...]]] = {
    "accumulate": (lambda: mock.patch.object(passes, "accumulate_into_first", nothing), ("gpt2", "t5", "bert")),
    "one_hot_sums": (lambda: mock.patch.object(passes, "simplify_one_hot_sum", nothing), ("gpt2", "llama")),
    "materialize_shared": (lambda: mock.patch.object(passes, "materialize_shared", nothing), ("masked", "t5", "bert")),
    "preserve_strides": (lambda: mock.patch.object(passes, "preserve_strides", nothing), ("strided",)),
    "pass_through": (reading_through_regions, ("regions",)),
    "channels last at once": (
        lambda: mock.patch.object(lowering_stage, "before_lowering", nothing), ("unet", "densenet", "resnet"),
    ),
    "pinned kernel order": (
        lambda: mock.patch.object(inductor_lowering, "_pin_order", nothing),
        ("gpt2", "llama", "bert", "t5", "vit", "resnet", "unet", "densenet", "lstm"),
    ),
    "no reuse of buffers": (reusing_buffers, ("gpt2", "llama", "vit", "unet", "lstm")),
}  # fmt: skip
"""The context that switches each off, and the models for which it may matter."""

EVERYTHING = "-"


@dataclass(frozen=True)
class Coded:
    """The code of one plan, without a workaround."""

    model: str
    place: float
    without: str
    budget_bytes: int
    planned_bytes: int
    """The simulated peak with code headroom."""
    code_bytes: int | None
    cost: float
    """Recomputation and traffic, in steps."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, str(self.place), self.without


def codes(known: dict[tuple[str, ...], Coded]) -> Iterator[Coded]:
    """Yields the codes that are not known yet."""
    for model in CASES:
        mechanisms = [EVERYTHING, *(name for name, (_, models) in WORKAROUNDS.items() if model in models)]
        missing = [(p, m) for p in CODE_BETWEEN for m in mechanisms if (model, str(p), m) not in known]
        if missing:
            whole = explained(model, 1.0, False)
            least = whole.minimum_peak_bytes + whole.code_headroom_bytes
            most = max(whole.baseline_peak_bytes + whole.code_headroom_bytes, least)
        for place, mechanism in missing:
            off = contextlib.nullcontext if mechanism == EVERYTHING else WORKAROUNDS[mechanism][0]
            with off():
                yield coded(model, place, mechanism, int(least + place * (most - least)))


def explained(model: str, budget: int | float, lower: bool) -> autoremat.Report:
    torch._dynamo.reset()
    torch.manual_seed(0)
    built, inputs = CASES[model]()
    options = {"cost_model": "roofline", "memory_budget": budget, "on_infeasible": "best_effort", "time_limit": 60.0}
    return autoremat.explain(built.train(), *inputs, options=options, lower=lower)


def coded(model: str, place: float, without: str, budget: int) -> Coded:
    """Returns the code of the first plan. The loop that plans again is off."""

    def accept(attempts: list[Attempt], rules: Rules) -> Accept | None:
        return Accept() if attempts[-1].is_complete else None

    with mock.patch.object(compile_loop, "next_step", accept):
        report = explained(model, budget, True)
    assert report.plan is not None
    cost = report.plan.cost_seconds / report.step_seconds
    planned_bytes = report.predicted_peak_bytes + report.code_headroom_bytes
    return Coded(model, place, without, budget, planned_bytes, report.compiled_peak_bytes, cost)


def tables_of_workarounds(rows: list[Coded]) -> Iterator[Table]:
    table = Table(title="Peaks of the code that Inductor generates, KiB, with all workarounds and without one")
    for column in (
        "without",
        "model",
        "budget",
        "planned",
        "code with all",
        "code without",
        "more %",
        "cost % with",
        "without",
    ):
        table.add_column(column, justify="left" if column in ("without", "model") else "right")
    summary = Table(title="The same, summed up")
    for column in ("without", "cells", "lower peak", "higher peak", "over the budget with all", "without", "mean %", "worst %"):
        summary.add_column(column, justify="left" if column == "without" else "right")
    whole = {(row.model, row.place): row for row in rows if row.without == EVERYTHING}
    for mechanism in WORKAROUNDS:
        more, over = [], [0, 0]
        for row in (row for row in rows if row.without == mechanism):
            base = whole[row.model, row.place]
            if row.code_bytes is None or base.code_bytes is None:
                continue
            more.append(100 * (row.code_bytes / base.code_bytes - 1))
            over = [over[0] + (base.code_bytes > base.budget_bytes), over[1] + (row.code_bytes > row.budget_bytes)]
            sizes = (row.budget_bytes, row.planned_bytes, base.code_bytes, row.code_bytes)
            costs = (f"{100 * base.cost:.2f}", f"{100 * row.cost:.2f}")
            table.add_row(mechanism, row.model, *(f"{size / 1024:.0f}" for size in sizes), f"{more[-1]:+.1f}", *costs)
        if more:
            counts = (len(more), sum(x < 0 for x in more), sum(x > 0 for x in more), *over)
            summary.add_row(mechanism, *map(str, counts), f"{statistics.fmean(more):+.2f}", f"{max(more):+.1f}")
    yield summary
    yield table


# -- steps that run --------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """A projection onto a vocabulary and the cross entropy."""

    def __init__(self, width: int = 64, vocabulary: int = 8192) -> None:
        super().__init__()
        self.project = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.project(x), targets)


RUNS: dict[str, tuple[Callable[[], model_zoo.Built], str, dict[str, Any]]] = {
    "head": (lambda: (Head(), (torch.randn(1024, 64), torch.randint(0, 8192, (1024,)))), "one_hot_sums", {}),
    "strided": (CASES["strided"], "preserve_strides", {"recompute": ("aten.relu", "aten.mul")}),
}
STEPS = 21


@dataclass(frozen=True)
class Ran:
    """Steps of one model, without a workaround."""

    model: str
    without: str
    step_seconds: float
    """The median."""
    error: float
    """The largest difference of a gradient from that of eager mode, in its largest entries."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.without


def runs(known: dict[tuple[str, ...], Ran]) -> Iterator[Ran]:
    """Yields the runs that are not known yet."""
    for model, (build, mechanism, options) in RUNS.items():
        for without in (EVERYTHING, mechanism):
            if (model, without) not in known:
                off = contextlib.nullcontext if without == EVERYTHING else WORKAROUNDS[without][0]
                torch._dynamo.reset()
                torch.manual_seed(0)
                built, inputs = build()
                expected = gradients(built, built, inputs)
                compiled = torch.compile(built, backend="autoremat", options={"cost_model": "roofline", **options})
                with off(), lowering.uncached():
                    found = gradients(built, compiled, inputs)
                error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
                yield Ran(model, without, statistics.median(timed(built, compiled, inputs) for _ in range(STEPS)), error)


def gradients(model: nn.Module, called: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    called(*inputs).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def timed(model: nn.Module, called: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    begun = time.perf_counter()
    gradients(model, called, inputs)
    return time.perf_counter() - begun


def tables_of_runs(rows: list[Ran]) -> Iterator[Table]:
    table = Table(title="Steps that run, with all workarounds and without one")
    for column in ("without", "model", "step with all, ms", "without, ms", "largest error of a gradient with all", "without"):
        table.add_column(column, justify="left" if column in ("without", "model") else "right")
    whole = {row.model: row for row in rows if row.without == EVERYTHING}
    for row in (row for row in rows if row.without != EVERYTHING):
        base = whole[row.model]
        seconds = (f"{1e3 * x:.2f}" for x in (base.step_seconds, row.step_seconds))
        table.add_row(row.without, row.model, *seconds, f"{base.error:.1e}", f"{row.error:.1e}")
    yield table


# -- the script ----------------------------------------------------------------------------------------------------------

PARTS: dict[str, type[Any]] = {"planners": Planned, "cost_models": Timed, "workarounds": Coded, "runs": Ran}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "tables"])
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run of this part has found")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds of one planning")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoremat.BudgetWarning)
    path = arguments.output / "ablation.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    found = {name: [kind(**entry) for entry in record.get(name, ())] for name, kind in PARTS.items()}
    limit = record.get("time limit of one planning", arguments.time_limit)
    clock = record.get("clock", PROCESSOR)
    if arguments.part in PARTS:
        rows = found[arguments.part]
        if arguments.fresh:
            rows.clear()
        if arguments.part == "planners" and not rows:
            limit, clock = arguments.time_limit, PROCESSOR
        known = {row.key: row for row in rows}
        made: dict[str, Callable[[], Iterator[Any]]] = {
            "planners": lambda: plannings(known, limit),
            "cost_models": lambda: timings(known),
            "workarounds": lambda: codes(known),
            "runs": lambda: runs(known),
        }
        for row in made[arguments.part]():
            print(row, flush=True)
            rows.append(row)
            write(found, limit, clock, path)
    write(found, limit, clock, path)
    print(path.with_suffix(".txt").read_text())


def write(found: dict[str, list[Any]], limit: float, clock: str, path: Path) -> None:
    """Writes ablation.json and ablation.txt."""
    setup = {"torch": torch.__version__, "threads": 1, "time limit of one planning": limit, "clock": clock}
    path.write_text(json.dumps(setup | {name: [asdict(row) for row in rows] for name, rows in found.items()}, indent=1) + "\n")
    with path.with_suffix(".txt").open("w") as file:
        console = Console(width=140, file=file)
        console.print(HEAD.format(limit=limit, **setup), highlight=False)
        makers = (tables_of_planners, tables_of_cost_models, tables_of_workarounds, tables_of_runs)
        for make, rows in zip(makers, found.values(), strict=True):
            for table in make(rows) if rows or make is tables_of_cost_models else ():
                console.print(table)


HEAD = """torch {torch}, one thread, processor seconds.
One planning had {limit:g} s of {clock}.
`autoremat.plan` has 10 s by the clock, in which annealing and neighbourhoods do
more. Cells that a run had no time for are in no table. Where the search is within 1 % of its bound (0.1 % on layered graphs)
nothing else runs, and all variants are equal. Budgets of joint graphs lie between the least peak that the search finds and the
peak without recomputation; one of the six lies below, where the search has no plan.
The code's peaks are those of one plan by the roofline's costs: the loop that plans again over a budget is off.
"""


if __name__ == "__main__":
    main()
