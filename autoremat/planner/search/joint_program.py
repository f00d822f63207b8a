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

Recomputation reads a saved value when the backward first reads the result, which depends on what else is saved. So the program
is a guide and no bound; its rounded solutions are saved sets to schedule. Other forms than those on the link are converted at
once, and free their bytes between the last read of the forward and the first of the backward.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from autoremat.planner.cost.durations import traffic_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Engine, Form, Kind
from autoremat.planner.mip import Program, Rows, Vector, solve
from autoremat.planner.plans.plan import Plan
from autoremat.planner.settings import settings

MILLISECOND, GIBIBYTE = 1e-3, float(2**30)
"""Units of the program, for the solver's tolerances."""

T = TypeVar("T")


class JointProgram:
    """The linear program of a graph for any budget.

    It counts the bytes by which other decisions differ from those of a plan without stays. ``seconds`` are those of each op
    when it runs first.
    """

    def __init__(self, graph: Graph, seconds: Vector, host_bytes: int | None = None) -> None:
        self.graph = graph
        self.clock: Vector = np.append(0.0, np.cumsum(seconds)) / MILLISECOND
        """For each op, the moment at which it begins."""
        needed = graph.ancestors(graph.producers(graph.backward_needs))
        self.ops = [o for o in sorted(needed) if graph.ops[o].may_run_again]
        self.values = sorted(graph.backward_needs.union(v for o in needed for v in graph.computed_inputs[o]))
        self.outputs = {*graph.forward_outputs, *graph.backward_outputs}
        self._number_columns()
        self._find_reads()
        self.rows = Rows()
        self._add_logic(self.rows)
        self._add_link(self.rows)
        self.memory_rows = slice(len(self.rows.low), len(self.rows.low) + len(self.points) - 1)
        """The rows whose bounds depend on the budget."""
        for point in self.points[:-1]:  # the last one is the end of the step
            self._add_memory(self.rows, point)
        again = {self.again[o]: -traffic_of(graph).recompute_seconds[o] for o in self.ops if o in graph.required_forward}
        again = {column: seconds / MILLISECOND for column, seconds in again.items()}
        self.rows.add({self.wait[p]: 1.0 for p in self.late} | again, 0.0, np.inf)
        if host_bytes is not None:
            held = {column: form.host_bytes / GIBIBYTE for _, form, column in self.link}
            self.rows.add(held, -np.inf, host_bytes / graph.calls.in_flight / GIBIBYTE)
        self.matrix, self.cost = self.rows.matrix(self.columns), np.zeros(self.columns)
        self.cost[list(self.wait.values())] = 1.0
        for value, columns in self.saved.items():
            self.cost[columns] = traffic_of(graph).saving_seconds[value] / MILLISECOND
        for (_, form), column in self.stored.items():
            converting = (one.seconds for one in (form.store, form.load) if one.engine is Engine.COMPUTE)
            self.cost[column] += sum(converting) / MILLISECOND

    def _number_columns(self) -> None:
        first, end, columns = self.graph.num_forward, len(self.graph.ops), itertools.count()
        self.late = [p for p in self._points(first, end, settings.program_points) if p > first]
        self.points = self._points(0, first, settings.program_points) + self.late
        self.again, self.kept = _numbered(self.ops, columns), _numbered(self.values, columns)
        storable = ((value, form) for value in self.values for form in self.graph.values[value].forms)
        self.stored = _numbered((one for one in storable if one[0] not in self.outputs), columns)
        self.wait, self.out = _numbered(self.points, columns), _numbered(self.points, columns)
        self.back, self.columns = _numbered(self.late, columns), next(columns)
        self.saved = {value: [column] for value, column in self.kept.items()}
        """For each value, the columns of which one is 1 if it is saved in any way."""
        for (value, _), column in self.stored.items():
            self.saved[value].append(column)
        self.link = [(v, form, column) for (v, form), column in self.stored.items() if form.store.engine is Engine.TO_HOST]
        """The values whose forms are on the host, with those forms and their columns."""

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
        high, upper, memory = np.array(self.rows.high), np.full(self.columns, np.inf), self.memory_rows
        again, chosen = set(plan.schedule.backward), np.zeros(self.columns)
        chosen[[self.kept[value] for value in plan.saved if value in self.kept]] = 1.0
        chosen[[column for op, column in self.again.items() if op in again]] = 1.0
        high[memory] = self.matrix[memory] @ chosen + (budget - self._most_bytes(plan)[:-1]) / GIBIBYTE
        upper[: self.wait[self.points[0]]] = 1.0
        program = Program(self.matrix, self.cost, np.array(self.rows.low), high, np.zeros(self.columns), upper)
        found, shares = solve(program, 0, seconds), np.zeros(len(self.graph.values))
        if found is None:
            return None
        for value, columns in self.saved.items():
            shares[value] = found[columns].sum()
        return shares

    def _there(self, value: int) -> dict[int, float]:
        producer = self.graph.makers[value]
        again = [self.again[producer]] if producer in self.again else []
        return dict.fromkeys([*self.saved[value], *again], 1.0)

    def _add_logic(self, rows: Rows) -> None:
        for value in sorted(self.graph.backward_needs):
            rows.add(self._there(value), 1.0, np.inf)
        for op, column in self.again.items():
            for value in self.graph.computed_inputs[op]:
                rows.add(self._there(value) | {column: -1.0}, 0.0, np.inf)
        for columns in self.saved.values():
            if len(columns) > 1:
                rows.add(dict.fromkeys(columns, 1.0), -np.inf, 1.0)

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
                rows.add(moved, -np.inf, rate * float(self.clock[point] - self.clock[before]))
        for point in self.points:
            stored = {c: -self._relief(v, form) for v, form, c in self.link if self.read_early[v] < point}
            rows.add({self.out[point]: 1.0} | stored, -np.inf, 0.0)
        for point in self.late:
            loaded = {c: -self._relief(v, form) for v, form, c in self.link if self.need[v] < point}
            rows.add({self.back[point]: 1.0} | loaded, 0.0, np.inf)
            rows.add({self.back[point]: 1.0, self.out[point]: -1.0}, -np.inf, 0.0)

    def _add_memory(self, rows: Rows, point: int) -> None:
        graph, first = self.graph, self.graph.num_forward
        is_late = point > first
        held: dict[int, float] = {self.out[point]: -1.0} | ({self.back[point]: 1.0} if is_late else {})
        for value in self.values:
            producer, size = graph.values[value].producer or 0, self._bytes(value)
            gone = self.read_late[value] < point if is_late else producer >= point
            in_use = not is_late and self.read_early[value] >= point and self._is_materialised(value)
            if not gone and not in_use and value not in self.outputs:
                held |= dict.fromkeys(self.saved[value], size)
                if is_late and self.need[value] <= point and producer in self.again and self._is_materialised(value):
                    held[self.again[producer]] = held.get(self.again[producer], 0.0) + size
        for (value, form), column in self.stored.items():
            is_away = self.read_early[value] < point <= self.need[value]
            if is_away and form.store.engine is not Engine.TO_HOST and column in held:
                held[column] -= self._relief(value, form)
        if others := graph.calls.others:
            for value, column in self.kept.items():
                held[column] = held.get(column, 0.0) + others * self._bytes(value)
            for (_, form), column in self.stored.items():
                held[column] = held.get(column, 0.0) + others * form.device_bytes / GIBIBYTE
        rows.add(held, -np.inf, np.inf)

    def _is_materialised(self, value: int) -> bool:
        return not self.graph.machine.fuses or self.graph.ops[self.graph.makers[value]].kind is Kind.EXTERN

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


def _numbered(keys: Iterable[T], columns: Iterator[int]) -> dict[T, int]:
    return dict(zip(keys, columns, strict=False))
