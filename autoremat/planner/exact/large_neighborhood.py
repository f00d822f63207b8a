"""Large-neighbourhood search (LNS): improves a plan by exact solutions of small parts of the interval model.

A neighbourhood frees some columns of the model and fixes the others. The free columns belong to a stretch of ops, to ops that
are related by reads, or to random ops. Columns on which plan and relaxation disagree often join them (Danna, Rothberg and Le
Pape, "Exploring relaxation induced neighborhoods", Math. Programming 2005).

Bytes over the budget are not forbidden but cost a penalty. The search may therefore start from a plan that does not fit. At
some ops the simulator counts fewer bytes than the model. The model may be granted this difference as an *allowance*; the
simulator judges its solutions.

The search counts neighbourhoods and branch-and-bound nodes, so only the deadline can interrupt it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.sparse import bmat, csr_matrix, eye

from autoremat.planner.exact.interval_model import Columns, IntervalModel, Vector, sites_of
from autoremat.planner.mip import Program, Solution, solve
from autoremat.planner.plans.plan import Plan
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.neighborhood


@dataclass(frozen=True)
class Incumbent:
    """A choice of columns with its simulated plan."""

    chosen: Vector
    plan: Plan
    bytes_at: Vector
    """Simulated bytes at each op of the given sequence and at the end: the maximum over all executions at that site."""
    allowance: Vector
    """Bytes by which the model's count exceeds the simulated bytes, at each op."""

    @classmethod
    def of(cls, model: IntervalModel, chosen: Vector) -> Incumbent:
        """Returns the incumbent of a choice after simulating it."""
        plan = Plan.of(model.graph, model.schedule(chosen), "event gaps")
        bytes_at = np.zeros(len(model.graph.ops) + 1)
        sites = np.array(sites_of(model.graph, plan.schedule), dtype=np.int64)
        np.maximum.at(bytes_at, sites, plan.timeline.bytes_at)
        return cls(chosen, plan, bytes_at, np.maximum(model.bytes_at(chosen) - bytes_at[:-1], 0.0))

    def excess(self, budget: int) -> Vector:
        """Returns the bytes over the budget at each op."""
        return np.maximum(self.bytes_at - budget, 0.0)

    def score(self, budget: int, penalty: float) -> float:
        """Returns the seconds of the plan, plus ``penalty`` seconds per byte over the budget."""
        return self.plan.cost_seconds + penalty * float(self.excess(budget).sum())


def program_around(model: IntervalModel, chosen: Vector, free: Columns, budget: Vector, penalty: float) -> Program:
    """Returns the program of the ``free`` columns, with all others as in ``chosen`` and ``budget`` bytes at each op.

    The first variables are the free columns. Further variables are the bytes over the budget at each op that can exceed it.
    Their unit is the largest budget, or a byte if that is 0.
    """
    fixed = chosen.copy()
    fixed[free] = 0.0
    logic, low, high = model.logic
    parts, memory = logic[:, free].tocsr(), model.memory[:, free].tocsr()
    rows = np.flatnonzero(np.diff(parts.indptr))
    room = budget - model.fixed_bytes - model.memory @ fixed
    tight = np.flatnonzero((np.diff(memory.indptr) > 0) & (np.asarray(memory.sum(axis=1)).ravel() > room))
    unit, slacks = max(float(budget.max()), 1.0), len(tight)
    offset = (logic @ fixed)[rows]
    matrix = bmat([[parts[rows], None], [memory[tight] / unit, -eye(slacks)]], format="csr") if slacks else parts[rows]
    return Program(
        csr_matrix(matrix),
        cost=np.concatenate([model.cost[free], np.full(slacks, penalty * unit)]),
        low=np.concatenate([low[rows] - offset, np.full(slacks, -np.inf)]),
        high=np.concatenate([high[rows] - offset, room[tight] / unit]),
        lower=np.concatenate([model.lower[free], np.zeros(slacks)]),
        upper=np.concatenate([model.upper[free], np.full(slacks, np.inf)]),
    )


class Improvement:
    """LNS on one model for one budget in bytes. ``deadline`` is a time of the monotonic clock in seconds."""

    def __init__(self, model: IntervalModel, budget: int, peak: int, seed: int, deadline: float) -> None:
        self.model, self.budget, self.deadline = model, budget, deadline
        self.random = np.random.default_rng(seed)
        self.unit = max(model.graph.step_seconds, 1e-30) / max(peak, 1)
        self.penalty = settings.penalty * self.unit
        self.relaxed: Vector | None = None
        self.exhausted = self.solved_strictly = False
        self.interrupted = False
        self.op_of_column = np.zeros(model.columns, dtype=np.int64)
        for value, events in enumerate(model.hold):
            self.op_of_column[list(events.values())] = model.graph.values[value].producer or 0
        for index, sites in enumerate(model.again):
            self.op_of_column[list(sites.values())] = index
        self.columns_of_op = np.bincount(self.op_of_column, minlength=len(model.graph.ops))
        self.kinds = (self._window, self._related, self._anywhere)
        self.size = [settings.initial_columns] * len(self.kinds)

    def left(self) -> float:
        """Returns the seconds to the deadline."""
        return self.deadline - time.monotonic()

    def relax(self, chosen: Vector) -> None:
        """Solves the linear relaxation of the whole model and stores it."""
        free = np.arange(self.model.columns)
        program = program_around(self.model, chosen, free, self._budgets(None), settings.maximum_penalty * self.unit)
        solution = solve(program, integers=0, seconds=self.left())
        self.relaxed = None if solution is None else solution.values[: len(free)]

    def among(self, columns: Columns, penalty: float, seconds: float) -> Vector | None:
        """Returns the best choice found that uses only ``columns``; None if none is found."""
        nothing, first = np.zeros(self.model.columns), SETTINGS.interval_model
        program = program_around(self.model, nothing, columns, self._budgets(None), penalty * self.unit)
        solution = solve(program, len(columns), min(seconds, self.left()), first.first_plan_nodes, gap=first.first_plan_gap)
        if solution is None:
            return None
        nothing[columns] = np.round(solution.values[: len(columns)])
        return nothing

    def _budgets(self, incumbent: Incumbent | None) -> Vector:
        """Returns the budget at each op, with the allowance of ``incumbent`` if it is given."""
        budgets = np.full(len(self.model.graph.ops), float(self.budget))
        return budgets if incumbent is None else budgets + incumbent.allowance

    # -- neighbourhoods ------------------------------------------------------------------------------------------------

    def _window(self, incumbent: Incumbent, wanted: int) -> Columns:
        """Returns the retention intervals over a stretch of ops, with their replacements. Stretches over the budget are
        preferred."""
        excess, ops = incumbent.excess(self.budget)[:-1], len(self.model.graph.ops)
        total = excess.sum()
        weights = excess / total if total > 0.0 and self.random.random() < settings.over_budget_probability else None
        middle = int(self.random.choice(ops, p=weights))
        width, free = 1, np.zeros(0, dtype=np.int64)
        while width <= ops:
            wider = self.model.around(max(0, middle - width), min(ops, middle + width))
            if len(wider) > wanted and len(free):
                break
            free, width = wider, width * 2
        return free

    def _related(self, incumbent: Incumbent, wanted: int) -> Columns:
        """Returns all columns of a set of ops that are connected by reads."""
        graph = self.model.graph
        start = int(self.random.integers(len(graph.ops)))
        seen, frontier, columns = {start}, [start], int(self.columns_of_op[start])
        while frontier and columns < wanted:
            index = frontier.pop(int(self.random.integers(len(frontier))))
            op = graph.ops[index]
            for near in (*graph.producers(op.inputs), *(r for v in op.outputs for r in graph.readers[v])):
                if near not in seen:
                    seen.add(near)
                    frontier.append(near)
                    columns += int(self.columns_of_op[near])
        return np.flatnonzero(np.isin(self.op_of_column, list(seen)))

    def _anywhere(self, incumbent: Incumbent, wanted: int) -> Columns:
        """Returns all columns of ops drawn from the whole graph."""
        order = self.random.permutation(len(self.model.graph.ops))
        count = int(np.searchsorted(np.cumsum(self.columns_of_op[order]), wanted)) + 1
        return np.flatnonzero(np.isin(self.op_of_column, order[:count]))

    def _disagreement(self, incumbent: Incumbent) -> Columns:
        """Returns columns on which the incumbent and the relaxation differ."""
        if self.relaxed is None:
            return np.zeros(0, dtype=np.int64)
        apart = np.flatnonzero(np.abs(incumbent.chosen - self.relaxed) > settings.disagreement)
        most = settings.maximum_columns // 2
        return np.sort(self.random.choice(apart, most, replace=False)) if len(apart) > most else apart

    # -- the search ----------------------------------------------------------------------------------------------------

    def run(self, start: Vector, neighbourhoods: int, within_gap: Callable[[Plan], bool]) -> list[Plan]:
        """Improves ``start`` and returns the plans found on the way. Each is at least as good as the previous one at the
        penalty of its time."""
        incumbent = Incumbent.of(self.model, start)
        if self.model.columns <= settings.whole_model_columns:
            self.penalty = settings.maximum_penalty * self.unit
        elif incumbent.plan.peak_bytes <= self.budget:
            self.penalty = settings.penalty_when_fitting * self.unit
        found, idle = [incumbent.plan], 0
        for _ in range(neighbourhoods):
            if self.left() <= 0.0:
                self.interrupted = True
                break
            better = self.step(incumbent)
            gain = incumbent.score(self.budget, self.penalty) - better.score(self.budget, self.penalty)
            idle = 0 if gain > settings.minimum_gain * self.model.graph.step_seconds else idle + 1
            if better is not incumbent:
                incumbent = better
                found.append(incumbent.plan)
            fits = incumbent.plan.peak_bytes <= self.budget
            if fits and within_gap(incumbent.plan):
                break
            if self.exhausted or idle >= (settings.patience if fits else settings.patience_when_over_budget):
                if fits or self.penalty >= settings.maximum_penalty * self.unit:
                    break
                self.penalty, idle = self.penalty * 2.0, 0
                self.exhausted = self.solved_strictly = False
        return found

    def step(self, incumbent: Incumbent) -> Incumbent:
        """Returns a better incumbent after one neighbourhood, or the same."""
        whole = self.model.columns <= settings.whole_model_columns
        kind = int(self.random.integers(len(self.kinds)))
        free = np.arange(self.model.columns) if whole else self.kinds[kind](incumbent, self.size[kind])
        if not whole and self.random.random() < settings.disagreement_probability:
            free = np.union1d(free, self._disagreement(incumbent))
        generous = self.solved_strictly if whole else bool(self.random.random() < settings.allowance_probability)
        budgets = self._budgets(incumbent if generous else None)
        program = program_around(self.model, incumbent.chosen, free, budgets, self.penalty)
        solution = self._solve(program, len(free), settings.whole_model_nodes if whole else settings.nodes)
        self.size[kind] = self._next_size(self.size[kind], solution)
        better = incumbent
        if solution is not None:
            chosen = incumbent.chosen.copy()
            chosen[free] = np.round(solution.values[: len(free)])
            found = Incumbent.of(self.model, chosen)
            if found.score(self.budget, self.penalty) <= incumbent.score(self.budget, self.penalty):
                better = found
        if whole:
            # The whole model is solved with the plain budget first, then with the allowance until the plan no longer changes.
            self.exhausted = generous and better.plan.schedule == incumbent.plan.schedule
            self.solved_strictly = True
        return better

    def _solve(self, program: Program, integers: int, nodes: int) -> Solution | None:
        """Returns the solution of one neighbourhood within its limits on time and nodes."""
        begun = time.monotonic()
        solution = solve(program, integers, min(self.left(), settings.neighborhood_seconds), nodes, gap=settings.program_gap)
        self.interrupted = self.interrupted or time.monotonic() - begun >= settings.neighborhood_seconds
        return solution

    @staticmethod
    def _next_size(size: int, solution: Solution | None) -> int:
        """Returns the number of columns for the next neighbourhood of the same kind."""
        if solution is not None and solution.optimal:
            return min(int(size * settings.growth), settings.maximum_columns)
        return max(int(size * settings.shrinkage), settings.minimum_columns)
