"""Linear and integer programs, solved by HiGHS and PDLP through OR-Tools and SciPy. No other module calls these solvers.

Each sparse program is passed as one matrix, because building it variable by variable would take longer than solving it.
OR-Tools' ``model_builder`` hides the dual values of a PDLP that its limit ends, and those values give the bound. Its helper
shows them. MathOpt would too, and reads sparse programs since OR-Tools 9.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder_helper
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix

QUIET_AND_REPEATABLE = ("output_flag=false", "log_to_console=false", "threads=1", "random_seed=0")

LINEAR = ("solver=simplex", "simplex_dual_edge_weight_strategy=1")
"""Devex pricing. It needs less work per iteration than steepest edge, which matters for relaxations of many columns."""

PRECISION = 1e-5
"""Relative precision of bounds."""

SOLVED, INFEASIBLE = 0, 2
"""SciPy's status codes of a solved program and of an infeasible one."""

TOLERANCE = 1e-6
"""Amount by which an integer solution may violate a row."""

Vector = NDArray[np.float64]


@dataclass
class Rows:
    """Rows of a sparse matrix with their bounds, added one by one."""

    columns: list[list[int]] = field(default_factory=list)
    entries: list[list[float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, positive: list[int], negative: list[int], low: float, high: float) -> None:
        """Adds the row ``low <= sum of positive - sum of negative <= high``."""
        self._add(positive + negative, [1.0] * len(positive) + [-1.0] * len(negative), low, high)

    def add_entries(self, row: Mapping[int, float], low: float, high: float) -> None:
        """Adds the row ``low <= sum of entry · column <= high``, of entries by column."""
        self._add([*row], [*row.values()], low, high)

    def _add(self, columns: list[int], entries: list[float], low: float, high: float) -> None:
        self.columns.append(columns)
        self.entries.append(entries)
        self.low.append(low)
        self.high.append(high)

    def matrix(self, width: int) -> csr_matrix:
        starts = np.cumsum([0, *map(len, self.columns)])
        columns = np.fromiter((c for row in self.columns for c in row), dtype=np.int64)
        entries = np.fromiter((x for row in self.entries for x in row), dtype=np.float64)
        return csr_matrix((entries, columns, starts), shape=(len(self.columns), width))


@dataclass(frozen=True)
class Program:
    """The program: minimise ``cost`` x subject to ``low`` <= ``matrix`` x <= ``high`` and ``lower`` <= x <= ``upper``."""

    matrix: csr_matrix
    cost: Vector
    low: Vector
    high: Vector
    lower: Vector
    upper: Vector


@dataclass(frozen=True)
class Solution:
    """Solution of a program. ``optimal`` is False if the limit on time or work ended the search."""

    values: Vector
    optimal: bool


def _loaded(program: Program) -> model_builder_helper.ModelBuilderHelper:
    builder = model_builder_helper.ModelBuilderHelper()
    # The type stub of this method swaps the two parameters of ndarray.
    load: Callable[..., None] = builder.fill_model_from_sparse_data
    load(program.lower, program.upper, program.cost, program.low, program.high, program.matrix)
    return builder


def lower_bound(program: Program, seconds: float, iterations: int) -> float:
    """Returns a lower bound on the cost of ``program``, whose variables must be bounded; minus infinity if none is found.

    PDLP, a first-order method, runs for at most ``iterations`` (Applegate et al., "Practical large-scale linear programming
    using primal-dual hybrid gradient", NeurIPS 2021). The bound does not depend on the accuracy of PDLP: by weak duality, any
    prices of the rows give a valid bound.
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
    """Returns a lower bound on the cost of ``program``, over integer solutions only if ``whole_numbers`` is set.

    The bound is infinite if the program is infeasible, and minus infinity if time runs out. The simplex method computes it. For
    integers, branch and bound follows, with at most ``nodes`` nodes (0: no limit). The bound proven by then counts: SciPy's
    interface to HiGHS returns it even if no solution was found.
    """
    # The rows are widened by the solver's tolerance. A program that it finds infeasible is then infeasible in exact arithmetic.
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
    """Returns the lower bound that weak duality gives for ``program`` at any ``prices`` of its rows."""
    prices = np.where(((prices > 0.0) & np.isinf(program.low)) | ((prices < 0.0) & np.isinf(program.high)), 0.0, prices)
    ends = np.where(prices > 0.0, program.low, program.high)
    reduced = program.cost - program.matrix.T @ prices
    columns = np.where(reduced > 0.0, reduced * program.lower, reduced * program.upper)
    return float(prices[prices != 0.0] @ ends[prices != 0.0] + columns.sum())


def linear_optimum(cost: Vector, rows: Vector, most: Vector, equal_rows: Vector, equal: Vector) -> tuple[Vector, Vector] | None:
    """Returns the reduced costs and the values of the solution; None if the program has none.

    The program is dense: minimise ``cost`` x subject to ``rows`` x <= ``most``, ``equal_rows`` x = ``equal`` and x >= 0.
    """
    found = linprog(cost, rows, most, equal_rows, equal, method="highs")
    return None if found.status != SOLVED else (found.lower.marginals, found.x)


def solve(program: Program, integers: int, seconds: float, nodes: int = 0, gap: float = 0.0) -> Solution | None:
    """Returns a solution of ``program``, whose first ``integers`` variables are integers; None if none is found.

    ``nodes`` bounds the work (0: no limit). The same program with the same limit gives the same solution, unless ``seconds``
    interrupts the solver. ``gap`` is the relative gap at which a solution counts as optimal.
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
    return Solution(values, optimal)
