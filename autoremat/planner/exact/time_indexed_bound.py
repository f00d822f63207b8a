"""Time-indexed lower bound on the added seconds: one linear program over many program points of the backward.

    live(k, v)    value v is live at the beginning of stage k
    runs(k, o)     number of recomputations of op o from stage k on, at most one per stage
    again(k, o)    1 if there is any

    minimise    sum of seconds_o * runs(0, o)
    counting    runs(k + 1, o) <= runs(k, o) <= runs(k + 1, o) + 1
    retention   live(k + 1, v) <= live(k, v) + run(k, op of v)          with run(k, o) = runs(k, o) - runs(k + 1, o)
    reading     live(k, v) + run(k, op of v) >= 1                        for every v that an op of stage k reads
    inputs      run(k, o) <= live(k, u) + run(k, op of u)                for every input u of o
    memory      bytes of the live values  <=  budget - bytes that are live at the program point under every plan
    later       live(k, v) + again(k, op of v) >= 1                      for every v that is read from stage k on
    behind      again(k, o) <= live(k, u) + again(k, op of u)            for every input u of o
    paid        again(k, o) <= runs(k, o)

A *stage* reaches from one chosen program point (a backward op) to the next. Memory is counted at these points alone. Every plan
is therefore a solution, and the optimum is a lower bound.

The last three rows follow from the others for integers, but not in the relaxation. Without them, half an execution in each of
two stages would need only half of its inputs in each. With a single point and these rows, the program is the minimum cut of
``lower_bounds.py``. With all points and rows, the bound is far closer to the best plans. By weak duality, any prices of the
rows give a valid bound, so the solver may stop early and need not be exact.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack

from autoremat.planner.cost.fused_traffic import traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.mip import Program, Rows, exact_bound, lower_bound
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.lower_bounds import fixed_bytes
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.time_indexed_bound


@dataclass
class Stages:
    """Program of a two-phase graph that does not fuse, for any budget.

    The backward is divided into equal stretches. In each, the program point is the op with the most live bytes under ``plan``,
    because the bound gains most where memory is full.
    """

    graph: Graph
    plan: Plan
    moments: list[int] = field(init=False)
    """Backward ops that begin a stage, ascending."""
    live: list[dict[int, int]] = field(init=False)
    """For each stage, the columns of values that matter from it on."""
    runs: list[dict[int, int]] = field(init=False)
    """For each stage, the columns of ops that may run again."""
    again: list[dict[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.fixed = fixed_bytes(self.graph)
        self.moments = self._choose()
        self.read, self.later = self._reads()
        self.live, self.runs, self.again = [], [], []
        self.columns = 0
        for later in self.later:
            ops = self.graph.ancestors(self.graph.producers(later))
            values = later | {v for index in ops for v in self.graph.computed_inputs[index]}
            may_run = [index for index in ops if self._movable(index)]
            for columns, keys in ((self.live, values), (self.runs, may_run), (self.again, may_run)):
                columns.append({key: self.columns + number for number, key in enumerate(sorted(keys))})
                self.columns += len(columns[-1])

    def _movable(self, index: int) -> bool:
        return self.graph.ops[index].rematerializable and self.graph.ops[index].constraint is not Constraint.SAVE

    def _choose(self) -> list[int]:
        """Returns the program points: the first backward op, and the fullest op of each stretch."""
        first, end = self.graph.num_forward, len(self.graph.ops)
        full = np.zeros(end)
        sequence = np.array(self.plan.sequence[len(self.plan.schedule.forward) :], dtype=np.int64)
        np.maximum.at(full, sequence, self.plan.timeline.bytes_at[len(self.plan.schedule.forward) :])
        # Later stages have fewer columns, on average about half.
        stages = min(settings.maximum_stages, end - first, max(2 * settings.maximum_columns // (3 * max(first, 1)), 1))
        stretches = np.array_split(np.arange(first, end), stages)
        return sorted({first, *(int(part[np.argmax(full[part])]) for part in stretches)})

    def _reads(self) -> tuple[list[set[int]], list[set[int]]]:
        """Returns, for each stage, the forward values that it reads, and those that are read from its program point on.

        A stage's reads exclude its own program point and include the next one.
        """
        graph, made = self.graph, frozenset(self.graph.forward_values)
        ends = [*self.moments[1:], len(graph.ops) - 1]
        read: list[set[int]] = []
        for moment, end in zip(self.moments, ends, strict=True):
            read.append({v for index in range(moment + 1, end + 1) for v in graph.forward_reads[index]})
        read[-1] |= made.intersection(graph.backward_outputs)
        later: list[set[int]] = []
        following: set[int] = set()
        for moment, values in zip(reversed(self.moments), reversed(read), strict=True):
            following = following | values | set(graph.forward_reads[moment])
            later.append(following)
        return read, later[::-1]

    def _run(self, stage: int, index: int) -> tuple[list[int], list[int]]:
        """Returns the columns whose difference is the number of recomputations of op ``index`` in ``stage``."""
        plus = self.runs[stage].get(index)
        minus = self.runs[stage + 1].get(index) if stage + 1 < len(self.runs) else None
        return [] if plus is None else [plus], [] if minus is None else [minus]

    def _there(self, stage: int, value: int) -> tuple[list[int], list[int]]:
        """Returns the columns whose difference is at least 1 if ``value`` is live at the start of ``stage`` or recomputed in
        it."""
        (producer,) = self.graph.producers((value,))
        plus, minus = self._run(stage, producer)
        return [self.live[stage][value], *plus], minus

    def _logic(self) -> Rows:
        """Returns all rows except those of memory."""
        rows = Rows()
        for stage in range(len(self.moments)):
            self._rows_of_stage(rows, stage)
            self._rows_from_stage_on(rows, stage)
        return rows

    def _rows_of_stage(self, rows: Rows, stage: int) -> None:
        """Adds the rows of reading, retention, counting and inputs."""
        for value in self.read[stage]:
            rows.add(*self._there(stage, value), 1.0, np.inf)
        if stage + 1 < len(self.moments):
            for value, column in self.live[stage + 1].items():
                plus, minus = self._there(stage, value)
                rows.add([column, *minus], plus, -np.inf, 0.0)
        for index in self.runs[stage]:
            plus, minus = self._run(stage, index)
            rows.add(plus, minus, 0.0, 1.0)
            for value in self.graph.computed_inputs[index]:
                there, less = self._there(stage, value)
                rows.add([*plus, *less], [*minus, *there], -np.inf, 0.0)

    def _rows_from_stage_on(self, rows: Rows, stage: int) -> None:
        """Adds the rows of later, behind and paid."""
        live, again = self.live[stage], self.again[stage]

        def there(value: int) -> list[int]:
            (producer,) = self.graph.producers((value,))
            return [live[value], again[producer]] if producer in again else [live[value]]

        for value in self.later[stage]:
            rows.add(there(value), [], 1.0, np.inf)
        for index, column in again.items():
            rows.add([column], [self.runs[stage][index]], -np.inf, 0.0)
            for value in self.graph.computed_inputs[index]:
                rows.add([column], there(value), -np.inf, 0.0)

    def _mean_seconds(self) -> float:
        return max(self.graph.step_seconds, 1e-30) / len(self.graph.ops)

    def program(self, budget: int) -> Program:
        """Returns the relaxation for ``budget`` bytes.

        For the solver's tolerances, the unit of bytes is the budget and the unit of seconds is the mean op.
        """
        graph, stages, unit, second = self.graph, len(self.moments), float(max(budget, 1)), self._mean_seconds()
        lower, upper, cost = np.zeros(self.columns), np.ones(self.columns), np.zeros(self.columns)
        held = frozenset(graph.forward_outputs)
        places: list[tuple[int, int]] = []
        entries: list[float] = []
        for stage, moment in enumerate(self.moments):
            here = set(graph.forward_reads[moment])
            upper[list(self.runs[stage].values())] = float(stages - stage)
            for value, column in self.live[stage].items():
                lower[column] = float(value in here or value in held)
                if value not in held:  # fixed bytes include values that the caller holds
                    places.append((stage, column))
                    entries.append(graph.values[value].bytes / unit)
        for index, column in self.runs[0].items():
            # The first execution of an op that only the backward needs is not a recomputation, so it costs nothing.
            cost[column] = traffic_of(graph).recompute_seconds[index] / second if index in graph.required_forward else 0.0
        rows, columns = np.array(places, dtype=np.int64).reshape(-1, 2).T
        memory = csr_matrix((entries, (rows, columns)), shape=(stages, self.columns))
        room: NDArray[np.float64] = (budget - self.fixed[self.moments]) / unit
        logic = self._logic()
        return Program(
            csr_matrix(vstack([logic.matrix(self.columns), memory])),
            cost,
            np.concatenate([logic.low, np.full(stages, -np.inf)]),
            np.concatenate([logic.high, room]),
            lower,
            upper,
        )

    def seconds(self, budget: int, time_limit: float, enough: float = math.inf) -> float:
        """Returns a lower bound on the added seconds of plans within ``budget`` bytes; infinite if no plan fits.

        A bound of at least ``enough`` is not improved further.
        """
        if not self.columns:
            return 0.0
        program, second, deadline = self.program(budget), self._mean_seconds(), time.monotonic() + time_limit
        bound = -math.inf
        if self.columns <= settings.exact_columns:
            bound = exact_bound(program, False, time_limit / 2)
            if -math.inf < bound * second < enough:
                bound = max(bound, exact_bound(program, True, deadline - time.monotonic(), settings.nodes))
        if bound == -math.inf:
            bound = lower_bound(program, deadline - time.monotonic(), settings.iterations)
        return max(bound, 0.0) * second


def tighten(graph: Graph, budget: int | None, time_limit: float, found: PlanningResult, good_gap: float) -> PlanningResult:
    """Returns ``found`` with a better lower bound, unless its optimality gap, as a share of the step, is at most ``good_gap``.

    Graphs of a single phase and graphs that are not plain keep ``found``. ``time_limit`` is that of the whole planning, in
    seconds; the bound takes at most a share of it.
    """
    if budget is None or graph.single_phase or not graph.is_plain or found.is_converged(good_gap):
        return found
    begun, limit, step = time.monotonic(), settings.time_share * time_limit, graph.step_seconds
    enough = (found.plan.cost_seconds - good_gap * step) / (1.0 + good_gap) if found.plan else math.inf
    bound = Stages(graph, found.plan or found.smallest).seconds(budget, limit, enough)
    interrupted = found.interrupted or time.monotonic() - begun > limit
    return replace(found, lower_bound_seconds=max(bound, found.lower_bound_seconds), interrupted=interrupted)
