"""The reference peak: the peak that a graph needs without this package. A float as a budget is a share of it.

Under Inductor it is the simulated peak of torch's own partition, with the code headroom and the layout copies that Inductor
makes. Under ``aot_eager`` nothing is recomputed without this package, so it is the baseline's. It never exceeds the baseline's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoremat.basics.progress import now
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.passes import is_layout_copy
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.candidates import Search
from autoremat.planner.search.plan_source import PlanSource

MOST_OPS = 2500
"""Number of ops up to which torch's partitioner is asked. It takes seconds for a thousand ops, and has no time limit."""

CODE, TORCH = "the code that Inductor generates alone", "torch's own partition"
STAND_IN, BASELINE = "a stand-in for torch's own partition", "the baseline"
SMALLEST = "the smallest plan found, for torch's own partition needs less"
"""Sources of a reference peak. The stand-in saves the minimum cut of least time, and so recomputes about what torch does."""


@dataclass(frozen=True)
class Reference:
    """The peak that a graph needs without this package, with its code headroom."""

    bytes: int
    source: str
    saved_bytes: int = 0
    """Bytes that the plan with this peak saves for the backward."""


def reference_of(
    priced: PricedGraph,
    context: PlanningContext,
    planner: PlanSource,
    counted: Callable[[Plan], int],
    torchs_plans: list[Plan],
) -> Reference | None:
    """Returns the reference peak of a graph; None unless the budget is a share of it. A share of a nested region is none.

    It is at most the peak of the baseline, and at least that of the smallest plan, so that a share of 1 is feasible.
    ``counted`` returns the bytes of a plan that the budget counts. ``torchs_plans`` are those of earlier attempts; a new one is
    added. The time limit of ``planner`` begins afterwards.
    """
    if context.request.limits.reference_share is None or priced.joint.is_region:
        return None
    source, plan = plan_without_us(priced, context, planner, torchs_plans)
    size = counted(plan) + layout_copies_bytes(priced, plan)
    if context.plain_code_bytes is not None:
        source, size = CODE, context.plain_code_bytes
    found = [Reference(size, source, plan.saved_bytes), _of(planner.baseline, BASELINE, counted)]
    least = _of(planner.smallest, SMALLEST, counted)
    return max(min(found, key=_size), least, key=_size)


def _of(plan: Plan, source: str, counted: Callable[[Plan], int]) -> Reference:
    return Reference(counted(plan), source, plan.saved_bytes)


def _size(reference: Reference) -> int:
    return reference.bytes


def plan_without_us(
    priced: PricedGraph, context: PlanningContext, planner: PlanSource, torchs_plans: list[Plan] | None = None
) -> tuple[str, Plan]:
    """Returns the plan that the graph would have without this package, after its source.

    The sequence of torch's own partition is torch's, so the plan need not keep to the rules of others. The stand-in takes its
    place on graphs of many ops, and where the simulator cannot follow torch. The time limit of ``planner`` begins afterwards.
    """
    if not context.request.fuses:
        return BASELINE, planner.baseline
    torchs = _torchs_plan(priced, [] if torchs_plans is None else torchs_plans) if len(priced.graph.ops) <= MOST_OPS else None
    priced.name_planning(context.request.time_limit)
    planner.restart()
    return (STAND_IN, planner.least_traffic()) if torchs is None else (TORCH, torchs)


def layout_copies_bytes(priced: PricedGraph, plan: Plan) -> int:
    """Returns the bytes of the layout copies that Inductor alone saves for the backward, and ``plan`` does not."""
    calls = zip(priced.captured.op_nodes, priced.graph.ops, strict=True)
    made = {value for node, op in calls if is_layout_copy(node) for value in op.outputs}
    unsaved = made.intersection(priced.graph.backward_needs).difference(plan.saved)
    return sum(priced.graph.values[value].bytes for value in unsaved)


def _torchs_plan(priced: PricedGraph, torchs_plans: list[Plan]) -> Plan | None:
    """Returns torch's own partition as a plan; None if the simulator cannot follow it. An earlier attempt's is known."""
    for known in torchs_plans:
        if known.graph == priced.graph:
            return known
    now("asking for torch's own partition")
    plan = priced.torchs_plan()
    if plan is not None:
        torchs_plans.append(plan)
    return plan


def find_soft_budget(priced: PricedGraph, context: PlanningContext) -> int | None:
    """Returns the peak of torch's partition in bytes; None with a budget of memory alone, a stored plan or a policy.

    Without a budget the plan should not exceed that peak, and a budget of time is a share beyond that plan's time. On graphs
    of many ops, the stand-in takes the place of torch's partition, which has no time limit.
    """
    request = context.request
    limits = request.limits
    told = (limits.bounds_memory and limits.max_slowdown is None) or request.plan or request.policy
    if told or priced.joint.is_region or not context.request.fuses:
        return None
    if len(priced.graph.ops) > MOST_OPS:
        plan: Plan | None = Search(priced.graph).least_traffic()
    else:
        now("asking for torch's own partition")
        plan = priced.torchs_plan()
    return None if plan is None else plan.peak_bytes + layout_copies_bytes(priced, plan)


def budget_of(context: PlanningContext, reference: Reference | None) -> int | None:
    """Returns the budget in bytes; None for no limit. ``reference`` is the reference peak of a share."""
    limits = context.request.limits
    if limits.reference_share is None:
        return limits.peak_bytes
    return None if reference is None else limits.bytes_for(reference.bytes)
