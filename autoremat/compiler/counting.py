"""The bytes that a budget counts: allocated ones, or those that CUDA's caching allocator reserves for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoremat.basics.errors import OptionWarning
from autoremat.basics.units import format_bytes
from autoremat.basics.warn import warn_user
from autoremat.compiler.joint_graph import PlanningContext, PricedGraph
from autoremat.planner.memory.allocations import Allocations, HalfAllocations, beside_sizes, joined, simulated
from autoremat.planner.memory.allocator_settings import AllocatorSettings
from autoremat.planner.memory.reserved import Reserved, reserved_bytes, reserved_for, unsplit_bytes
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import PlanningResult
from autoremat.request.limits import Limits
from autoremat.request.request import Request
from autoremat.torch_private.allocator import settings_of_process

TIGHTENINGS = 6
"""Most searches for a plan whose simulated reserved bytes fit. Each has the limit of the last one minus its excess."""

SPREAD = 6
"""Number of further searches, with limits evenly over the range of peaks."""


@dataclass(frozen=True)
class Count:
    """Counts the bytes of blocks and of segments under the settings of the allocator.

    ``code_headroom_bytes`` are allocated beside the plan through the whole step.
    """

    settings: AllocatorSettings
    code_headroom_bytes: int = 0
    is_bounded: bool = False
    """True if the budget bounds the reserved bytes; False if they are only reported."""

    @classmethod
    def of(cls, priced: PricedGraph, context: PlanningContext, code_headroom_bytes: int) -> Count | None:
        """Returns the count for a graph; None on other devices than CUDA."""
        if priced.captured.runs_on != "cuda":
            return None
        limits = context.request.limits
        is_bounded = context.request.count == "reserved" and not (priced.joint.is_region or _lacks_effect(limits, "cuda"))
        return cls(settings_of_process(), code_headroom_bytes, is_bounded)

    def _step(self, plan: Plan, allocations: Allocations) -> Allocations:
        return allocations.beside([self.code_headroom_bytes, *beside_sizes(plan.timeline)])

    def plan_bytes(self, plan: Plan) -> int:
        """Returns the reserved bytes of a simulated plan."""
        return reserved_bytes(self._step(plan, simulated(plan.timeline)), self.settings)

    def plan_report(self, plan: Plan) -> Reserved:
        """Returns all figures of a simulated plan."""
        return reserved_for(self._step(plan, simulated(plan.timeline)), self.settings)

    def code_bytes(self, plan: Plan, halves: Mapping[bool, HalfAllocations]) -> int:
        """Returns the reserved bytes of the generated code of ``plan``, of which one half may be missing."""
        return reserved_bytes(self._step(plan, _of_halves(halves)), self.settings)

    def code_unsplit_bytes(self, plan: Plan, halves: Mapping[bool, HalfAllocations]) -> int:
        """Returns the bytes of blocks beside the allocations in them at the peak of the generated code of ``plan``.

        With both halves, it is the peak of the backward.
        """
        return unsplit_bytes(_of_halves(halves).beside(beside_sizes(plan.timeline)), self.settings)

    def bytes_beside(self, halves: Mapping[bool, HalfAllocations], beside: Sequence[int], allocated: int) -> int:
        """Returns the counted bytes of generated code of ``allocated`` bytes, with further allocations ``beside`` it."""
        step = _of_halves(halves)
        if not self.is_bounded:
            return allocated + unsplit_bytes(step.beside(beside), self.settings)
        return reserved_bytes(step.beside([self.code_headroom_bytes, *beside]), self.settings)

    def code_report(self, plan: Plan, halves: Mapping[bool, HalfAllocations]) -> Reserved:
        """Returns all figures of the generated code of ``plan``."""
        return reserved_for(self._step(plan, _of_halves(halves)), self.settings, of_code=True)


def _of_halves(halves: Mapping[bool, HalfAllocations]) -> Allocations:
    if len(halves) == 2:
        return joined(halves[False], halves[True])
    return next(iter(halves.values()))


def find_within(count: Count, budget: int, limit: int, find: Callable[[int], PlanningResult]) -> tuple[PlanningResult, int]:
    """Returns the best plan whose reserved bytes are within ``budget``, and the bytes by which its limit is below ``limit``.

    ``find`` returns the plan for a limit on allocated bytes. The lower bounds are those for the first limit. If no plan fits,
    the smallest one in the result is that of the least reserved bytes.
    """
    first = find(limit)
    least, present = first.smallest.peak_bytes, limit
    # More is not always reserved for more, so plans in the whole range of peaks are tried in the end.
    further = iter([least + (limit - least) * part // SPREAD for part in reversed(range(SPREAD))] if limit > least else [])
    tried: list[tuple[int, Plan]] = []
    while True:
        result = first if present == limit else find(present)
        plan = result.plan or result.smallest
        reserved = count.plan_bytes(plan)
        if reserved <= budget:
            return replace(result, plan=plan, lower_bound_seconds=first.lower_bound_seconds), limit - present
        tried.append((reserved, plan))
        tighter = min(present, plan.peak_bytes) - (reserved - budget)
        following = tighter if len(tried) <= TIGHTENINGS and tighter >= least else next(further, None)
        if following is None:
            break
        present = following
    _, best = min(tried, key=lambda one: one[0])
    return replace(result, plan=None, smallest=best, lower_bound_seconds=first.lower_bound_seconds), limit - best.peak_bytes


def judged(count: Count, budget: int, result: PlanningResult) -> PlanningResult:
    """Returns ``result`` without its plan if that reserves more than ``budget``."""
    fits = result.plan is not None and count.plan_bytes(result.plan) <= budget
    return result if fits else replace(result, plan=None)


def expandable_remedy(reserved: Reserved, budget: int) -> str:
    """Returns the advice to let segments expand, if the plan of the least reserved bytes fits then; else an empty text."""
    if reserved.is_expandable or reserved.expandable_bytes > budget:
        return ""
    return (
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator then reserves "
        f"{format_bytes(reserved.expandable_bytes)} for this plan"
    )


@dataclass
class Codes:
    """The allocations of the code of each attempt, by the headroom of its plan. A cache may answer for one half later on."""

    known: dict[int, dict[bool, HalfAllocations]] = field(default_factory=dict)

    def note(self, headroom_bytes: int, halves: Mapping[bool, HalfAllocations]) -> Mapping[bool, HalfAllocations]:
        """Adds ``halves`` and returns all that are known of the code of this plan."""
        found = self.known.setdefault(headroom_bytes, {})
        found.update(halves)
        return found


def _lacks_effect(limits: Limits, device_type: str) -> str:
    """Returns the reason why ``count`` has no effect on graphs of a device; empty if it has one."""
    if device_type != "cuda":
        return f"the graph runs on {device_type}, and only the allocator of CUDA reserves segments"
    if not limits.bounds_memory:
        return "there is no memory_budget"
    if limits.step_share is not None:
        return "several graphs share one budget, which is divided in allocated bytes"
    return ""


def warn_without_effect(request: Request, device_type: str) -> None:
    """Warns with ``OptionWarning`` if reserved bytes are asked for and not counted."""
    reason = _lacks_effect(request.limits, device_type) if request.count == "reserved" else ""
    if reason:
        warn_user(
            f'count="reserved" has no effect: {reason}. A budget bounds allocated bytes there; leave count out', OptionWarning
        )
