"""Plans that keep certain values in their form under every plan, as constraints demand.

The search may use the form of such a value without counting its bytes on the host, which are set aside before. Each plan that
leaves the planner is completed: what it left on the device is stored as early and loaded as late as the link allows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoremat.basics.errors import OptionsError
from autoremat.basics.units import format_bytes
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.limits import Limits
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan
from autoremat.planner.search.placement import relieving
from autoremat.planner.search.planner import Planner


class BoundForms(Planner):
    """The planner of ``whole``, in whose plans each of ``bound_values`` that crosses has its form."""

    def __init__(self, whole: Graph, bound_values: frozenset[int], limits: Limits, **settings: Any) -> None:
        self.whole, self.bound_values, self.host_bytes = whole, bound_values, limits.host_bytes
        self._completed: dict[int, tuple[Plan, Plan]] = {}
        """By the identity of a plan: the plan, and the completed one."""
        values, held = list(whole.values), 0
        for number in bound_values:
            forms = values[number].forms
            held += sum(form.host_bytes for form in forms) * whole.calls.in_flight
            values[number] = replace(values[number], forms=tuple(replace(form, host_bytes=0) for form in forms))
        left = None if limits.host_bytes is None else max(0, limits.host_bytes - held)
        super().__init__(replace(whole, values=tuple(values)), limits=replace(limits, host_bytes=left), **settings)
        self.baseline = Plan.of(whole, self.baseline.schedule, self.baseline.label)

    def completed(self, plan: Plan) -> Plan:
        """Returns ``plan`` with stays for all bound values that cross. Raises ``OptionsError`` if the host lacks memory."""
        if id(plan) not in self._completed:
            stays = {stay.value: stay for stay in plan.schedule.stays}
            if missing := self.bound_values.intersection(plan.saved).difference(stays):
                only = (replace(v, forms=v.forms if number in missing else ()) for number, v in enumerate(self.whole.values))
                alone = Plan.of(replace(self.whole, values=tuple(only)), plan.schedule.without_stays)
                grouped = GroupedPlan(alone)
                stays |= {one.value: grouped.stay(one, one.made, one.free, one.need) for one in grouped.storables}
                stays |= {stay.value: stay for best in relieving(alone, (1.0,)) for stay in best.schedule.stays}
            schedule = replace(plan.schedule, stays=tuple(stays[value] for value in sorted(stays)))
            found = Plan.of(self.whole, schedule, plan.label)
            self._check_host(found)
            found.check()
            self._completed[id(plan)] = plan, found
        return self._completed[id(plan)][1]

    def _check_host(self, plan: Plan) -> None:
        if self.host_bytes is None or plan.host_bytes <= self.host_bytes:
            return
        values = [self.whole.values[stay.value] for stay in plan.schedule.stays if stay.value in self.bound_values]
        largest = max(values, key=lambda value: value.bytes)
        raise OptionsError(
            f"`save` keeps {len(values)} tensors on the host, the largest of them {largest.name} "
            f"({format_bytes(largest.bytes)}): they need {format_bytes(plan.host_bytes)} there, and host_memory allows "
            f"{format_bytes(self.host_bytes)}. Raise host_memory to {plan.host_bytes}, or name fewer tensors"
        )
