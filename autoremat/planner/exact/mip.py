"""Sparse linear and integer programs, solved by HiGHS through OR-Tools.

A model is handed over as one sparse matrix; building it variable by variable would take longer than solving it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder_helper
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

QUIET_AND_REPEATABLE = ("output_flag=false", "log_to_console=false", "threads=1", "random_seed=0")

LINEAR = ("solver=simplex", "simplex_dual_edge_weight_strategy=1")
"""Devex pricing: less work per iteration than steepest edge, which tells on relaxations of many columns."""

PRECISION = 1e-5
"""To which bounds are worked out, relative to the objective."""

INFEASIBLE = 2
"""SciPy's code for it."""

TOLERANCE = 1e-6
"""By which a solution in whole numbers may miss a row."""

Vector = NDArray[np.float64]


@dataclass
class Rows:
    """Rows of a sparse matrix with their bounds, written one by one."""

    columns: list[list[int]] = field(default_factory=list)
    entries: list[list[float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, positive: list[int], negative: list[int], low: float, high: float) -> None:
        """low <= sum of ``positive`` - sum of ``negative`` <= high."""
        self.columns.append(positive + negative)
        self.entries.append([1.0] * len(positive) + [-1.0] * len(negative))
        self.low.append(low)
        self.high.append(high)

    def matrix(self, width: int) -> csr_matrix:
        starts = np.cumsum([0, *map(len, self.columns)])
        columns = np.fromiter((c for row in self.columns for c in row), dtype=np.int64)
        entries = np.fromiter((x for row in self.entries for x in row), dtype=np.float64)
        return csr_matrix((entries, columns, starts), shape=(len(self.columns), width))


@dataclass(frozen=True)
class Program:
    """minimise ``cost`` x  subject to  ``low`` <= ``matrix`` x <= ``high``  and  ``lower`` <= x <= ``upper``."""

    matrix: csr_matrix
    cost: Vector
    low: Vector
    high: Vector
    lower: Vector
    upper: Vector


@dataclass(frozen=True)
class Solution:
    """What the solver found; ``optimal`` says whether it was done or out of time or work."""

    values: Vector
    objective: float
    bound: float
    optimal: bool


def _loaded(program: Program) -> model_builder_helper.ModelBuilderHelper:
    builder = model_builder_helper.ModelBuilderHelper()
    # Its type stub swaps the two parameters of ndarray.
    load: Callable[..., None] = builder.fill_model_from_sparse_data
    load(program.lower, program.upper, program.cost, program.low, program.high, program.matrix)
    return builder


def lower_bound(program: Program, seconds: float, iterations: int) -> float:
    """No solution of ``program``, whose variables are bounded, costs less; minus infinity if nothing is found out.

    By PDLP, a first-order method (Applegate et al., "Practical large-scale linear programming using primal-dual hybrid
    gradient", NeurIPS 2021), of so many ``iterations`` at most. The bound does not rest on its exactness: whatever prices of
    rows it ends with, they give a valid bound (weak duality).
    """
    solver = model_builder_helper.ModelSolverHelper("pdlp")
    solver.set_time_limit_in_seconds(max(seconds, 0.01))
    solver.set_solver_specific_parameters(
        f"termination_criteria {{ simple_optimality_criteria {{ eps_optimal_relative: {PRECISION} "
        f"eps_optimal_absolute: {PRECISION} }} iteration_limit: {iterations} }}"
    )
    solver.solve(_loaded(program))
    prices = np.array(solver.dual_values(), dtype=np.float64)
    return dual_bound(program, prices) if len(prices) == len(program.low) else -np.inf


def exact_bound(program: Program, whole_numbers: bool, seconds: float, nodes: int = 0) -> float:
    """No solution of ``program`` costs less; with ``whole_numbers``, none in whole numbers.

    Infinite if there is no solution at all; minus infinity if out of time.

    By the simplex method and, for whole numbers, by branch and bound of so many ``nodes`` at most (0: no bound). What that has
    proven when it ends counts: SciPy's interface to HiGHS tells it even where no solution was found.
    """
    # Rows are widened by the solver's tolerance: what it takes for infeasible is.
    rows = LinearConstraint(program.matrix, program.low - TOLERANCE, program.high + TOLERANCE)
    options = {"time_limit": max(seconds, 0.01), "mip_rel_gap": 10 * PRECISION} | ({"node_limit": nodes} if nodes else {})
    integrality = np.full(len(program.cost), int(whole_numbers))
    found = milp(program.cost, integrality=integrality, bounds=Bounds(program.lower, program.upper), constraints=rows,
                 options=options)  # fmt: skip
    if found.status == INFEASIBLE:
        return np.inf
    bound = found.mip_dual_bound if whole_numbers else found.fun if found.success else None
    return -np.inf if bound is None else float(bound) - PRECISION * abs(float(bound))


def dual_bound(program: Program, prices: Vector) -> float:
    """What weak duality says of ``program`` at these prices of its rows: no solution costs less, whatever they are."""
    prices = np.where(((prices > 0.0) & np.isinf(program.low)) | ((prices < 0.0) & np.isinf(program.high)), 0.0, prices)
    ends = np.where(prices > 0.0, program.low, program.high)
    reduced = program.cost - program.matrix.T @ prices
    columns = np.where(reduced > 0.0, reduced * program.lower, reduced * program.upper)
    return float(prices[prices != 0.0] @ ends[prices != 0.0] + columns.sum())


def solve(program: Program, integers: int, seconds: float, nodes: int = 0, gap: float = 0.0) -> Solution | None:
    """Solve ``program``, whose first ``integers`` variables are whole numbers; None if nothing was found.

    ``nodes`` bounds the work (0: no bound): the same program under the same bound gives the same solution, unless
    ``seconds`` cut it short. ``gap`` is the relative gap at which an answer counts as optimal.
    """
    builder = _loaded(program)
    for column in range(integers):
        builder.set_var_integrality(column, True)
    solver = model_builder_helper.ModelSolverHelper("highs")
    solver.set_time_limit_in_seconds(max(seconds, 0.01))
    settings = [*QUIET_AND_REPEATABLE, f"mip_rel_gap={gap}"]
    if not integers:
        settings += LINEAR
    if nodes:
        settings.append(f"mip_max_nodes={nodes}")
    solver.set_solver_specific_parameters("\n".join(settings))
    solver.solve(builder)
    if not solver.has_solution():
        return None
    optimal = solver.status() == model_builder_helper.SolveStatus.OPTIMAL
    values = np.array(solver.variable_values(), dtype=np.float64)
    return Solution(values, solver.objective_value(), solver.best_objective_bound(), optimal)
