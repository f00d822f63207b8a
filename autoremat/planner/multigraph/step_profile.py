"""A profiled step, its budget shared out among its graphs, and what the backend and people are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoremat.basics.budget import budget_bytes, parse_budget
from autoremat.basics.display import PlainTable, Shown, named_figures, plain_table
from autoremat.basics.errors import BudgetInfeasible, Occupant
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.multigraph import ledger
from autoremat.planner.multigraph.ledger import Moment, PlanPoint, Share


@dataclass(frozen=True)
class StepGraph:
    """One compiled graph of a step, with all its plans."""

    key: str
    """What it computes, on what: the backend knows it again by this, whatever function it was compiled from."""
    source: str
    """Where it begins in the user's code."""
    calls: int
    """In one step."""
    front: tuple[PlanPoint, ...]
    """Its plans, fastest first."""
    baseline: PlanPoint
    """Its plan without recomputation."""


@dataclass(frozen=True)
class Step:
    """The graphs of one step and its moments, whose graph numbers are positions in ``graphs``."""

    graphs: tuple[StepGraph, ...]
    moments: tuple[Moment, ...]
    order: tuple[str, ...]
    """The halves of the calls as they ran, such as ``"forward 0"``."""
    device: str
    headroom: float = 0.0
    """Of the budget, what the plans leave to the code generator, if they can."""
    others: tuple[str, ...] = ()
    """The keys of graphs that no plan changes: they save nothing for a backward."""

    @cached_property
    def baseline_peak_bytes(self) -> int:
        """The peak without any recomputation."""
        return ledger.step_peak(self.moments, [graph.baseline for graph in self.graphs])

    def points(self, choice: Sequence[int]) -> list[PlanPoint]:
        """The plans of those numbers."""
        return [graph.front[number] for graph, number in zip(self.graphs, choice, strict=True)]

    def shared_out(self, budget: int | None) -> StepProfile:
        """The plans of least time with which the step's peak is at most ``budget`` bytes (None: no bound).

        Raises ``BudgetInfeasible`` if there are none.
        """
        fronts, calls = [graph.front for graph in self.graphs], [graph.calls for graph in self.graphs]
        smallest = ledger.least_memory(fronts, calls, self.moments)
        chosen = None
        if budget is not None:
            chosen = ledger.allocate(fronts, calls, self.moments, int(budget * (1 - self.headroom)))
        chosen = chosen or ledger.allocate(fronts, calls, self.moments, budget)
        if chosen is None:
            assert budget is not None
            raise self._infeasible(self.points(smallest.choice), budget)
        points = self.points(chosen.choice)
        limits: Sequence[Share | None] = [None] * len(points)
        if budget is not None:
            limits = ledger.shares(self.moments, points, budget, borders=True)
        return StepProfile(
            step=self,
            budget_bytes=budget,
            peak_bytes=chosen.peak_bytes,
            minimum_peak_bytes=smallest.peak_bytes,
            added_seconds=chosen.seconds - sum(graph.calls * graph.front[0].seconds for graph in self.graphs),
            plans=tuple(points),
            shares=tuple(limits),
        )

    def _infeasible(self, points: Sequence[PlanPoint], budget: int) -> BudgetInfeasible:
        """The error that says what fills the step at its least peak."""
        moment = ledger.fullest(self.moments, points)
        occupants = [Occupant("what no plan decides", moment.base_bytes)]
        for number in sorted(set(moment.open)):
            count = moment.open.count(number)
            name = f"saved by graph {number}" + (f" for {count} calls" if count > 1 else "")
            occupants.append(Occupant(name, count * points[number].saved_bytes, "", self.graphs[number].source))
        if moment.running is not None:
            name = f"{'backward' if moment.backward else 'forward'} of graph {moment.running}"
            # What a plan counts and was not alive when the step was measured is a base below zero.
            peak = points[moment.running].peak_bytes(moment.backward) + min(0, moment.base_bytes)
            occupants.append(Occupant(name, peak, "", self.graphs[moment.running].source))
        return BudgetInfeasible(
            budget_bytes=budget,
            minimum_bytes=ledger.step_peak(self.moments, points),
            lower_bound_bytes=max(0, *(m.base_bytes for m in self.moments)),
            occupants=[occupant for occupant in occupants if occupant.bytes > 0],
            device=self.device,
        )


@dataclass(frozen=True, repr=False)
class StepProfile(Shown):
    """The graphs of one step and the shares of its budget. Accepted as a ``memory_budget``: the backend then compiles each
    graph under its share. Bytes count above what was live when the step began; seconds are estimates of the cost model."""

    step: Step
    budget_bytes: int | None
    peak_bytes: int
    """Of the whole step, with the plans allotted."""
    minimum_peak_bytes: int
    """The smallest that any choice among the plans found reaches."""
    added_seconds: float
    """Of the whole step, over each graph's fastest plan."""
    plans: tuple[PlanPoint, ...]
    """For each graph of the step, the plan that the budget allots to it."""
    shares: tuple[Share | None, ...]
    """The limits that these plans are found again by; None without a budget."""

    @property
    def baseline_peak_bytes(self) -> int:
        """The step's peak without any recomputation."""
        return self.step.baseline_peak_bytes

    def within(self, memory_budget: int | float | str | None) -> StepProfile:
        """The same step under another budget, without running anything. Raises ``BudgetInfeasible`` if that is too small."""
        return self.step.shared_out(budget_bytes(parse_budget(memory_budget, "memory_budget"), self.baseline_peak_bytes))

    def number_of(self, key: str) -> int | None:
        """The number of the graph with that key; None if the step that was profiled has none."""
        return next((number for number, graph in enumerate(self.step.graphs) if graph.key == key), None)

    def line(self) -> str:
        """All that a prompt shows."""
        budget = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        return (
            f"{budget}, peak {format_bytes(self.baseline_peak_bytes)} -> {format_bytes(self.peak_bytes)}, smallest "
            f"{format_bytes(self.minimum_peak_bytes)}, {len(self.plans)} graphs"
        )

    def tables(self) -> Sequence[PlainTable]:
        """All that ``print`` shows."""
        columns = ("graph", "calls", "saves per call", "of", "peak of a call", "added per call", "begins at")
        table = plain_table("", columns, numbers=6)
        for number, (graph, plan) in enumerate(zip(self.step.graphs, self.plans, strict=True)):
            fastest = graph.front[0]
            table.add_row(
                str(number), str(graph.calls), format_bytes(plan.saved_bytes), format_bytes(fastest.saved_bytes),
                format_bytes(max(plan.forward_peak_bytes, plan.backward_peak_bytes)),
                format_seconds(plan.seconds - fastest.seconds), graph.source or "-",
            )  # fmt: skip
        return [named_figures(self._figures()), table]

    def _figures(self) -> list[tuple[str, str]]:
        order = ", ".join(self.step.order[:ORDER_SHOWN]) + (", ..." if len(self.step.order) > ORDER_SHOWN else "")
        return [
            ("budget of the step", "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)),
            ("predicted peak", format_bytes(self.peak_bytes)),
            ("baseline", format_bytes(self.baseline_peak_bytes)),
            ("minimum peak found", format_bytes(self.minimum_peak_bytes)),
            ("added", f"{format_seconds(self.added_seconds)} estimated"),
            ("order", order),
        ]


ORDER_SHOWN = 12

Budget = int | float | str | Share | StepProfile | None
"""What is accepted as a ``memory_budget``."""
