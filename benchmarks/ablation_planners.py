"""The ablation of planner improvers: plans of many graphs without one or several of them."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import model_zoo
import torch
from ablation_shared import Switch, mean, nothing
from random_layered import WIDTHS, generate
from rich.table import Table

import autoremat
from autoremat.planner import api
from autoremat.planner.exact import annealing, driver, large_neighborhood, time_indexed_bound
from autoremat.planner.graph.graph import Graph
from autoremat.planner.search.candidates import Search
from autoremat.planner.search.planner import Planner
from autoremat.planner.search.strategies import EVERY_STRATEGY, Strategies
from autoremat.planner.settings import SETTINGS

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
