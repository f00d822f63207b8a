"""Linear program of the joint choice: save a value as it is, save it in a form, or compute it again.

Columns, all between 0 and 1 except the last three kinds:

    again(o)    op o runs again                     kept(v)     v is saved as it is
    stored(v)   v is saved in a form                wait(p)     seconds of recomputation and waits before point p
    out(p)      bytes stored by the link before p   back(p)     bytes loaded by the link before p, in the backward

A *point* lies before an op. The program minimises waits, conversions and the traffic of saving, subject to:

    what the backward reads is there                there(v) = kept(v) + stored(v) + again(op of v) >= 1
    inputs of a repeated op are there               again(o) <= there(u)
    the link's rate                                 out(p) - out(q) <= rate · (seconds from q to p + wait(p)); so for back
    values are stored after their last read         out(p) <= bytes of stored(v) whose last read of the forward is before p
    values are loaded before their first read       back(p) >= bytes of stored(v) that are read before p
    what is loaded has been stored                  back(p) <= out(p)
    memory at each point                            saved bytes - out(p) + back(p) + bytes beside them <= budget
    waits of the backward include recomputation     sum of wait(p) >= sum of seconds(o) · again(o)

Each value has one decision, and times are those of one sequence of ops. Recomputation reads a saved value when the backward
first reads the result, which depends on what else is saved. So the program is a guide and no bound; its rounded solutions are
saved sets to schedule.

Other forms than those on the link are converted at once, and free their bytes between the last read of the forward and the
first of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from autoremat.planner.cost.durations import traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Engine, Form, Kind
from autoremat.planner.mip import Program, Rows, solve
from autoremat.planner.plans.plan import Plan
from autoremat.planner.settings import settings

MILLISECOND, GIBIBYTE = 1e-3, float(2**30)
"""Units of the program, for the solver's tolerances."""

Vector = NDArray[np.float64]


class JointProgram:
    """The linear program of a graph for any budget.

    It counts the bytes by which other decisions differ from those of a plan without stays. ``seconds`` are those of each op
    when it runs first.
    """

    def __init__(self, graph: Graph, seconds: Vector, host_bytes: int | None = None) -> None:
        self.graph, self.seconds, self.host_bytes = graph, seconds, host_bytes
        self.clock: Vector = np.append(0.0, np.cumsum(seconds)) / MILLISECOND
        """For each op, the moment at which it begins."""
        needed = graph.ancestors(graph.producers(graph.backward_needs))
        self.ops = [o for o in sorted(needed) if graph.ops[o].may_run_again]
        self.values = sorted(graph.backward_needs.union(v for o in needed for v in graph.computed_inputs[o]))
        self.outputs = {*graph.forward_outputs, *graph.backward_outputs}
        self.forms: list[tuple[int, Form]] = [
            (v, form) for v in self.values if v not in self.outputs for form in graph.values[v].forms
        ]
        self._number_columns()
        self._find_reads()

    def _number_columns(self) -> None:
        first, end = self.graph.num_forward, len(self.graph.ops)
        self.early = self._points(0, first, settings.program_points[0])
        self.late = [p for p in self._points(first, end, settings.program_points[1]) if p > first]
        self.points = self.early + self.late
        counts = (len(self.ops), len(self.values), len(self.forms), len(self.points), len(self.points), len(self.late))
        begins = np.cumsum([0, *counts]).tolist()
        self.columns: int = begins[-1]
        self.again = dict(zip(self.ops, range(begins[0], begins[1]), strict=True))
        self.kept = dict(zip(self.values, range(begins[1], begins[2]), strict=True))
        self.stored = dict(zip(self.forms, range(begins[2], begins[3]), strict=True))
        self.wait = dict(zip(self.points, range(begins[3], begins[4]), strict=True))
        self.out = dict(zip(self.points, range(begins[4], begins[5]), strict=True))
        self.back = dict(zip(self.late, range(begins[5], begins[6]), strict=True))
        self.shares: int = begins[3]
        """Number of the columns that are at most 1."""
        self.stored_of: dict[int, list[int]] = {}
        for (value, _), column in zip(self.forms, self.stored.values(), strict=True):
            self.stored_of.setdefault(value, []).append(column)

    def _points(self, begin: int, end: int, count: int) -> list[int]:
        """Returns about ``count`` ops up to ``end``, spread evenly over the seconds from ``begin``."""
        moments = np.linspace(self.clock[begin], self.clock[end], count + 1)[1:]
        places = np.minimum(np.searchsorted(self.clock, moments), end).tolist()
        return sorted({*places, end})

    def _find_reads(self) -> None:
        """Finds the op that reads each value last in the forward, and those that read it first and last in the backward.

        A value that only recomputation reads is read whenever the backward first reads one of the results.
        """
        graph, first, end, repeated = self.graph, self.graph.num_forward, len(self.graph.ops), set(self.ops)
        self.read_early, self.need, self.read_late = ([end - 1] * len(graph.values) for _ in range(3))
        for value in reversed(graph.forward_values):
            readers, producer = graph.readers[value], graph.values[value].producer
            early, late = [r for r in readers if r < first], [r for r in readers if r >= first]
            again = late or [min(self.need[made] for made in graph.ops[r].outputs) for r in early if r in repeated]
            self.read_early[value] = max(early, default=producer or 0)
            self.need[value], self.read_late[value] = min(again, default=end - 1), max(again, default=end - 1)

    @cached_property
    def link(self) -> list[tuple[int, Form, int]]:
        """The values whose forms are on the host, with those forms and their columns."""
        return [(v, form, self.stored[v, form]) for v, form in self.forms if form.store.engine is Engine.TO_HOST]

    def _rate(self, seconds: Iterable[float]) -> float:
        """Returns the relief of the link in GiB per millisecond. ``seconds`` are those of its transfers."""
        relief = sum(self._relief(v, form) for v, form, _ in self.link)
        return relief / max(sum(seconds) / MILLISECOND, 1e-9)

    def _bytes(self, value: int) -> float:
        return self.graph.values[value].bytes / GIBIBYTE

    def _relief(self, value: int, form: Form) -> float:
        return (self.graph.values[value].bytes - form.device_bytes) / GIBIBYTE

    def solve(self, budget: int, plan: Plan, seconds: float) -> Vector | None:
        """Returns, for each value, the share of it that is saved, in any form; None if no solution is found in ``seconds``.

        Bytes are counted from those of ``plan``.
        """
        found = solve(self.program(budget, plan), 0, seconds)
        if found is None:
            return None
        shares = np.zeros(len(self.graph.values))
        for value in self.values:
            shares[value] = found[[self.kept[value], *self.stored_of.get(value, ())]].sum()
        return shares

    def program(self, budget: int, plan: Plan) -> Program:
        """Returns the program for a budget in bytes, which counts from those of ``plan``."""
        rows, memory = self._rows, self._memory_rows
        low, high = np.array(rows.low), np.array(rows.high)
        counted = self._matrix[memory] @ self._chosen(plan)
        high[memory] = counted + (budget - self._most_bytes(plan)[:-1]) / GIBIBYTE
        upper = np.append(np.ones(self.shares), np.full(self.columns - self.shares, np.inf))
        return Program(self._matrix, self._cost, low, high, np.zeros(self.columns), upper)

    @cached_property
    def _matrix(self) -> csr_matrix:
        return self._rows.matrix(self.columns)

    @cached_property
    def _rows(self) -> Rows:
        """All rows. The bounds of those of the memory depend on the budget."""
        traffic, rows, required = traffic_of(self.graph), Rows(), self.graph.required_forward
        self._add_logic(rows)
        self._add_link(rows)
        self._memory_rows = slice(len(rows.low), len(rows.low) + len(self.points) - 1)
        for point in self.points[:-1]:  # the last one is the end of the step
            self._add_memory(rows, point)
        again = {c: -traffic.recompute_seconds[o] / MILLISECOND for o, c in self.again.items() if o in required}
        rows.add_entries({self.wait[p]: 1.0 for p in self.late} | again, 0.0, np.inf)
        if self.host_bytes is not None:
            held = {column: form.host_bytes / GIBIBYTE for _, form, column in self.link}
            rows.add_entries(held, -np.inf, self.host_bytes / self.graph.calls.in_flight / GIBIBYTE)
        return rows

    @cached_property
    def _cost(self) -> Vector:
        traffic, cost = traffic_of(self.graph), np.zeros(self.columns)
        cost[list(self.wait.values())] = 1.0
        for value in self.values:
            cost[[self.kept[value], *self.stored_of.get(value, ())]] = traffic.saving_seconds[value] / MILLISECOND
        for (_, form), column in zip(self.forms, self.stored.values(), strict=True):
            converting = (t.seconds for t in (form.store, form.load) if t.engine is Engine.COMPUTE)
            cost[column] += sum(converting) / MILLISECOND
        return cost

    def _there(self, value: int) -> dict[int, float]:
        """Returns the columns whose sum is at least 1 if the value is there."""
        (producer,) = self.graph.producers((value,))
        columns = [self.kept[value], *self.stored_of.get(value, ())]
        return dict.fromkeys([*columns, self.again[producer]] if producer in self.again else columns, 1.0)

    def _add_logic(self, rows: Rows) -> None:
        for value in sorted(self.graph.backward_needs):
            rows.add_entries(self._there(value), 1.0, np.inf)
        for op, column in self.again.items():
            for value in self.graph.computed_inputs[op]:
                rows.add_entries(self._there(value) | {column: -1.0}, 0.0, np.inf)
        for value, columns in self.stored_of.items():
            rows.add_entries(dict.fromkeys([self.kept[value], *columns], 1.0), -np.inf, 1.0)

    def _add_link(self, rows: Rows) -> None:
        out = self._rate(form.store.seconds for _, form, _ in self.link)
        back = self._rate(form.load.seconds for _, form, _ in self.link)
        for columns, points, rate, begin in (
            (self.out, self.points, out, 0),
            (self.back, self.late, back, self.graph.num_forward),
        ):
            for before, point in zip([begin, *points], points, strict=False):
                moved = {columns[point]: 1.0, self.wait[point]: -rate}
                moved |= {columns[before]: -1.0} if before in columns else {}
                rows.add_entries(moved, -np.inf, rate * float(self.clock[point] - self.clock[before]))
        for point in self.points:
            stored = {c: -self._relief(v, form) for v, form, c in self.link if self.read_early[v] < point}
            rows.add_entries({self.out[point]: 1.0} | stored, -np.inf, 0.0)
        for point in self.late:
            loaded = {c: -self._relief(v, form) for v, form, c in self.link if self.need[v] < point}
            rows.add_entries({self.back[point]: 1.0} | loaded, 0.0, np.inf)
            rows.add_entries({self.back[point]: 1.0, self.out[point]: -1.0}, -np.inf, 0.0)

    def _add_memory(self, rows: Rows, point: int) -> None:
        graph, first = self.graph, self.graph.num_forward
        is_late = point > first
        held: dict[int, float] = {self.out[point]: -1.0} | ({self.back[point]: 1.0} if is_late else {})
        for value in self.values:
            producer, size = graph.values[value].producer or 0, self._bytes(value)
            gone = self.read_late[value] < point if is_late else producer >= point
            in_use = not is_late and self.read_early[value] >= point and self._is_materialised(value)
            if not gone and not in_use and value not in self.outputs:
                held |= dict.fromkeys([self.kept[value], *self.stored_of.get(value, ())], size)
                if is_late and self.need[value] <= point and producer in self.again and self._is_materialised(value):
                    held[self.again[producer]] = held.get(self.again[producer], 0.0) + size
        for (value, form), column in zip(self.forms, self.stored.values(), strict=True):
            is_away = self.read_early[value] < point <= self.need[value]
            if is_away and form.store.engine is not Engine.TO_HOST and column in held:
                held[column] -= self._relief(value, form)
        self._add_other_calls(held)
        rows.add_entries(held, -np.inf, np.inf)

    def _add_other_calls(self, held: dict[int, float]) -> None:
        if not (others := self.graph.calls.others):
            return
        for value, column in self.kept.items():
            held[column] = held.get(column, 0.0) + others * self._bytes(value)
        for (_, form), column in zip(self.forms, self.stored.values(), strict=True):
            held[column] = held.get(column, 0.0) + others * form.device_bytes / GIBIBYTE

    def _is_materialised(self, value: int) -> bool:
        (producer,) = self.graph.producers((value,))
        return not self.graph.machine.fuses or self.graph.ops[producer].kind is Kind.EXTERN

    def _chosen(self, plan: Plan) -> Vector:
        """Returns, for each column, 1 if the plan has chosen it, and else 0."""
        again, found = set(plan.schedule.backward), np.zeros(self.columns)
        found[[self.kept[value] for value in plan.saved if value in self.kept]] = 1.0
        found[[column for op, column in self.again.items() if op in again]] = 1.0
        return found

    def _most_bytes(self, plan: Plan) -> Vector:
        """Returns, for each point, the most bytes under the plan since the point before."""
        schedule, bytes_at, first = plan.schedule, plan.timeline.bytes_at, self.graph.num_forward
        border, begin, found = len(schedule.forward), 0, list[int]()
        places = np.maximum.accumulate([*schedule.forward, *(max(op, first) for op in schedule.backward)])
        for point in self.points:
            end = border if point == first else int(np.searchsorted(places, point))
            found.append(int(bytes_at[begin : end + 1].max()))
            begin = end
        return np.array(found, dtype=np.float64)
