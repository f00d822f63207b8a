"""The problem of a graph: all that decides its plan, and that no attempt changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autoremat.planner.cost.links import HostLink, Interconnect
from autoremat.planner.cost.rates import Rates
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner
from autoremat.report.report import Report
from autoremat.request.request import Request


@dataclass(frozen=True)
class Reference:
    """The peak that a graph needs without this package, with its code headroom."""

    bytes: int
    source: str
    saved_bytes: int = 0
    """Bytes that the step with this peak saves for the backward."""


@dataclass(frozen=True)
class Record:
    """The record of a compilation.

    ``report`` is None if the graph has no backward. ``extra_headroom_bytes`` is the headroom below the user's budget at which
    the generated code fitted.
    """

    report: Report | None
    extra_headroom_bytes: int = 0
    agreement: str = ""
    """Name of the agreement of several ranks under which the code was made; empty for a process by itself."""


@dataclass
class Searches:
    """The searches of all attempts. An attempt on an equal graph continues with them."""

    planners: list[tuple[object, Planner]] = field(default_factory=list)
    """Each search after what it was begun for: graph, given schedules and soft budget."""
    torchs_plans: list[Plan] = field(default_factory=list)
    """Torch's own partitions, which are the references of shares."""

    @property
    def ended_by_clock(self) -> bool:
        """True if the clock has ended a search of any attempt, so that another compilation may choose another plan."""
        return any(planner.ended_by_clock for _, planner in self.planners)


@dataclass(frozen=True)
class Problem:
    """What is asked of a graph, and what is known of the graph, its ranks and its device before the first attempt."""

    request: Request = field(default_factory=Request)
    module: fx.GraphModule | None = None
    """The graph that Dynamo captured; None if a joint graph is given."""
    inputs: Sequence[Any] = ()
    patches: Mapping[str, Any] = field(default_factory=dict)
    """The Inductor options that the user set."""
    cuda_name: str | None = None
    """Name of the CUDA device that is planned for by its data sheet; None to plan for the device of the graph."""
    lowers: bool = True
    """True if Inductor's code decides in the end. False if the simulation alone decides."""
    may_repeat_collectives: bool = False
    """True if ranks that share the graph follow one plan, so that they can repeat an all-gather together."""
    sharded_inputs: frozenset[int] = frozenset()
    """Positions of the inputs that are parameters under ``fully_shard``: freed after the forward, back in the backward."""
    key: str = ""
    """Name of the record on disk; empty without generated code."""
    record: Record | None = None
    """The record of an earlier process."""
    reference: Reference | None = None
    """The reference peak by the code that Inductor generates alone; None if it is not known, or no budget is a share of it."""
    rates: Rates | None = None
    """The rates of the rank whose rates hold for all; None for those of the device here."""
    host_link: HostLink | None = None
    """The rates between device and host that hold for all ranks; None for those of the device here."""
    interconnects: Mapping[str, Interconnect] = field(default_factory=dict)
    """Measured rates of process groups, by name. The rates of other groups are assumed."""
    ranks: tuple[int, ...] = ()
    """The ranks that share the graph; empty for a process by itself."""
    told: Report | None = None
    """The report of another rank, or of an earlier process, whose plan is applied instead of a search."""
    told_by: str = ""
    """Whose report that is, in words."""
    searches: Searches = field(default_factory=Searches, compare=False)

    @property
    def decided_by_code(self) -> bool:
        """True if the peak of generated code decides on a plan."""
        return self.request.fuses and self.lowers
