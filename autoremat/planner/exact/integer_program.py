"""Solves the interval model of a graph whole, by HiGHS through OR-Tools.

Bytes over the budget are not forbidden but cost a penalty. At some ops the simulator counts fewer bytes than the model. Further
solutions are granted this difference, until the plan no longer changes; the simulator judges each.

Branch and bound counts nodes, so only the deadline can interrupt it.
"""

from __future__ import annotations

import time

import numpy as np
from scipy.sparse import bmat, csr_matrix, eye

from autoremat.planner.exact.interval_model import IntervalModel, Vector, sites_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.mip import Program, solve
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.integer_program


def improve(
    graph: Graph, budget: int | None, found: PlanningResult, good_gap: float, deadline: float, columns: int = settings.columns
) -> PlanningResult:
    """Returns ``found`` or a better result.

    ``deadline`` is a time of the monotonic clock in seconds. Graphs that are not plain, and those whose model of depth 1 has
    more than ``columns``, keep ``found``.
    """
    if budget is None or not graph.is_plain or found.is_converged(good_gap):
        return found
    plans, interrupted = list[Plan](), False
    penalty = settings.penalty * max(graph.step_seconds, 1e-30) / max(found.baseline.peak_bytes, 1)
    for model in _models(graph, columns):
        allowance = np.zeros(len(graph.ops))
        for _ in range(settings.solutions):
            left = deadline - time.monotonic()
            program = _program(model, budget + allowance, penalty)
            solution = None if left <= 0.0 else solve(program, model.columns, left, settings.nodes, settings.gap)
            interrupted = interrupted or deadline <= time.monotonic()
            if solution is None:
                break
            chosen = np.round(solution.values[: model.columns])
            plan = Plan.of(graph, model.schedule(chosen), "integer program")
            if any(plan.schedule == other.schedule for other in plans):
                break
            plans.append(plan)
            simulated = np.zeros(len(graph.ops) + 1)
            np.maximum.at(simulated, np.array(sites_of(graph, plan.schedule), dtype=np.int64), plan.timeline.bytes_at)
            allowance = np.maximum(model.bytes_at(chosen) - simulated[:-1], 0.0)
    return found.with_plans(plans, budget, interrupted)


def _models(graph: Graph, columns: int) -> list[IntervalModel]:
    """Returns the deepest model that is small, or that of depth 1, and deeper ones of at most so many ``columns``."""
    models = list[IntervalModel]()
    for depth in settings.depths:
        model = IntervalModel(graph, depth)
        if not 0 < model.columns <= columns or (models and model.columns == models[-1].columns):
            break
        models = [model] if model.columns <= settings.columns else [*models, model]
    return models


def _program(model: IntervalModel, budget: Vector, penalty: float) -> Program:
    """The first variables are the columns. Others are the bytes over the budget at each op that can exceed it, in budgets."""
    logic, low, high = model.logic
    memory, room = model.memory.tocsr(), budget - model.fixed_bytes
    tight = np.flatnonzero((np.diff(memory.indptr) > 0) & (np.asarray(memory.sum(axis=1)).ravel() > room))
    unit, slacks = max(float(budget.max()), 1.0), len(tight)
    matrix = bmat([[logic, None], [memory[tight] / unit, -eye(slacks)]], format="csr") if slacks else logic
    return Program(
        csr_matrix(matrix),
        cost=np.concatenate([model.cost, np.full(slacks, penalty * unit)]),
        low=np.concatenate([low, np.full(slacks, -np.inf)]),
        high=np.concatenate([high, room[tight] / unit]),
        lower=np.concatenate([model.lower, np.zeros(slacks)]),
        upper=np.concatenate([model.upper, np.full(slacks, np.inf)]),
    )
