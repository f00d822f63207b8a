"""Interval model: an integer program over retention intervals and recomputations.

    H[v, e] = 1   value v is retained from its previous event (or its computation) to event e
    R[o, t] = 1   op o is recomputed at site t
    available(v, e) = H[v, e] + R[op of v, e]

    minimise    sum of seconds_o * R[o, t]
    reading     available(v, e) >= 1                      if op e itself reads v, or e is the end and v an output
    retention   H[v, e] <= available(v, previous event of v)
    inputs      R[o, t] <= available(u, t)                for every input u of o
    memory      bytes retained over t, made available at t, and computed by t itself  <=  budget      at every op t

Ops run in the given sequence. A recomputation runs just before an op of that sequence, its *site*. The *events* of a value are
the ops that read it, the sites where a reader of it may be recomputed, and the end if the value must exist then. *Depth* bounds
the sites of an op. At depth 1 they are its own readers; each further level allows the inputs of ops recomputed there as well.
So columns grow with edges times depth, not with the square of the ops (Jain et al., "Checkmate", MLSys 2020).

The model simplifies: all ops recomputed at a site, their inputs and the results of the site's own op count as live together.
Graphs must not fuse. Bytes over the budget cost a penalty. Where the simulator counts fewer bytes than the model, further
solutions are granted the difference, until the plan no longer changes. Only the deadline can interrupt branch and bound.
"""

import itertools
import time
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from scipy.sparse import bmat, csc_matrix, csr_matrix, eye

from autoremat.planner.cost.durations import traffic_of
from autoremat.planner.graph.arrays import arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.mip import Program, Rows, Vector, solve
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import PlanningResult
from autoremat.planner.settings import settings

PENALTY = 64.0
"""Steps that an excess as large as the baseline's peak costs: so many that a plan that fits comes first."""


def recompute_sites(graph: Graph, depth: int) -> list[set[int]]:
    """Returns, for each op, the sites where it may be recomputed. The number of ops stands for the end.

    In a training step only forward ops are recomputed, and only in the backward.
    """
    end, first = len(graph.ops), 0 if graph.single_phase else graph.num_forward
    movable = [op.forward and op.may_run_again and bool(op.outputs) for op in graph.ops]
    # These values must exist at the end, and may be freed and recomputed before.
    at_end = frozenset(graph.forward_outputs if graph.single_phase else graph.backward_outputs)
    sites: list[set[int]] = [set() for _ in graph.ops]
    for index, op in enumerate(graph.ops):
        if movable[index]:
            readers = {r for v in op.outputs for r in (*graph.readers[v], *((end,) if v in at_end else ()))}
            sites[index] = {r for r in readers if r >= first and r > index + 1}
    for _ in range(depth - 1):
        before, sites = sites, [set(known) for known in sites]
        for index, known in enumerate(before):
            for producer in graph.producers(graph.computed_inputs[index]) if known else ():
                if movable[producer]:
                    sites[producer] |= {t for t in known if t > producer + 1}
        if sites == before:
            break
    return sites


class IntervalModel:
    """Interval model of ``graph`` over the columns of ``H`` and ``R``, for any budget. Raises ``ValueError`` if it fuses."""

    def __init__(self, graph: Graph, depth: int) -> None:
        if not graph.is_plain:
            raise ValueError("the event-gap model counts one call and every result; this graph fuses or other calls are open")
        self.graph, end, sites = graph, len(graph.ops), recompute_sites(graph, depth)
        self.must = [set(readers) for readers in graph.readers]
        for value in (*graph.forward_outputs, *graph.backward_outputs):
            self.must[value].add(end)
        events = [set(must) if graph.values[v].producer is not None else set() for v, must in enumerate(self.must)]
        for index, op_sites in enumerate(sites):
            for value in graph.computed_inputs[index]:
                events[value] |= op_sites
        columns = itertools.count()
        self.hold = [dict(zip(sorted(wanted), columns, strict=False)) for wanted in events]
        """For each value, the column of each event."""
        self.again = [dict(zip(sorted(wanted), columns, strict=False)) for wanted in sites]
        """For each op, the column of each site."""
        self.columns = next(columns)
        self.cost, self.lower, self.upper = np.zeros(self.columns), np.zeros(self.columns), np.ones(self.columns)
        for again, seconds in zip(self.again, traffic_of(graph).repeat_seconds, strict=True):
            self.cost[list(again.values())] = seconds
        for value in () if graph.single_phase else graph.forward_values:
            producer = graph.makers[value]
            if value in graph.forward_outputs:
                self.lower[list(self.hold[value].values())] = 1.0
            elif graph.ops[producer].constraint is Constraint.RECOMPUTE and self.again[producer]:
                crossing = [column for event, column in self.hold[value].items() if event >= graph.num_forward]
                self.upper[crossing[:1]] = 0.0

    def available(self, value: int, event: int) -> list[int]:
        """Returns the columns whose sum is at least 1 if ``value`` is available at ``event``."""
        again = self.again[self.graph.makers[value]].get(event)
        return [self.hold[value][event]] if again is None else [self.hold[value][event], again]

    @cached_property
    def memory(self) -> csc_matrix:
        """Bytes of each column (columns) at each op (rows)."""
        graph, end = self.graph, len(self.graph.ops)
        start, stop, size = np.zeros((3, self.columns), dtype=np.int64)
        for value, events in enumerate(self.hold):
            for previous, (event, column) in zip((graph.makers[value], *events), events.items(), strict=False):
                start[column], stop[column], size[column] = previous + 1, event + 1, graph.values[value].bytes
        for index, sites in enumerate(self.again):
            made = graph.made_bytes[index] + graph.ops[index].workspace_bytes
            for site, column in sites.items():
                start[column], stop[column], size[column] = site, site + 1, made
        lengths = (np.minimum(stop, end) - start).clip(0) * (size > 0)
        begins = np.append(0, np.cumsum(lengths))
        rows = np.arange(begins[-1]) - np.repeat(begins[:-1] - start, lengths)
        return csc_matrix((np.repeat(size, lengths).astype(np.float64), rows, begins), shape=(end, self.columns))

    @cached_property
    def logic(self) -> tuple[csc_matrix, Vector, Vector]:
        """Rows of reading, retention and inputs, with their lower and upper bounds."""
        rows = Rows()
        for value, events in enumerate(self.hold):
            before: list[int] = []
            for event, column in events.items():
                there = self.available(value, event)
                if event in self.must[value]:
                    rows.add(dict.fromkeys(there, 1.0), 1.0, np.inf)
                if before:
                    rows.add({column: 1.0} | dict.fromkeys(before, -1.0), -np.inf, 0.0)
                before = there
        for index, sites in enumerate(self.again):
            for site, column in sites.items():
                for value in self.graph.computed_inputs[index]:
                    rows.add({column: 1.0} | dict.fromkeys(self.available(value, site), -1.0), -np.inf, 0.0)
        return rows.matrix(self.columns).tocsc(), np.array(rows.low), np.array(rows.high)

    @cached_property
    def fixed_bytes(self) -> Vector:
        """Bytes at each op under every choice: its results, its workspace, and tangents."""
        fixed = np.array(self.graph.made_bytes, dtype=np.float64) + arrays_of(self.graph).workspace_bytes
        fixed[self.graph.num_forward :] += self.graph.tangent_bytes
        return fixed

    def schedule(self, chosen: Vector) -> Schedule:
        """Returns the schedule of a choice, without forward executions that nothing needs."""
        columns = ((index, *place) for index, sites in enumerate(self.again) for place in sites.items())
        return in_order(self.graph, [(index, site) for index, site, column in columns if chosen[column] > 0.5])


def in_order(graph: Graph, recomputed: Iterable[tuple[int, int]]) -> Schedule:
    """Returns the schedule of recomputed ops with their sites: each runs just before the op that is its site, or at the end.

    Forward executions that nothing needs are left out.
    """
    first = 0 if graph.single_phase else graph.num_forward
    again = [(site, index) for index, site in recomputed]
    backward = [index for _, index in sorted([*again, *((index, index) for index in range(first, len(graph.ops)))])]
    if graph.single_phase:
        return Schedule(tuple(backward), ())
    crossing = Schedule((), tuple(backward)).saved(graph)
    forward = graph.ancestors([*graph.required_forward, *graph.producers(crossing)])
    return Schedule(tuple(sorted(forward)), tuple(backward))


def sites_of(graph: Graph, schedule: Schedule) -> list[int]:
    """Returns the site of each execution.

    The site of a first execution is its own op; that of any other is the op of the next first execution. The number of ops
    stands for the end.
    """
    first_runs: dict[int, int] = {}
    for position, index in enumerate(schedule.sequence):
        if position < len(schedule.forward) or index >= graph.num_forward:
            first_runs.setdefault(index, position)
    sites, following = [], len(graph.ops)
    for position, index in reversed(list(enumerate(schedule.sequence))):
        following = index if first_runs.get(index) == position else following
        sites.append(following)
    return sites[::-1]


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
    penalty = PENALTY * max(graph.step_seconds, 1e-30) / max(found.baseline.peak_bytes, 1)
    models = list[IntervalModel]()  # the deepest one that is small, or that of depth 1, and deeper ones within ``columns``
    for doublings in itertools.count():
        model = IntervalModel(graph, 2**doublings)
        if not 0 < model.columns <= columns or (models and model.columns == models[-1].columns):
            break
        models = [model] if model.columns <= settings.columns else [*models, model]
    for model in models:
        allowance = np.zeros(len(graph.ops))
        while True:
            left = deadline - time.monotonic()
            program = _program(model, budget + allowance, penalty)
            solution = None if left <= 0.0 else solve(program, model.columns, left, settings.nodes, settings.good_gap)
            interrupted = interrupted or deadline <= time.monotonic()
            if solution is None:
                break
            chosen = np.round(solution[: model.columns])
            plan = Plan.of(graph, model.schedule(chosen), "integer program")
            if any(plan.schedule == other.schedule for other in plans):
                break
            plans.append(plan)
            simulated = np.zeros(len(graph.ops) + 1)
            np.maximum.at(simulated, np.array(sites_of(graph, plan.schedule), dtype=np.int64), plan.timeline.bytes_at)
            allowance = np.maximum(model.memory @ chosen + model.fixed_bytes - simulated[:-1], 0.0)
    return found.with_plans(plans, budget, interrupted)


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
