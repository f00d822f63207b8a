"""Sparse linear and integer programs, solved by HiGHS through OR-Tools.

A model is handed over as one sparse matrix; building it variable by variable would take longer than solving it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder_helper
from scipy.sparse import csr_matrix

QUIET_AND_REPEATABLE = ("output_flag=false", "log_to_console=false", "threads=1", "random_seed=0")

LINEAR = ("solver=simplex", "simplex_dual_edge_weight_strategy=1")
"""Devex pricing: less work per iteration than steepest edge, which tells on relaxations of many columns."""

Vector = NDArray[np.float64]


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


def solve(program: Program, integers: int, seconds: float, nodes: int = 0, gap: float = 0.0) -> Solution | None:
    """Solve ``program``, whose first ``integers`` variables are whole numbers; None if nothing was found.

    ``nodes`` bounds the work (0: no bound): the same program under the same bound gives the same solution, unless
    ``seconds`` cut it short. ``gap`` is the relative gap at which an answer counts as optimal.
    """
    builder = model_builder_helper.ModelBuilderHelper()
    # Its type stub swaps the two parameters of ndarray.
    load: Callable[..., None] = builder.fill_model_from_sparse_data
    load(program.lower, program.upper, program.cost, program.low, program.high, program.matrix)
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
