"""Linear and integer programs, solved by HiGHS through OR-Tools. No other module calls these solvers.

Each sparse program is passed as one matrix, because building it variable by variable would take longer than solving it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver.python import model_builder_helper
from scipy.sparse import csr_matrix

QUIET_AND_REPEATABLE = ("output_flag=false", "log_to_console=false", "threads=1", "random_seed=0")

LINEAR = ("solver=simplex", "simplex_dual_edge_weight_strategy=1")
"""Devex pricing. It needs less work per iteration than steepest edge, which matters for relaxations of many columns."""

Vector = NDArray[np.float64]


@dataclass
class Rows:
    """Rows of a sparse matrix with their bounds, added one by one."""

    rows: list[Mapping[int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, row: Mapping[int, float], low: float, high: float) -> None:
        """Adds the row ``low <= sum of entry · column <= high``, of entries by column."""
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def matrix(self, width: int) -> csr_matrix:
        starts = np.cumsum([0, *map(len, self.rows)])
        columns = np.fromiter((column for row in self.rows for column in row), dtype=np.int64)
        entries = np.fromiter((entry for row in self.rows for entry in row.values()), dtype=np.float64)
        return csr_matrix((entries, columns, starts), shape=(len(self.rows), width))


@dataclass(frozen=True)
class Program:
    """The program: minimise ``cost`` x subject to ``low`` <= ``matrix`` x <= ``high`` and ``lower`` <= x <= ``upper``."""

    matrix: csr_matrix
    cost: Vector
    low: Vector
    high: Vector
    lower: Vector
    upper: Vector


def solve(program: Program, integers: int, seconds: float, nodes: int = 2**31 - 1, gap: float = 0.0) -> Vector | None:
    """Returns the values of a solution of ``program``, whose first ``integers`` variables are integers; None if none is found.

    ``nodes`` bounds the work. The same program with the same limit gives the same solution, unless ``seconds``
    interrupts the solver. ``gap`` is the relative gap at which a solution counts as optimal.
    """
    builder, solver = model_builder_helper.ModelBuilderHelper(), model_builder_helper.ModelSolverHelper("highs")
    load: Callable[..., None] = builder.fill_model_from_sparse_data  # its type stub swaps the two parameters of ndarray
    load(program.lower, program.upper, program.cost, program.low, program.high, program.matrix)
    for column in range(integers):
        builder.set_var_integrality(column, True)
    solver.set_time_limit_in_seconds(max(seconds, 0.01))
    work = [f"mip_rel_gap={gap}", f"mip_max_nodes={nodes}"] if integers else LINEAR
    solver.set_solver_specific_parameters("\n".join([*QUIET_AND_REPEATABLE, *work]))
    solver.solve(builder)
    return np.array(solver.variable_values(), dtype=np.float64) if solver.has_solution() else None
