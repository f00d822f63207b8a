"""The planning interface without torch: a graph and a budget in, a checked plan out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace

from autoremat.basics.budget import budget_bytes, parse_budget
from autoremat.basics.checks import positive_seconds
from autoremat.basics.errors import OptionsError
from autoremat.basics.progress import progress_wanted, status_if_slow
from autoremat.planner.exact import annealing, driver, time_indexed_bound
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search import baselines, single_phase
from autoremat.planner.search.candidates import EVERY_STRATEGY, Strategies
from autoremat.planner.search.planner import PlanningResult

Solver = Callable[[Graph, int | None, float, int], PlanningResult]
"""From a graph, a budget in bytes (None: no bound), a time limit in seconds and a seed to the outcome of a search."""


def _searching(strategies: Strategies) -> Solver:
    """The solver that looks at these strategies of candidates. It draws no random numbers."""
    return lambda graph, budget, time_limit, seed: single_phase.search(graph, budget, time_limit, strategies)


def _following(policy: baselines.Policy) -> Solver:
    """The solver that follows ``policy``, which takes no time and draws no random numbers."""
    return lambda graph, budget, time_limit, seed: baselines.solve(graph, budget, policy)


def _by_integer_program(graph: Graph, budget: int | None, time_limit: float, seed: int) -> PlanningResult:
    """The event-gap model and its neighbourhoods, from nothing; nothing more is tried once a plan is proven optimal."""
    deadline = time.monotonic() + time_limit
    found = baselines.solve(graph, budget, baselines.save_all)
    return driver.improve(graph, budget, time_limit, seed, found, 0.0, deadline)


def _by_all_means(graph: Graph, budget: int | None, time_limit: float, seed: int) -> PlanningResult:
    """The search; where it leaves a gap, a better bound, annealing and then neighbourhoods of the event-gap model."""
    begun = time.monotonic()
    search_share, good_gap = (SEARCH_SHARE_OF_ONE_PHASE, GOOD_GAP_OF_ONE_PHASE) if graph.single_phase else (1.0, GOOD_GAP)
    found = single_phase.search(graph, budget, search_share * time_limit, EVERY_STRATEGY)
    found = time_indexed_bound.tighten(graph, budget, time_limit, found, good_gap)
    found = annealing.improve(graph, budget, time_limit, seed, found, good_gap, begun + ANNEALED_BY * time_limit)
    return driver.improve(graph, budget, time_limit, seed, found, good_gap, begun + time_limit)


SEARCH_SHARE_OF_ONE_PHASE = 0.15
"""Of the time for a graph of one phase, in which splits seldom give the best plans."""

ANNEALED_BY = 0.75
"""The share of the time after which annealing ends in any case, so that some is left for neighbourhoods."""

GOOD_GAP, GOOD_GAP_OF_ONE_PHASE = 0.01, 0.001
"""A plan this close to its lower bound, as a share of the step, is not improved further. The best plans of a graph of one
phase are often this close; a training step's is planned while somebody waits for it."""

SOLVERS: dict[str, Solver] = {
    "auto": _by_all_means,
    "ilp": _by_integer_program,
    "min_cut": _searching(Strategies.CURVE),
    "segments": _searching(Strategies.SEGMENTS | Strategies.FILL),
    "sqrt": _following(baselines.save_cuts),
    "recompute_all": _following(baselines.recompute_all),
    "save_all": _following(baselines.save_all),
}
"""By name: all of them together; the exact model; minimum cuts without segments; segments without minimum cuts; Chen et
al.'s policy of saving about a root of all values; recomputing all that may be; recomputing nothing."""


RENAMED = {"chain": "segments", "all": "recompute_all", "none": "save_all"}
"""Solvers by the names that earlier versions gave them."""


def plan(
    graph: Graph,
    memory_budget: int | float | str | None = None,
    solver: str = "auto",
    time_limit: float = 10.0,
    seed: int = 0,
) -> Plan:
    """The cheapest plan that ``solver`` (a key of ``SOLVERS``) finds for ``graph``, checked by a replay.

    ``memory_budget``: bytes of the peak (an int, or text such as "6GiB"), a share of the peak without recomputation (a float
    in (0, 1]), or None for no bound. ``time_limit``: seconds. Equal arguments give equal plans, unless the time limit cuts
    the search short (``Plan.interrupted``). If nothing found fits, the plan is that of least memory and its ``status`` says
    "infeasible". Raises ``OptionsError``, a ``ValueError``, for an argument that is not accepted.
    """
    if solver in RENAMED:
        new = RENAMED[solver]
        warnings.warn(f"solver={solver!r} is deprecated and goes with the next release; use {new!r}", DeprecationWarning, 2)
        solver = new
    if solver not in SOLVERS:
        raise OptionsError(f"solver={solver!r} is not accepted. Accepted: {', '.join(SOLVERS)}")
    if solver == "ilp" and graph.fuses:
        raise OptionsError(
            "solver='ilp' counts every result as materialised, but this graph's code generator fuses. Use 'auto'"
        )
    seconds = positive_seconds(time_limit, "time_limit")
    parsed = parse_budget(memory_budget, "memory_budget")
    budget = budget_bytes(parsed, single_phase.without_recomputation(graph).peak_bytes)
    with status_if_slow(f"planning {len(graph.ops):,} ops, at most {seconds:g} s,", shown=progress_wanted()):
        planning = SOLVERS[solver](graph, budget, seconds, seed)
    found = replace(
        planning.plan or planning.smallest,
        budget_bytes=budget,
        lower_bound_seconds=planning.lower_bound_seconds,
        lower_bound_bytes=planning.lower_bound_bytes,
        interrupted=planning.interrupted,
    )
    found.check()
    return found
