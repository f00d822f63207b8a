"""The reference peak: the peak that a graph needs without this package. A float as a budget is a share of it.

Under Inductor it is the simulated peak of torch's own partition, with the code headroom. Under ``aot_eager`` nothing is
recomputed without this package, so it is the baseline's. It never exceeds the baseline's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoremat.basics.errors import PlanInvalid
from autoremat.basics.progress import now
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.planner.graph.graph import Graph
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.candidates import Search
from autoremat.planner.search.planner import Planner, PlanningResult
from autoremat.torch_private import joint_graphs

log = logging.getLogger("autoremat")

MOST_OPS = 2500
"""Number of ops up to which torch's partitioner is asked. It takes seconds for a thousand ops, and has no time limit."""

CODE, TORCH, STAND_IN, BASELINE = (
    "the code that Inductor generates alone", "torch's own partition", "a stand-in for torch's own partition", "the baseline",
)  # fmt: skip
"""Sources of a reference peak. The stand-in saves the minimum cut of least time, and so recomputes about what torch does."""


@dataclass(frozen=True)
class Reference:
    """The peak that a graph needs without this package, with its code headroom."""

    bytes: int
    source: str
    """One of ``CODE``, ``TORCH``, ``STAND_IN`` and ``BASELINE``."""
    plan: Plan | None = None
    """The plan with this peak; None if another rank found it."""

    @property
    def saved_bytes(self) -> int | None:
        """Bytes that the plan saves for the backward."""
        return None if self.plan is None else self.plan.saved_bytes

    def competing(self, found: PlanningResult, graph: Graph, budget_bytes: int | None, extra_bytes: int) -> PlanningResult:
        """Returns ``found``, the result of a search without a plan, with the plan of the reference peak if that fits.

        ``extra_bytes`` are those by which plans stay below the budget, because the code of earlier ones needed more.
        """
        fits = budget_bytes is not None and self.bytes + extra_bytes <= budget_bytes
        return replace(found, plan=self.plan) if self.plan is not None and fits and self.plan.graph == graph else found


def reference_of(
    priced: PricedGraph, context: PlanningContext, planner: Planner, counted: Callable[[Plan], int]
) -> Reference | None:
    """Returns the reference peak of a graph; None unless the budget is a share of it. A share of a nested region is none.

    ``counted`` returns the bytes of a plan that the budget counts. The time limit of ``planner`` begins afterwards.
    """
    if not isinstance(context.options.memory_budget, float) or priced.joint.is_region:
        return None
    source, plan = plan_without_us(priced, context, planner)
    size = counted(plan)
    if context.plain_code_bytes is not None:
        source, size = CODE, context.plain_code_bytes
    return min(
        Reference(size, source, plan),
        Reference(counted(planner.baseline), BASELINE, planner.baseline),
        key=lambda reference: reference.bytes,
    )


def plan_without_us(priced: PricedGraph, context: PlanningContext, planner: Planner) -> tuple[str, Plan]:
    """Returns the plan that the graph would have without this package, after its source.

    The stand-in takes its place on graphs of many ops, under constraints, which torch does not know, and where torch's
    partition is no plan. The time limit of ``planner`` begins afterwards.
    """
    if not context.fuses:
        return BASELINE, planner.baseline
    asks = len(priced.graph.ops) <= MOST_OPS and not context.options.has_constraints
    torchs = _torchs_plan(priced, context) if asks else None
    planner.restart()
    return (STAND_IN, planner.search.least_traffic()) if torchs is None else (TORCH, torchs)


def _torchs_plan(priced: PricedGraph, context: PlanningContext) -> Plan | None:
    """Returns torch's own partition as a plan; None if it breaks a rule of the graph, or if the simulator cannot follow it."""
    for known in context.torchs_plans:
        if known.graph == priced.graph:
            return known
    now("asking for torch's own partition")
    plan = priced.torchs_plan()
    if plan is None:
        return None
    try:
        plan.check()
    except PlanInvalid as error:
        log.info("torch's own partition is no plan", exc_info=error)
        return None
    context.torchs_plans.append(plan)
    return plan


def find_soft_budget(priced: PricedGraph, context: PlanningContext) -> int | None:
    """Returns the peak of torch's partition in bytes, if neither a budget, a stored plan nor a policy is given; else None.

    Without a budget the plan should not exceed that peak. On graphs of many ops, the stand-in takes the place of torch's
    partition, which has no time limit.
    """
    options = context.options
    told = options.is_bounded or options.plan or options.policy
    if told or priced.joint.is_region or not context.fuses:
        return None
    if len(priced.graph.ops) > MOST_OPS:
        return Search(priced.graph).least_traffic().peak_bytes
    now("asking for torch's own partition")
    plan = priced.torchs_plan()
    return None if plan is None else plan.peak_bytes


def budget_of(priced: PricedGraph, context: PlanningContext, reference: Reference | None) -> int | None:
    """Returns the budget in bytes; None for no limit. ``reference`` is the reference peak of a share."""
    if reference is None and isinstance(context.options.memory_budget, float):
        return None
    is_auto = context.options.memory_budget == "auto"
    free = context.free_bytes(joint_graphs.device_of(priced.captured.joint)) if is_auto else None
    return context.options.resolve_budget(0 if reference is None else reference.bytes, free)
