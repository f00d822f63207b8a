"""A step of training: its graphs, the moments at which their calls are open, and their plans within one budget.

    x[e, k] = 1: entry e gets plan k                 y[g, k] = 1: an entry of graph g gets plan k
    minimise   sum of calls[e] * seconds[e, k] * x[e, k]
    subject to base + sum of saved[e, k] * x[e, k] over the open calls + peak[r, k] * x[r, k] of the running one <= budget
               sum over k of x[e, k] = 1             x[e, k] <= y[g(e), k], sum over k of y[g, k] <= variants

An *entry* is a graph, or one block that calls it. Graph breaks, buckets, parts for early gradients, blocks, open calls: each
way to divide a step makes entries and moments, measured or derived, and all share a budget here. Each term of a moment depends
on a single entry, so the choice from the Pareto fronts is the small integer program above. CP-SAT solves it in whole bytes and
one thread, so equal steps have equal solutions. A further plan per graph must be worth its compilation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

from autoremat.basics.errors import BudgetInfeasible, Occupant
from autoremat.planner.multigraph.ledger import Moment, distinct
from autoremat.planner.plans.limits import PlanPoint, Share
from autoremat.planner.settings import settings

Plans = tuple[PlanPoint, ...]
"""A plan for each entry of a step."""

COST_UNITS = 2**40
"""Number of units in the largest possible cost of a step, because CP-SAT needs integers."""

HOST_UNITS = 2**8
"""Cost of the most bytes on the host in these units. It only decides between plans of equal seconds."""

ROUNDING = 1e-12
"""Seconds that two sums of equal seconds may differ by."""

CODE_HEADROOM = 0.05
"""Share of a step's budget that stays free, because the peak of generated code differs from the simulated one."""


@dataclass(frozen=True)
class StepGraph:
    """One compiled graph of a step with the plans of its Pareto front."""

    key: str
    """Hash of the graph's ops and inputs, by which the backend recognises it; in a split graph the number of the part."""
    source: str
    """Line of the user's code where the graph begins."""
    calls: int
    """Number of calls in one step."""
    front: Plans
    """Plans of the graph, fastest first."""
    baseline: PlanPoint
    """Plan of the graph without recomputation."""
    step_seconds: float = 0.0
    """Seconds of one call's forward and backward without recomputation, by the cost model."""
    block: int | None = None
    """Number of the block that makes these calls, if the step's calls can be told apart (``compile_blocks``)."""
    reference: PlanPoint | None = None
    """Plan that the graph has without this package; None if that is the baseline."""
    ended_by_clock: bool = False
    """True if the clock ended the search for these plans, so that another profile may have others."""

    @cached_property
    def fastest(self) -> PlanPoint:
        """The plan of the fewest seconds, which moves nothing in vain."""
        return min(self.front, key=lambda point: (point.seconds, point.host_bytes, point))


@dataclass(frozen=True)
class Step:
    """The graphs and moments of one step. The moments refer to graphs by their index in ``graphs``."""

    graphs: tuple[StepGraph, ...]
    """A graph that several blocks call has one entry for each of them, with the same key."""
    moments: tuple[Moment, ...]
    order: tuple[str, ...] = ()
    """Halves of the calls in the sequence in which they ran, such as ``"forward 0"``."""
    device: str = "cpu"
    headroom: float = 0.0
    """Share of the budget that the plans leave free as code headroom, if any choice fits that."""
    others: tuple[str, ...] = ()
    """Keys of graphs without a plan, because they save nothing for a backward."""
    variants: int = 1
    """Maximum number of different plans of one graph, for the blocks that call it."""
    host_bytes: int | None = None
    """The most bytes that saved tensors of the step may take on the host; None to keep none there."""
    communicates: bool = False
    """True if the graphs may have collectives, so that the ranks of a job share their plans."""

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def ended_by_clock(self) -> bool:
        """True if the clock ended the search for the plans of any graph."""
        return any(graph.ended_by_clock for graph in self.graphs)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """For each entry of ``graphs``, the number of its graph: the place of its key among all keys."""
        keys = list(dict.fromkeys(graph.key for graph in self.graphs))
        return tuple(keys.index(graph.key) for graph in self.graphs)

    def peak_bytes(self, plans: Sequence[PlanPoint]) -> int:
        """Returns the peak of the step under ``plans``."""
        return max((moment.live_bytes(plans) for moment in self.moments), default=0)

    def host_peak_bytes(self, plans: Sequence[PlanPoint]) -> int:
        """Returns the most bytes that the step holds on the host under ``plans``."""
        return max((moment.host_bytes(plans) for moment in self.moments), default=0)

    @property
    def minimum_peak_bytes(self) -> int:
        """Smallest peak of the step over all choices among the plans found."""
        return self.peak_bytes(self.smallest)

    @cached_property
    def baseline_peak_bytes(self) -> int:
        """Peak of the step without recomputation."""
        return self.peak_bytes([graph.baseline for graph in self.graphs])

    @cached_property
    def reference_peak_bytes(self) -> int:
        """Reference peak: what the step needs without this package. A budget as a float is a share of it.

        It is at least the smallest peak of the step, so a share of 1 is feasible.
        """
        peak = self.peak_bytes([graph.reference or graph.baseline for graph in self.graphs])
        return max(min(peak, self.baseline_peak_bytes), self.minimum_peak_bytes)

    def added_seconds(self, plans: Sequence[PlanPoint]) -> float:
        """Returns the seconds of all calls under ``plans`` above those of the fastest ones."""
        return sum(g.calls * (p.seconds - g.fastest.seconds) for g, p in zip(self.graphs, plans, strict=True))

    # -- the choice of plans -------------------------------------------------------------------------------------------

    @cached_property
    def smallest(self) -> Plans:
        """The plans of the smallest peak that was found."""
        found = [self._chosen(variants, None, None) for variants in self._numbers_of_plans]
        leanest = (min(g.front, key=lambda p: (p.host_bytes, p.saved_bytes, p.backward_peak_bytes)) for g in self.graphs)
        return min((plans for plans in found if plans is not None), key=self.peak_bytes, default=tuple(leanest))

    def cheapest(self, budget: int | None) -> Plans | None:
        """Returns the plans of least seconds that were found for a peak of at most ``budget`` bytes (None: no bound).

        They keep to the bound on the host. A further plan per graph must save a share of the added seconds and of the step.
        Returns None if no choice fits.
        """
        fastest = tuple(graph.fastest for graph in self.graphs)
        free = self.host_bytes is None or self.host_peak_bytes(fastest) <= self.host_bytes
        if free and (budget is None or self.peak_bytes(fastest) <= budget):
            return fastest
        if budget is not None and self.minimum_peak_bytes > budget:
            return None
        found = [self.smallest]
        for variants in self._numbers_of_plans:
            better = self._chosen(variants, budget, found[-1], least_peak=False)
            found += [] if better is None else [better]
        found = found[1:] or found
        least = min(map(self.added_seconds, found))
        seconds = sum(graph.calls * graph.step_seconds for graph in self.graphs)
        most = least + max(least * settings.rough_gap, seconds * settings.good_gap) + ROUNDING
        return next(plans for plans in found if self.added_seconds(plans) <= most)

    @property
    def _numbers_of_plans(self) -> range:
        """The numbers of plans per graph to try."""
        counts = Counter(self.numbers)
        mixes = any(counts[n] > 1 and len(graph.front) > 1 for n, graph in zip(self.numbers, self.graphs, strict=True))
        return range(1, self.variants + 1 if mixes else 2)

    def considered(self, graph: StepGraph, variants: int) -> Plans:
        """Returns the plans of ``graph`` to choose from: if calls may differ, and there are many, those that can be mixed well.

        They are the corners of the front's convex hull by saved bytes and seconds, and the plan of the least peak.
        """
        if variants == 1 or len(graph.front) <= settings.levels:
            return graph.front
        hull: list[PlanPoint] = []
        for p in sorted(graph.front, key=lambda p: (p.saved_bytes, p.seconds)):
            while len(hull) > 1 and (hull[-1].seconds - hull[-2].seconds) * (p.saved_bytes - hull[-1].saved_bytes) >= (
                p.seconds - hull[-1].seconds
            ) * (hull[-1].saved_bytes - hull[-2].saved_bytes):
                hull.pop()
            hull.append(p)
        return tuple(dict.fromkeys((*hull, min(graph.front, key=lambda p: p.backward_peak_bytes), graph.fastest)))

    def _chosen(self, variants: int, budget: int | None, hint: Plans | None, least_peak: bool = True) -> Plans | None:
        """Returns the best plans of at most ``variants`` per graph that CP-SAT finds; None if it finds none.

        They have the smallest peak, or the fewest seconds within ``budget`` and then little on the host. The work is limited.
        """
        program = _Program(self, variants)
        if least_peak:
            most = [PlanPoint(*map(max, zip(*map(astuple, graph.front), strict=True))) for graph in self.graphs]
            budget = program.model.new_int_var(0, max(0, self.peak_bytes(most)), "peak")
        program.keep_within(budget)
        program.model.minimize(budget if least_peak else program.costs())
        return program.solve(hint, 0.0 if least_peak or variants == 1 else settings.rough_gap)

    # -- shares --------------------------------------------------------------------------------------------------------

    def shares(self, plans: Plans, budget: int) -> tuple[Share, ...]:
        """Returns each entry's share of ``budget`` bytes while all others follow their ``plans``.

        Entries of a graph that follow the same plan are compiled once, so the least room of all counts.
        """
        room: dict[tuple[int, PlanPoint, bool], int] = {}
        for moment in self.moments:
            if moment.running is not None:
                left = budget - moment.base_bytes - sum(plans[entry].saved_bytes for entry in moment.open)
                half = self.numbers[moment.running], plans[moment.running], moment.backward
                room[half] = min(left, room.get(half, left))
        found = []
        for number, plan in zip(self.numbers, plans, strict=True):
            forward, backward = (room.get((number, plan, half), plan.peak_bytes(half)) for half in (False, True))
            found.append(Share(plan.saved_bytes, forward, backward, host_bytes=plan.host_bytes))
        return tuple(found)

    def with_higher_peaks(self, block: int, share: float) -> Step:
        """Returns the step with peaks higher by this share for the graphs that ``block`` calls, in all their plans."""
        keys = {graph.key for graph in self.graphs if graph.block == block}

        def higher(point: PlanPoint) -> PlanPoint:
            forward, backward = (int(point.peak_bytes(half) * (1 + share)) for half in (False, True))
            return replace(point, forward_peak_bytes=forward, backward_peak_bytes=backward)

        raised = (replace(g, front=tuple(map(higher, g.front))) if g.key in keys else g for g in self.graphs)
        return replace(self, graphs=tuple(raised))

    def infeasible(self, budget: int, remedies: Sequence[str]) -> BudgetInfeasible:
        """Returns the error that lists the memory at the step's peak, for the plans of the smallest peak."""
        plans, numbers = self.smallest, self.numbers
        moment = max(self.moments, key=lambda moment: moment.live_bytes(plans))
        occupants = [Occupant("what no plan decides", moment.base_bytes)]
        for number in sorted(set(numbers)):
            calls = [entry for entry in moment.open if numbers[entry] == number]
            name = f"saved by graph {number}" + (f" for {len(calls)} calls" if len(calls) > 1 else "")
            saved = sum(plans[entry].saved_bytes for entry in calls)
            occupants.append(Occupant(name, saved, "", self.graphs[numbers.index(number)].source))
        if moment.running is not None:
            name = f"{'backward' if moment.backward else 'forward'} of graph {numbers[moment.running]}"
            # A negative base consists of values that the plan counts but that were not live in the measurement.
            peak = plans[moment.running].peak_bytes(moment.backward) + min(0, moment.base_bytes)
            occupants.append(Occupant(name, peak, "", self.graphs[moment.running].source))
        return BudgetInfeasible(
            budget_bytes=budget,
            minimum_bytes=self.minimum_peak_bytes,
            lower_bound_bytes=max(0, *(m.base_bytes for m in self.moments)),
            occupants=[occupant for occupant in occupants if occupant.bytes > 0],
            device=self.device,
            remedies=remedies,
        )


class _Program:
    """The integer program of the module's docstring. With one plan per graph, its entries share their variables."""

    def __init__(self, step: Step, variants: int) -> None:
        from ortools.sat.python import cp_model

        self.cp_model: Any = cp_model
        self.model: Any = cp_model.CpModel()
        self.step, self.variants = step, variants
        owners = step.numbers if variants == 1 else range(len(step.graphs))
        fronts = {owner: step.considered(graph, variants) for owner, graph in zip(owners, step.graphs, strict=True)}
        variables = {o: [self.model.new_bool_var(f"x[{o},{k}]") for k in range(len(front))] for o, front in fronts.items()}
        for choices in variables.values():
            self.model.add_exactly_one(choices)
        self.chosen = [list(zip(fronts[owner], variables[owner], strict=True)) for owner in owners]
        """For each entry, its plans with their variables."""
        for number in set(step.numbers) if variants > 1 else ():
            entries = [variables[entry] for entry, n in enumerate(step.numbers) if n == number]
            used = [self.model.new_bool_var(f"y[{number},{k}]") for k in range(len(entries[0]))]
            self.model.add(sum(used) <= variants)
            for x, y in ((x, y) for choices in entries for x, y in zip(choices, used, strict=True)):
                self.model.add_implication(x, y)

    def keep_within(self, budget: int | Any | None) -> None:
        """Bounds the live bytes at all moments by ``budget``, a number or a variable, and those on the host."""
        for moment in distinct(self.step.moments):
            if budget is not None:
                saved = (count * p.saved_bytes * x for e, count in Counter(moment.open).items() for p, x in self.chosen[e])
                half = () if moment.running is None else self.chosen[moment.running]
                peak = (p.peak_bytes(moment.backward) * x for p, x in half)
                self.model.add(moment.base_bytes + sum(saved) + sum(peak) <= budget)
            if self.step.host_bytes is not None and moment.calls:
                held = (p.host_bytes * x for entry in moment.calls for p, x in self.chosen[entry])
                self.model.add(sum(held) <= self.step.host_bytes)

    def costs(self) -> Any:
        """Returns the seconds of all calls above those of the fastest plans, and then the bytes on the host, in units."""
        graphs = self.step.graphs
        worst = sum(graph.calls * max(p.seconds - graph.fastest.seconds for p in graph.front) for graph in graphs) or 1.0
        held = max(p.host_bytes for graph in graphs for p in graph.front) or 1
        units = (
            (
                round(graph.calls * (p.seconds - graph.fastest.seconds) / worst * COST_UNITS)
                + round(HOST_UNITS * p.host_bytes / held)
            )
            * x
            for graph, choices in zip(graphs, self.chosen, strict=True)
            for p, x in choices
        )
        return sum(units)

    def solve(self, hint: Plans | None, gap: float) -> Plans | None:
        """Returns the best plans found, within the share ``gap`` of the best objective; None if there are none."""
        hints = {x.index: (x, p == plan) for choices, plan in zip(self.chosen, hint or (), strict=False) for p, x in choices}
        for x, is_hint in hints.values():
            self.model.add_hint(x, is_hint)
        solver = self.cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = settings.effort
        solver.parameters.relative_gap_limit = gap
        if solver.solve(self.model) not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            return None
        return tuple(next(p for p, x in choices if solver.boolean_value(x)) for choices in self.chosen)
