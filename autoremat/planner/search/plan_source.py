"""The seam between a compilation and the search for plans: another search that has these members can train models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.time_budget import TimeBudget

Accepts = Callable[[Plan], bool]
"""A condition on plans beside their peak."""


class PlanSource(Protocol):
    """Plans of one graph within limits. Budgets are bounds on the simulated peak in bytes; None is no bound."""

    @property
    def graph(self) -> Graph:
        """The graph of all plans."""
        ...

    @property
    def baseline(self) -> Plan:
        """The plan without recomputation."""
        ...

    @property
    def smallest(self) -> Plan:
        """The plan of the minimum peak found, the same for every budget, without a search for the least peak."""
        ...

    @property
    def lowest(self) -> Plan:
        """The plan of the least peak that a search for it finds."""
        ...

    @property
    def ended_by_clock(self) -> bool:
        """True if the clock has ended a search, so that another run may find other plans."""
        ...

    def find(self, budget_bytes: int | None, accepts: Accepts | None = None) -> PlanningResult:
        """Returns the best plan within the budget that is accepted, and the lower bounds."""
        ...

    def choose(self, budget_bytes: int | None, *, accepts: Accepts | None = None) -> Plan | None:
        """Returns the plan of :meth:`find`. Some sources leave out its last improvements."""
        ...

    def fastest(self, accepts: Accepts | None = None) -> Plan | None:
        """Returns the plan of least time."""
        ...

    def judge(self, plan: Plan, budget_bytes: int | None) -> PlanningResult:
        """Returns the result of :meth:`find` as if ``plan`` were the only plan."""
        ...

    def least_peak(self, time: TimeBudget) -> PlanningResult:
        """Returns the plan of the least peak that keeps to ``time``, if there is one."""
        ...

    def least_traffic(self) -> Plan:
        """Returns the plan that recomputes only what saving would slow down."""
        ...

    def front(self) -> Sequence[Plan]:
        """Returns plans of many peaks and many amounts of saved bytes."""
        ...

    def restart(self) -> None:
        """Begins a new search with all its work and time. Plans that do not depend on a budget stay."""
        ...
