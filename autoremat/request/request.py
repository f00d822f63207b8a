"""The request: everything beside a graph that decides its plan, with the limits that the plan must keep to."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields

from autoremat.basics.errors import OptionsError
from autoremat.basics.units import share_bytes
from autoremat.options.options import Options
from autoremat.planner.constraints import policies
from autoremat.planner.graph.op import BITS, DEVICE, HOST
from autoremat.planner.multigraph.device_budget import DeviceBudget
from autoremat.planner.multigraph.ledger import OpenCalls
from autoremat.planner.plans.limits import Share


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
    advice: tuple[str, ...] = field(default=(), compare=False)
    """Advice for the error if no plan fits."""

    @property
    def bounds_peak(self) -> bool:
        """True if there is a limit on the peak."""
        return self.peak_bytes is not None or self.reference_share is not None

    @property
    def is_bounded(self) -> bool:
        """True if there is any limit beyond that on the host, which others need."""
        return self.bounds_peak or self.max_slowdown is not None

    def refuse_beside_peak(self, who: str) -> None:
        """Raises ``OptionsError`` for ``max_slowdown``, because ``who`` shares out bytes among several graphs."""
        if self.max_slowdown is not None:
            raise OptionsError(f"max_slowdown bounds one graph, and {who} shares out bytes among several: leave one out")

    @property
    def takes_whole_reference(self) -> bool:
        """True if the budget is exactly the reference peak. Code of its plan is then accepted at any peak."""
        return self.reference_share == 1

    def bytes_for(self, reference_bytes: int | None) -> int | None:
        """Returns the limit on the peak in bytes, of which a share refers to ``reference_bytes``; None for no limit."""
        if self.reference_share is None or reference_bytes is None:
            return self.peak_bytes
        return max(share_bytes(self.reference_share, reference_bytes), self.granted_bytes)

    def remedies(self, excess_bytes: int) -> tuple[str, ...]:
        """Returns the advice for an error whose minimum peak exceeds the budget by ``excess_bytes``."""
        return self.advice if self.ledger is None else (*self.advice, self.ledger.advice_for(excess_bytes))


HELD_ELSEWHERE = frozenset(
    ["memory_budget", "auto_headroom", "max_slowdown", "host_memory", "on_infeasible", "on_planning_error", "in_flight"]
    + ["accumulate", "early_gradients", "hooks_free_gradients"]
)
"""Options that decide plans by what a request holds beside them."""

AS_A_STEP = "judge the step"
"""Each graph of a broken function takes its minimum peak, for a small one may have nothing to recompute. The step is judged as
a whole when it runs."""


@dataclass(frozen=True)
class Request:
    """What is asked of one graph."""

    options: Options = field(default_factory=Options)
    limits: RequestedLimits = field(default_factory=RequestedLimits)
    calls: OpenCalls = field(default_factory=OpenCalls)
    """The calls of the graph that are open at once."""
    on_infeasible: str = "raise"
    """What happens if no plan fits: an option's value, or ``AS_A_STEP``."""
    on_planning_error: str = "fallback"
    returned: str = field(default="", compare=False)
    """What the compiled function returns beside its loss, and what to do about it; empty for nothing."""
    returned_bytes: int = field(default=0, compare=False)

    @classmethod
    def of(cls, options: Options, limits: RequestedLimits, calls: OpenCalls | None = None) -> Request:
        """Returns the request of ``options`` under ``limits``. Without ``calls``, the options tell the open calls."""
        return cls(
            options, limits, options.open_calls if calls is None else calls,
            options.on_infeasible or ("raise" if limits.reference_share is None else "best_effort"),
            options.on_planning_error or ("raise" if limits.bounds_peak else "fallback"),
        )  # fmt: skip

    @property
    def forms(self) -> frozenset[str]:
        """The names of the forms that saved tensors may have beside the device."""
        if self.limits.host_bytes is None:
            return frozenset(self.options.store or ()) - {DEVICE, HOST}
        return frozenset(self.options.store or (HOST, BITS)) - {DEVICE}

    @property
    def fuses(self) -> bool:
        """True if Inductor compiles the graph."""
        return self.options.compiler == "inductor"

    @property
    def must_fit(self) -> bool:
        """True: raise an error if no plan fits. False: take the plan with the minimum peak."""
        return self.on_infeasible == "raise"

    @property
    def falls_back(self) -> bool:
        """True if torch partitions a graph that cannot be planned. If False, such a graph is an error."""
        return self.on_planning_error == "fallback"

    def cache_key(self) -> str:
        """Returns text that is equal, in every process, for requests that lead to the same plan of the same graph."""
        parts: dict[str, object] = {}
        for owner, left_out in ((self.options, HELD_ELSEWHERE), (self.limits, ()), (self, ("options", "limits"))):
            parts |= {one.name: getattr(owner, one.name) for one in fields(owner) if one.compare and one.name not in left_out}
        parts["inductor"] = dict(self.options.inductor)
        parts["policy"] = policies.identity(policies.parse(self.options.policy))
        return json.dumps(_stable(parts), sort_keys=True)


def _stable(value: object) -> object:
    """Returns ``value`` as JSON data that is equal in every process: without addresses and hash order."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_stable(one) for one in value]
        case set() | frozenset():
            return sorted(json.dumps(_stable(one), sort_keys=True) for one in value)
        case dict():
            return {str(key): _stable(one) for key, one in value.items()}
    if callable(uuid := getattr(value, "uuid", None)) and not isinstance(value, type):
        return [_qualified_name(type(value)), _stable(uuid())]  # torch's custom passes declare their version by `uuid`
    if callable(value) and hasattr(value, "__qualname__"):
        return _qualified_name(value)
    return [_qualified_name(type(value)), re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))]


def _qualified_name(value: object) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
