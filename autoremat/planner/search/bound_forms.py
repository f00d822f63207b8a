"""Plans that keep certain values in their form under every plan, as constraints demand.

A planner finds them. It may use the form of such a value without counting its bytes on the host, which are set aside
before. Each plan is then completed: what it left on the device is stored as early and loaded as late as the link allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoremat.basics.errors import OptionsError
from autoremat.basics.units import format_bytes
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule, Stay
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan
from autoremat.planner.search.placement import relieving
from autoremat.planner.search.planner import Accepts, Planner
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.planner.search.time_budget import TimeBudget


def set_aside(graph: Graph, bound_values: frozenset[int], host_bytes: int | None) -> tuple[Graph, int | None]:
    """Returns ``graph`` for the search of plans to complete, and what is left of ``host_bytes`` for other values."""
    held = sum(form.host_bytes for value in bound_values for form in graph.values[value].forms) * graph.calls.in_flight
    values = list(graph.values)
    for number in bound_values:
        forms = tuple(replace(form, host_bytes=0) for form in values[number].forms)
        values[number] = replace(values[number], forms=forms)
    return replace(graph, values=tuple(values)), None if host_bytes is None else max(0, host_bytes - held)


@dataclass
class BoundForms:
    """The plans of ``planner`` for ``graph``, in which each of ``bound_values`` that crosses has its form."""

    planner: Planner
    graph: Graph
    bound_values: frozenset[int]
    host_bytes: int | None
    """Bound on the bytes of stays on the host; None: no bound."""
    _completed: dict[int, tuple[Plan, Plan]] = field(default_factory=dict, init=False)
    """By the identity of a plan: the plan, and the completed one."""

    @property
    def baseline(self) -> Plan:
        """The plan without recomputation and without stays."""
        return Plan.of(self.graph, self.planner.baseline.schedule, self.planner.baseline.label)

    @property
    def smallest(self) -> Plan:
        """The plan of the minimum peak found."""
        return self.completed(self.planner.smallest)

    @property
    def lowest(self) -> Plan:
        """The plan of the least peak that a search for it finds."""
        return min(self.completed(self.planner.lowest), self.smallest, key=lambda plan: plan.peak_bytes)

    @property
    def ended_by_clock(self) -> bool:
        """True if the clock has ended a search."""
        return self.planner.ended_by_clock

    def completed(self, plan: Plan) -> Plan:
        """Returns ``plan`` with stays for all bound values that cross. Raises ``OptionsError`` if the host lacks memory."""
        if id(plan) not in self._completed:
            missing = self.bound_values.intersection(plan.saved).difference(stay.value for stay in plan.schedule.stays)
            stays = sorted((*plan.schedule.stays, *self._stays(plan, missing)), key=lambda stay: stay.value)
            found = Plan.of(self.graph, replace(plan.schedule, stays=tuple(stays)), plan.label)
            self._check_host(found)
            self._completed[id(plan)] = plan, found
        return self._completed[id(plan)][1]

    def _stays(self, plan: Plan, values: frozenset[int]) -> Sequence[Stay]:
        if not values:
            return ()
        only = (replace(v, forms=v.forms if number in values else ()) for number, v in enumerate(self.graph.values))
        schedule = Schedule(plan.schedule.forward, plan.schedule.backward)
        alone = Plan.of(replace(self.graph, values=tuple(only)), schedule)
        grouped = GroupedPlan(alone)
        found = {one.value: grouped.stay(one, one.made, one.free, one.need) for one in grouped.storables}
        found |= {stay.value: stay for best in relieving(alone, (1.0,)) for stay in best.schedule.stays}
        return list(found.values())

    def _check_host(self, plan: Plan) -> None:
        if self.host_bytes is None or plan.host_bytes <= self.host_bytes:
            return
        values = [self.graph.values[stay.value] for stay in plan.schedule.stays if stay.value in self.bound_values]
        largest = max(values, key=lambda value: value.bytes)
        raise OptionsError(
            f"`save` keeps {len(values)} tensors on the host, the largest of them {largest.name} "
            f"({format_bytes(largest.bytes)}): they need {format_bytes(plan.host_bytes)} there, and host_memory allows "
            f"{format_bytes(self.host_bytes)}. Raise host_memory to {plan.host_bytes}, or name fewer tensors"
        )

    def _result(self, found: PlanningResult, budget_bytes: int | None, accepts: Accepts | None = None) -> PlanningResult:
        """Returns ``found`` with completed plans. Those that no longer fit do not count, and the smallest one may fit now."""
        plans = [self.completed(plan) for plan in (found.plan, found.smallest) if plan is not None]
        fitting = [
            plan
            for plan in plans
            if (budget_bytes is None or plan.peak_bytes <= budget_bytes) and (accepts is None or accepts(plan))
        ]
        best, smallest = fitting[0] if fitting else None, plans[-1]
        for plan in filter(None, (best, smallest)):
            plan.check()
        return replace(found, plan=best, smallest=smallest, baseline=self.baseline)

    def _inside(self, accepts: Accepts | None) -> Accepts | None:
        return None if accepts is None else lambda plan: accepts(self.completed(plan))

    def find(self, budget_bytes: int | None, accepts: Accepts | None = None) -> PlanningResult:
        """Returns the best plan within the budget that is accepted, and the lower bounds."""
        return self._result(self.planner.find(budget_bytes, self._inside(accepts)), budget_bytes, accepts)

    def choose(self, budget_bytes: int | None, *, accepts: Accepts | None = None) -> Plan | None:
        """Returns the plan of :meth:`find`."""
        return self.find(budget_bytes, accepts).plan

    def fastest(self, accepts: Accepts | None = None) -> Plan | None:
        """Returns the plan of least time."""
        found = self.planner.fastest(self._inside(accepts))
        return None if found is None else self.completed(found)

    def judge(self, plan: Plan, budget_bytes: int | None) -> PlanningResult:
        """Returns the result of :meth:`find` as if ``plan``, completed, were the only plan."""
        return replace(self.planner.judge(self.completed(plan), budget_bytes), baseline=self.baseline)

    def least_peak(self, time: TimeBudget) -> PlanningResult:
        """Returns the plan of the least peak found that keeps to ``time``, if there is one."""
        return self._result(self.planner.least_peak(time), None, time.keeps)

    def least_traffic(self) -> Plan:
        """Returns the plan that recomputes only what saving would slow down."""
        return self.completed(self.planner.least_traffic())

    def front(self) -> Sequence[Plan]:
        """Returns plans of many peaks and many amounts of saved bytes."""
        return [self.completed(plan) for plan in self.planner.front()]

    def restart(self) -> None:
        """Begins a new search with all its work and time."""
        self.planner.restart()
        self._completed.clear()


PlanSource = Planner | BoundForms
"""What plans one graph within limits."""
