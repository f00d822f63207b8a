"""The step profile: a profiled step, its budget divided among its graphs, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoremat.basics.budget import budget_bytes, parse_budget
from autoremat.basics.display import PlainTable, Shown, named_figures, plain_table
from autoremat.basics.errors import BudgetInfeasible, Occupant
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.multigraph import ledger
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.ledger import Moment, PlanPoint, Share


@dataclass(frozen=True)
class StepGraph:
    """One compiled graph of a step with the plans of its Pareto front."""

    key: str
    """Hash of the graph's ops and inputs. The backend recognises the graph by it, whichever function it was compiled from."""
    source: str
    """Line of the user's code where the graph begins."""
    calls: int
    """Number of calls in one step."""
    front: tuple[PlanPoint, ...]
    """Plans of the graph, fastest first."""
    baseline: PlanPoint
    """Plan of the graph without recomputation."""


@dataclass(frozen=True)
class Step:
    """The graphs and moments of one step. The moments refer to graphs by their index in ``graphs``."""

    graphs: tuple[StepGraph, ...]
    moments: tuple[Moment, ...]
    order: tuple[str, ...]
    """Halves of the calls in the sequence in which they ran, such as ``"forward 0"``."""
    device: str
    headroom: float = 0.0
    """Share of the budget that the plans leave free as code headroom, if any choice fits that."""
    others: tuple[str, ...] = ()
    """Keys of graphs without a plan, because they save nothing for a backward."""

    @cached_property
    def baseline_peak_bytes(self) -> int:
        """Peak of the step without recomputation."""
        return ledger.step_peak(self.moments, [graph.baseline for graph in self.graphs])

    def points(self, choice: Sequence[int]) -> list[PlanPoint]:
        """Returns the plans with these indices."""
        return [graph.front[number] for graph, number in zip(self.graphs, choice, strict=True)]

    def shared_out(self, budget: int | None) -> StepProfile:
        """Returns the step profile whose plans take the least time with a peak of at most ``budget`` bytes (None: no bound).

        Raises ``BudgetInfeasible`` if no choice of plans fits.
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
        """Returns the error that lists the memory at the step's peak, for the plans of the smallest peak."""
        moment = ledger.fullest(self.moments, points)
        occupants = [Occupant("what no plan decides", moment.base_bytes)]
        for number in sorted(set(moment.open)):
            count = moment.open.count(number)
            name = f"saved by graph {number}" + (f" for {count} calls" if count > 1 else "")
            occupants.append(Occupant(name, count * points[number].saved_bytes, "", self.graphs[number].source))
        if moment.running is not None:
            name = f"{'backward' if moment.backward else 'forward'} of graph {moment.running}"
            # A negative base consists of values that the plan counts but that were not live in the measurement.
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
    """Profile of a step of one or more graphs, with their shares of the budget. Accepted as a ``memory_budget``.

    The backend compiles each graph under its share. Bytes count above those live at the start of the step. Seconds are
    estimates of the cost model.
    """

    step: Step
    budget_bytes: int | None
    peak_bytes: int
    """Peak of the whole step under the assigned plans."""
    minimum_peak_bytes: int
    """Smallest peak of the step over all choices among the plans found."""
    added_seconds: float
    """Seconds of the whole step above those of each graph's fastest plan."""
    plans: tuple[PlanPoint, ...]
    """For each graph of the step, the plan that is assigned to it."""
    shares: tuple[Share | None, ...]
    """For each graph, the limits within which the backend finds its plan again. None without a budget."""
    device_ledger: DeviceBudget | None = None
    """The ledger of the whole device, if the budget is a device budget."""

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of the step without recomputation."""
        return self.step.baseline_peak_bytes

    def within(self, memory_budget: int | float | str | DeviceBudget | None) -> StepProfile:
        """Returns the profile of the same step under another budget, without running the step.

        Raises ``BudgetInfeasible`` if no choice of plans fits.
        """
        if isinstance(memory_budget, DeviceBudget):
            memory_budget.check()
            found = self.step.shared_out(memory_budget.budget_bytes)
            return replace(found, device_ledger=memory_budget.of_step(found.peak_bytes))
        return self.step.shared_out(budget_bytes(parse_budget(memory_budget, "memory_budget"), self.baseline_peak_bytes))

    def number_of(self, key: str) -> int | None:
        """Returns the index of the graph with this key; None if the profiled step has no such graph."""
        return next((number for number, graph in enumerate(self.step.graphs) if graph.key == key), None)

    def line(self) -> str:
        """Returns the one-line representation."""
        budget = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        return (
            f"{budget}, peak {format_bytes(self.baseline_peak_bytes)} -> {format_bytes(self.peak_bytes)}, smallest "
            f"{format_bytes(self.minimum_peak_bytes)}, {len(self.plans)} graphs"
        )

    def tables(self) -> Sequence[PlainTable]:
        """Returns the printed tables."""
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

CODE_HEADROOM = 0.05
"""Share of a step's budget that stays free, because the peak of generated code differs from the simulated one."""

Budget = int | float | str | Share | StepProfile | DeviceBudget | None
"""Types that are accepted as a ``memory_budget``."""
