"""The step profile: a profiled step, its budget divided among its graphs, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autoremat.basics.checks import budget_bytes, parse_budget
from autoremat.basics.display import PlainTable, Shown, named_figures
from autoremat.basics.units import format_bytes, format_seconds
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.step import Step, StepGraph
from autoremat.planner.plans.limits import PlanPoint, Share

ENDED_BY_CLOCK = (
    "ENDED BY THE CLOCK at time_limit, before the work was done: another run may share out the budget otherwise, so raise "
    "time_limit or plan on a faster processor"
)
"""What a step's profile and its graphs' reports say of searches that the clock ended."""


@dataclass(frozen=True, repr=False)
class StepProfile(Shown):
    """Profile of a step of one or more graphs, with their shares of the budget. Accepted as a ``memory_budget``.

    The backend compiles each graph under its share. Bytes count above those live at the start of the step. Seconds are
    estimates of the cost model.
    """

    step: Step
    budget_bytes: int | None
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
    def peak_bytes(self) -> int:
        """Peak of the whole step under the assigned plans."""
        return self.step.peak_bytes(self.plans)

    @property
    def minimum_peak_bytes(self) -> int:
        """Smallest peak of the step over all choices among the plans found."""
        return self.step.minimum_peak_bytes

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of the step without recomputation."""
        return self.step.baseline_peak_bytes

    @property
    def reference_peak_bytes(self) -> int:
        """Reference peak: what the step needs without this package. A budget as a float is a share of it."""
        return self.step.reference_peak_bytes

    @property
    def added_seconds(self) -> float:
        """Seconds of the whole step above those of each graph's fastest plan."""
        return self.step.added_seconds(self.plans)

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes that saved tensors of the step take on the host under the assigned plans."""
        return self.step.host_peak_bytes(self.plans)

    def within(self, memory_budget: int | float | str | DeviceBudget | None) -> StepProfile:
        """Returns the profile of the same step under another budget, without running the step.

        Raises ``BudgetInfeasible`` if no choice of plans fits.
        """
        if isinstance(memory_budget, DeviceBudget):
            memory_budget.check()
            return share_out(self.step, memory_budget.budget_bytes, device=memory_budget)
        budget = parse_budget(memory_budget, "memory_budget")
        share = budget if isinstance(budget, float) else None
        found = share_out(self.step, budget_bytes(budget, self.reference_peak_bytes), share=share)
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
        order = ", ".join(self.step.order[:ORDER_SHOWN]) + (", ..." if len(self.step.order) > ORDER_SHOWN else "")
        host_budget = self.step.host_bytes
        host = (
            "" if host_budget is None else f"{format_bytes(self.host_peak_bytes)} of {format_bytes(host_budget)} (host_memory)"
        )
        figures = [
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
        return [named_figures(figures), table]


def share_out(
    step: Step,
    budget: int | None,
    remedies: Sequence[str] = (),
    share: float | None = None,
    device: DeviceBudget | None = None,
) -> StepProfile:
    """Returns the step with the plans of the least time whose peak is at most ``budget`` bytes (None: no bound).

    The budget was asked for as a ``share`` of the reference peak, or is what a ``device`` leaves. The peak leaves the step's
    code headroom free, if any choice does. Raises ``BudgetInfeasible`` with the advice ``remedies`` if no choice fits.
    """
    plans = None if budget is None else step.cheapest(int(budget * (1 - step.headroom)))
    plans = plans or step.cheapest(budget)
    if plans is None:
        assert budget is not None
        raise step.infeasible(budget, remedies).asked_as(share, step.reference_peak_bytes)
    shares = (None,) * len(plans) if budget is None else step.shares(plans, budget)
    return StepProfile(step, budget, plans, shares, device and replace(device, step_peak_bytes=step.peak_bytes(plans)))


def in_ranges(numbers: Iterable[int]) -> str:
    """Returns ascending numbers as text such as "0-20, 24"; "-" without numbers."""
    placed = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])  # consecutive numbers differ alike
    runs = [[number for _, number in run] for _, run in placed]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"


ORDER_SHOWN = 12
"""Number of halves that the printed order lists."""

Budget = int | float | str | StepProfile | DeviceBudget | None
"""Types that are accepted as a ``memory_budget``."""
