"""The limits that a user asks for, before a share is bytes, with what their origin adds to errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoremat.basics.budget import budget_bytes
from autoremat.basics.units import format_bytes
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.step_profile import StepProfile
from autoremat.planner.plans.limits import Share


@dataclass(frozen=True)
class CommonBudget:
    """The budget that the parts of a split graph share. An error of one part names the figures of all together."""

    profile: StepProfile
    part: str
    """Name of the part in texts."""
    advice: str

    def figures(self, excess_bytes: int, advice: tuple[str, ...]) -> dict[str, Any]:
        """Returns the figures of the error for a part that needs ``excess_bytes`` more than its share, after other advice."""
        budget = self.profile.budget_bytes or 0
        return {
            "budget_bytes": budget,
            "minimum_bytes": budget + excess_bytes,
            "lower_bound_bytes": min(self.profile.minimum_peak_bytes, budget),
            "remedies": (*advice, f"{self.part} needs {format_bytes(excess_bytes)} more than its share; {self.advice}"),
            "gradient_bytes": 0,
            "parts": (),
            "device_bytes": None,
            "is_simulated": False,
        }


@dataclass(frozen=True)
class RequestedLimits:
    """Everything that the user asks of the plan of a graph. :class:`~autoremat.planner.plans.limits.Limits` follow from it.

    The peak is bounded in bytes, as a share of the reference peak, as a share of a step's budget, or not at all.
    """

    peak_bytes: int | None = None
    """The most bytes of the peak; None if it is a share of the reference peak, or if there is no limit."""
    reference_share: float | None = None
    """The most bytes of the peak as a share of the reference peak; None otherwise."""
    granted_bytes: int = 0
    """Bytes that an earlier graph of the function was granted. A share of the reference peak is never less."""
    step_share: Share | None = None
    """The share of the budget of a step of several graphs, which limits each half; None for a budget of the graph itself."""
    max_slowdown: float | None = None
    """The share by which the plan may take longer than the fastest one; None for no limit."""
    host_bytes: int | None = None
    """The most bytes that saved tensors of all open calls may take on the host; None to keep none there."""
    ledger: DeviceBudget | None = field(default=None, compare=False)
    """The ledger of the device that leaves ``peak_bytes``; None without a device budget."""
    common: CommonBudget | None = field(default=None, compare=False)
    """The budget of all parts of a split graph, of which ``step_share`` is this one's share."""
    advice: tuple[str, ...] = field(default=(), compare=False)
    """Advice for the error if no plan fits."""

    @property
    def bounds_memory(self) -> bool:
        """True if there is a limit on the peak."""
        return self.peak_bytes is not None or self.reference_share is not None

    @property
    def is_bounded(self) -> bool:
        """True if there is a limit on memory or on time."""
        return self.bounds_memory or self.max_slowdown is not None

    @property
    def takes_whole_reference(self) -> bool:
        """True if the budget is exactly the reference peak. Code of its plan is then accepted at any peak."""
        return self.reference_share == 1

    def bytes_for(self, reference_bytes: int | None) -> int | None:
        """Returns the limit on the peak in bytes, of which a share refers to ``reference_bytes``; None for no limit."""
        if self.reference_share is None or reference_bytes is None:
            return self.peak_bytes
        return max(budget_bytes(self.reference_share, reference_bytes) or 0, self.granted_bytes)

    def remedies(self, excess_bytes: int) -> tuple[str, ...]:
        """Returns the advice for an error whose minimum peak exceeds the budget by ``excess_bytes``."""
        return self.advice if self.ledger is None else (*self.advice, self.ledger.advice_for(excess_bytes))
