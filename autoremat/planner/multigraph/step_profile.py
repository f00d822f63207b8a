"""The step profile: a profiled step, its budget divided among its graphs, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoremat.basics.budget import budget_bytes, parse_budget
from autoremat.basics.display import PlainTable, Shown, named_figures
from autoremat.basics.errors import BudgetInfeasible, Occupant
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.multigraph import ledger
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.ledger import Allocation, Moment, PlanPoint, Share
from autoremat.planner.multigraph.variants import Entries

ENDED_BY_CLOCK = (
    "ENDED BY THE CLOCK at time_limit, before the work was done: another run may share out the budget otherwise, so raise "
    "time_limit or plan on a faster processor"
)
"""What a step's profile and its graphs' reports say of searches that the clock ended."""


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
    step_seconds: float = 0.0
    """Seconds of one call's forward and backward without recomputation, by the cost model."""
    block: int | None = None
    """Number of the block that makes these calls, if the step's calls can be told apart (``compile_blocks``)."""
    reference: PlanPoint | None = None
    """Plan that the graph has without this package; None if that is the baseline."""
    ended_by_clock: bool = False
    """True if the clock ended the search for these plans, so that another profile may have others."""


@dataclass(frozen=True)
class Step:
    """The graphs and moments of one step. The moments refer to graphs by their index in ``graphs``."""

    graphs: tuple[StepGraph, ...]
    """A graph that several blocks call has one entry for each of them, with the same key."""
    moments: tuple[Moment, ...]
    order: tuple[str, ...]
    """Halves of the calls in the sequence in which they ran, such as ``"forward 0"``."""
    device: str
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

    @property
    def minimum_peak_bytes(self) -> int:
        """Smallest peak of the step over all choices among the plans found."""
        return self._smallest.peak_bytes

    @property
    def ended_by_clock(self) -> bool:
        """True if the clock ended the search for the plans of any graph."""
        return any(graph.ended_by_clock for graph in self.graphs)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """For each entry of ``graphs``, the number of its graph: the place of its key among all keys."""
        keys = list(dict.fromkeys(graph.key for graph in self.graphs))
        return tuple(keys.index(graph.key) for graph in self.graphs)

    @cached_property
    def baseline_peak_bytes(self) -> int:
        """Peak of the step without recomputation."""
        return ledger.step_peak(self.moments, [graph.baseline for graph in self.graphs])

    @cached_property
    def reference_peak_bytes(self) -> int:
        """Reference peak: what the step needs without this package. A budget as a float is a share of it.

        It is at least the smallest peak of the step, so a share of 1 is feasible.
        """
        peak = ledger.step_peak(self.moments, [graph.reference or graph.baseline for graph in self.graphs])
        return max(min(peak, self.baseline_peak_bytes), self._smallest.peak_bytes)

    @cached_property
    def graph_seconds(self) -> float:
        """Seconds of the graphs in one step without recomputation, by the cost model."""
        return sum(graph.calls * graph.step_seconds for graph in self.graphs)

    @cached_property
    def _entries(self) -> Entries:
        fronts, calls = [graph.front for graph in self.graphs], [graph.calls for graph in self.graphs]
        return Entries(fronts, calls, self.moments, self.numbers, self.variants, self.graph_seconds, self.host_bytes)

    @cached_property
    def _smallest(self) -> Allocation:
        return self._entries.least_memory()

    def points(self, choice: Sequence[int]) -> list[PlanPoint]:
        """Returns the plans with these indices."""
        return [graph.front[number] for graph, number in zip(self.graphs, choice, strict=True)]

    def shared_out(self, budget: int | None, remedies: Sequence[str] = ()) -> StepProfile:
        """Returns the step profile whose plans take the least time with a peak of at most ``budget`` bytes (None: no bound).

        Raises ``BudgetInfeasible`` with the advice ``remedies`` if no choice of plans fits.
        """
        smallest, chosen = self._smallest, None
        if budget is not None:
            chosen = self._entries.allocate(int(budget * (1 - self.headroom)))
        chosen = chosen or self._entries.allocate(budget)
        if chosen is None:
            assert budget is not None
            raise self._infeasible(self.points(smallest.choice), budget, remedies)
        points = self.points(chosen.choice)
        limits: Sequence[Share | None] = [None] * len(points)
        if budget is not None:
            limits = self._of_variants(points, ledger.shares(self.moments, points, budget, borders=True))
        return StepProfile(
            step=self,
            budget_bytes=budget,
            peak_bytes=chosen.peak_bytes,
            minimum_peak_bytes=smallest.peak_bytes,
            added_seconds=chosen.seconds - sum(graph.calls * graph.front[0].seconds for graph in self.graphs),
            plans=tuple(points),
            shares=tuple(limits),
        )

    def with_higher_peaks(self, block: int, share: float) -> Step:
        """Returns the step with peaks higher by this share for the graphs that ``block`` calls, in all their plans."""
        keys = {graph.key for graph in self.graphs if graph.block == block}

        def higher(point: PlanPoint) -> PlanPoint:
            forward, backward = (int(point.peak_bytes(half) * (1 + share)) for half in (False, True))
            return replace(point, forward_peak_bytes=forward, backward_peak_bytes=backward)

        fronts = {graph.key: tuple(map(higher, graph.front)) for graph in self.graphs if graph.key in keys}
        return replace(self, graphs=tuple(replace(graph, front=fronts.get(graph.key, graph.front)) for graph in self.graphs))

    def _of_variants(self, points: Sequence[PlanPoint], shares: Sequence[Share]) -> list[Share]:
        """Returns the shares with the same limits for all entries of a graph that follow the same plan.

        Such entries are compiled once, so the least room of all counts.
        """
        variants = list(zip(self.numbers, points, strict=True))
        return [
            replace(
                share,
                forward_peak_bytes=min(s.forward_peak_bytes for s, v in zip(shares, variants, strict=True) if v == variant),
                backward_peak_bytes=min(s.backward_peak_bytes for s, v in zip(shares, variants, strict=True) if v == variant),
            )
            for share, variant in zip(shares, variants, strict=True)
        ]

    def _infeasible(self, points: Sequence[PlanPoint], budget: int, remedies: Sequence[str]) -> BudgetInfeasible:
        """Returns the error that lists the memory at the step's peak, for the plans of the smallest peak."""
        moment = ledger.fullest(self.moments, points)
        occupants = [Occupant("what no plan decides", moment.base_bytes)]
        for number in sorted(set(self.numbers)):
            calls = [entry for entry in moment.open if self.numbers[entry] == number]
            name = f"saved by graph {number}" + (f" for {len(calls)} calls" if len(calls) > 1 else "")
            saved = sum(points[entry].saved_bytes for entry in calls)
            occupants.append(Occupant(name, saved, "", self.graphs[self.numbers.index(number)].source))
        if moment.running is not None:
            name = f"{'backward' if moment.backward else 'forward'} of graph {self.numbers[moment.running]}"
            # A negative base consists of values that the plan counts but that were not live in the measurement.
            peak = points[moment.running].peak_bytes(moment.backward) + min(0, moment.base_bytes)
            occupants.append(Occupant(name, peak, "", self.graphs[moment.running].source))
        return BudgetInfeasible(
            budget_bytes=budget,
            minimum_bytes=ledger.step_peak(self.moments, points),
            lower_bound_bytes=max(0, *(m.base_bytes for m in self.moments)),
            occupants=[occupant for occupant in occupants if occupant.bytes > 0],
            device=self.device,
            remedies=remedies,
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
    """For each entry of ``step.graphs``, the plan that is assigned to it."""
    shares: tuple[Share | None, ...]
    """For each entry of ``step.graphs``, the limits within which the backend finds its plan again. None without a budget."""
    device_ledger: DeviceBudget | None = None
    """The ledger of the whole device, if the budget is a device budget."""
    must_fit: bool = True
    """False if a graph whose code exceeds its share runs all the same, as under a budget that is a share of the reference
    peak."""

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of the step without recomputation."""
        return self.step.baseline_peak_bytes

    @property
    def reference_peak_bytes(self) -> int:
        """Reference peak: what the step needs without this package. A budget as a float is a share of it."""
        return self.step.reference_peak_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes that saved tensors of the step take on the host under the assigned plans."""
        return ledger.host_peak(self.step.moments, self.plans)

    def within(self, memory_budget: int | float | str | DeviceBudget | None) -> StepProfile:
        """Returns the profile of the same step under another budget, without running the step.

        Raises ``BudgetInfeasible`` if no choice of plans fits.
        """
        if isinstance(memory_budget, DeviceBudget):
            memory_budget.check()
            found = self.step.shared_out(memory_budget.budget_bytes)
            return replace(found, device_ledger=memory_budget.of_step(found.peak_bytes))
        budget = parse_budget(memory_budget, "memory_budget")
        share = budget if isinstance(budget, float) else None
        try:
            found = self.step.shared_out(budget_bytes(budget, self.reference_peak_bytes))
        except BudgetInfeasible as error:
            raise error.asked_as(share, self.reference_peak_bytes) from None
        return replace(found, must_fit=share is None)

    def shares_of(self, key: str) -> dict[int | None, Share | None]:
        """Returns the share of each block that calls the graph with this key; the block is None for all other calls.

        The result is empty for a graph that the profiled step does not have.
        """
        entries = zip(self.step.graphs, self.shares, strict=True)
        return {graph.block: share for graph, share in entries if graph.key == key}

    def shares_of_block(self, block: int | None) -> dict[int | None, Share | None]:
        """Returns the shares of the graph that ``block`` calls in the profiled step; empty unless there is exactly one.

        They bound the same graph for other inputs too.
        """
        keys = {graph.key for graph in self.step.graphs if graph.block == block is not None}
        return self.shares_of(keys.pop()) if len(keys) == 1 else {}

    @property
    def variants(self) -> list[tuple[int, PlanPoint, list[StepGraph]]]:
        """The plans of all graphs: the number of the graph, its plan, and the entries of ``step.graphs`` that follow it."""
        found: dict[tuple[int, PlanPoint], list[StepGraph]] = {}
        for number, plan, graph in zip(self.step.numbers, self.plans, self.step.graphs, strict=True):
            found.setdefault((number, plan), []).append(graph)
        return [(number, plan, graphs) for (number, plan), graphs in sorted(found.items(), key=lambda one: one[0][0])]

    def line(self) -> str:
        """Returns the one-line representation."""
        budget = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        return (
            f"{budget}, peak {format_bytes(self.baseline_peak_bytes)} -> {format_bytes(self.peak_bytes)}, smallest "
            f"{format_bytes(self.minimum_peak_bytes)}, {len(set(self.step.numbers))} graphs"
        )

    def tables(self) -> Sequence[PlainTable]:
        """Returns the printed tables."""
        has_blocks = any(graph.block is not None for graph in self.step.graphs)
        columns = ["graph", "calls", "saves per call", "of", "peak of a call", "added per call", "begins at"]
        table = PlainTable("", [*columns[:1], "blocks", *columns[1:]] if has_blocks else columns, numbers=6 + has_blocks)
        for number, plan, graphs in self.variants:
            fastest = graphs[0].front[0]
            blocks = [in_ranges([graph.block for graph in graphs if graph.block is not None])] if has_blocks else []
            table.add_row(
                str(number), *blocks, str(sum(graph.calls for graph in graphs)), format_bytes(plan.saved_bytes),
                format_bytes(fastest.saved_bytes), format_bytes(max(plan.forward_peak_bytes, plan.backward_peak_bytes)),
                format_seconds(plan.seconds - fastest.seconds), graphs[0].source or "-",
            )  # fmt: skip
        return [named_figures(self._figures()), table]

    def _figures(self) -> list[tuple[str, str]]:
        order = ", ".join(self.step.order[:ORDER_SHOWN]) + (", ..." if len(self.step.order) > ORDER_SHOWN else "")
        host_budget = self.step.host_bytes
        host = (
            "" if host_budget is None else f"{format_bytes(self.host_peak_bytes)} of {format_bytes(host_budget)} (host_memory)"
        )
        return [
            ("budget of the step", "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)),
            ("predicted peak", format_bytes(self.peak_bytes)),
            ("reference peak", f"{format_bytes(self.reference_peak_bytes)}, without autoremat"),
            ("baseline", f"{format_bytes(self.baseline_peak_bytes)}, without recomputation"),
            ("minimum peak found", format_bytes(self.minimum_peak_bytes)),
            ("added", f"{format_seconds(self.added_seconds)} estimated"),
            *([("host peak", host)] if host else ()),
            ("order", order),
            *([("plans", ENDED_BY_CLOCK)] if self.step.ended_by_clock else ()),
        ]


def in_ranges(numbers: Iterable[int]) -> str:
    """Returns ascending numbers as text such as "0-20, 24"; "-" without numbers."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"


ORDER_SHOWN = 12
"""Number of halves that the printed order lists."""

CODE_HEADROOM = 0.05
"""Share of a step's budget that stays free, because the peak of generated code differs from the simulated one."""

Budget = int | float | str | StepProfile | DeviceBudget | None
"""Types that are accepted as a ``memory_budget``."""
