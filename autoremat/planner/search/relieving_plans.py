"""Plans that keep saved tensors in other forms for the memory of other open calls, whatever their own peak.

Several graphs of a step, or several calls of one, are open at once. What a call keeps between its halves is live while the
others run, so storing it elsewhere is worth more than the peak of its own graph tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.grouped_plan import GroupedPlan
from autoremat.planner.search.placement import place

SHARES = (1 / 3, 2 / 3, 1.0)
"""Shares of the bytes that stays can free between the halves."""

MANY = 1000
"""Number of open calls beside which the peak of one call itself hardly counts."""


def relieving(plan: Plan, shares: Sequence[float] = SHARES) -> Iterator[Plan]:
    """Yields ``plan``, which has no stays, with stays that free ``shares`` of what it keeps between its halves."""
    graph = plan.graph
    grouped = GroupedPlan(Plan.of(replace(graph, in_flight=MANY), plan.schedule, plan.label))
    best = {one.value: one.relief for one in sorted(grouped.storables, key=lambda one: one.relief)}
    for share in shares if best else ():
        found = place(grouped, grouped.plan.peak_bytes - int((MANY - 1) * share * sum(best.values())))
        if found is not None:
            yield Plan.of(graph, replace(plan.schedule, stays=found.schedule.stays), plan.label)
