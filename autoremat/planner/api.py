"""Planning interface without torch: returns a checked plan for a graph and a budget."""

import time
from collections.abc import Callable
from dataclasses import replace

from autoremat.basics.checks import budget_bytes, parse_budget, positive_seconds
from autoremat.basics.errors import OptionsError
from autoremat.basics.progress import progress_wanted, status_if_slow
from autoremat.planner.exact import annealing, interval_model
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner, PlanningResult, result_of
from autoremat.planner.search.starts import Starts, without_recomputation
from autoremat.planner.search.work_limit import WorkLimit
from autoremat.planner.settings import settings


def _by_integer_program(graph: Graph, budget: int | None, time_limit: float, seed: int) -> PlanningResult:
    """Returns the result of the integer program alone, of more columns for more time."""
    deadline = time.monotonic() + time_limit
    found = result_of(Starts(graph).save_what_constraints_allow(), budget)
    return interval_model.improve(graph, budget, found, 0.0, deadline, int(settings.columns * time_limit))


def _by_all_means(graph: Graph, budget: int | None, time_limit: float, seed: int) -> PlanningResult:
    """Returns the result of the search. If a gap remains, annealing follows, and the integer program of a small graph."""
    begun = time.monotonic()
    half = settings.search_share / 2  # splits of a single-phase graph seldom give the best plans
    search_share, good_gap = (half, settings.good_gap) if graph.single_phase else (1.0, settings.rough_gap)
    found = Planner(graph, search_share * time_limit).find(Limits(budget))
    found = annealing.improve(graph, budget, time_limit, seed, found, good_gap, begun + (1.0 + half) / 2 * time_limit)
    return interval_model.improve(graph, budget, found, good_gap, begun + time_limit)


def _by_cuts(graph: Graph, budget: int | None, time_limit: float, seed: int) -> PlanningResult:
    """Returns the result of the minimum cuts alone."""
    starts = Starts(graph, WorkLimit(time_limit))
    return result_of(starts.save_everything(), budget, starts.limit).with_plans(starts.plans, budget, starts.lacks_cuts)


SOLVERS: dict[str, Callable[[Graph, int | None, float, int], PlanningResult]] = {
    "auto": _by_all_means, "ilp": _by_integer_program, "min_cut": _by_cuts,
}  # fmt: skip
"""Solvers by name. They take a graph, a budget in bytes (None: no bound), a time limit in seconds, and a seed."""


def plan(
    graph: Graph,
    memory_budget: int | float | str | None = None,
    solver: str = "auto",
    time_limit: float = 10.0,
    seed: int = 0,
) -> Plan:
    """Returns the cheapest plan that ``solver`` (a key of ``SOLVERS``) finds for ``graph``, after a check.

    ``memory_budget`` bounds the peak. It is a number of bytes (an int, or text such as "6GiB"), a share of the peak without
    recomputation (a float in (0, 1]), or None. ``time_limit`` is in seconds, and grants an amount of work. Equal arguments give
    equal plans, unless the clock interrupts a solver (``Plan.interrupted``). If no plan found fits, the plan of the minimum
    peak found is returned, with the ``status`` "infeasible". Raises ``OptionsError``, a ``ValueError``, for an argument that is
    not accepted.
    """
    if solver not in SOLVERS:
        raise OptionsError(f"solver={solver!r} is not accepted. Accepted: {', '.join(SOLVERS)}")
    if solver == "ilp" and not graph.is_plain:
        raise OptionsError(
            "solver='ilp' counts the results of one call, all of them materialised, but this graph's code generator fuses, "
            f"other calls are open or values have forms (fuses={graph.machine.fuses}, {graph.calls}). Use 'auto'"
        )
    seconds = positive_seconds(time_limit, "time_limit")
    parsed = parse_budget(memory_budget, "memory_budget")
    budget = budget_bytes(parsed, without_recomputation(graph).peak_bytes)
    with status_if_slow(f"planning {len(graph.ops):,} ops, at most {seconds:g} s", shown=progress_wanted()):
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
