"""The reference peak: the peak that a graph needs without this package. A float as a budget is a share of it.

Under Inductor it is the peak of the code that Inductor generates alone (:mod:`autoremat.compiler.plain_code`). Where no code is
generated, as for a card by name or for several graphs of a step, torch's own partition is simulated, with the code headroom and
the layout copies that Inductor makes. Under ``aot_eager`` torch makes the same partition, which then runs uncompiled.
"""

from __future__ import annotations

from autoremat.basics.errors import BudgetWarning
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph, Reference
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.bound_forms import PlanSource
from autoremat.planner.search.starts import Starts
from autoremat.torch_private.layouts import LAYOUT_COPY

MOST_OPS = 2500
"""Number of ops up to which torch's partitioner is asked without a budget. It takes seconds for a thousand ops."""

CODE, TORCH = "the code that Inductor generates alone", "torch's own partition"
BASELINE = "the step without recomputation, for torch's own partition is unknown"
SMALLEST = "the smallest plan found, for the step without autoremat needs less"
"""Sources of a reference peak."""


def reference_of(
    priced: PricedGraph,
    context: PlanningContext,
    planner: PlanSource,
    headroom: int,
    torchs_plans: list[Plan],
) -> Reference | None:
    """Returns the reference peak of a graph; None unless the budget is a share of it. A share of a nested region is none.

    A share of 1 refers at least to the smallest plan, so that it is feasible. ``headroom`` is the code's. ``torchs_plans``
    are those of earlier attempts; a new one is added. The time limit of ``planner`` begins afterwards.
    """
    limits = context.request.limits
    if limits.reference_share is None or priced.joint.is_region:
        return None
    found = context.reference
    if found is None:
        source, plan = plan_without_us(priced, context, planner, torchs_plans)
        found = Reference(plan.peak_bytes + headroom + layout_copies_bytes(priced, plan), source, plan.saved_bytes)
    least = planner.smallest if limits.takes_whole_reference else None
    if least is None or least.peak_bytes + headroom <= found.bytes:
        return found
    return Reference(least.peak_bytes + headroom, SMALLEST, least.saved_bytes)


def plan_without_us(
    priced: PricedGraph, context: PlanningContext, planner: PlanSource, torchs_plans: list[Plan] | None = None
) -> tuple[str, Plan]:
    """Returns the plan that the graph would have without this package, after its source.

    The sequence of torch's own partition is torch's, so the plan need not keep to the rules of others. If the simulator cannot
    follow it, the baseline takes its place, with a ``BudgetWarning``. The time limit of ``planner`` begins afterwards.
    """
    torchs = _torchs_plan(priced, [] if torchs_plans is None else torchs_plans)
    priced.name_planning(context.request.options.time_limit)
    planner.restart()
    if torchs is not None:
        return TORCH, torchs
    warn_user(
        "the share of a budget refers to the step without recomputation, which needs more than the step without autoremat: "
        "torch's own partition of this graph could not be simulated (the logger autoremat has the reason). Give the budget "
        "in bytes",
        BudgetWarning,
    )
    return BASELINE, planner.baseline


def layout_copies_bytes(priced: PricedGraph, plan: Plan) -> int:
    """Returns the bytes of the layout copies that Inductor alone saves for the backward, and ``plan`` does not."""
    calls = zip(priced.captured.op_nodes, priced.graph.ops, strict=True)
    made = {value for node, op in calls if LAYOUT_COPY in node.meta for value in op.outputs}
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
    told = (limits.bounds_memory and limits.max_slowdown is None) or request.options.plan or request.options.policy
    if told or priced.joint.is_region or not context.request.fuses:
        return None
    if len(priced.graph.ops) > MOST_OPS:
        plan: Plan | None = Starts(priced.graph).least_traffic()
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
