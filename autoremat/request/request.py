"""The request: everything beside a graph that decides its plan."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from itertools import chain

from autoremat.basics.stable import stable
from autoremat.options.options import Options
from autoremat.planner.constraints import policies
from autoremat.planner.constraints.constraints import SavePattern
from autoremat.planner.constraints.policies import Policy
from autoremat.planner.graph.forms import BITS, DEVICE, HOST
from autoremat.planner.multigraph.open_calls import OpenCalls
from autoremat.planner.plans.plan_file import PlanFile
from autoremat.request.limits import Limits

TAKEN_OVER = (
    "compiler", "time_limit", "cost_model", "interconnect_bandwidth", "interconnect_latency", "plan", "policy", "save",
    "recompute", "store", "chunk_loss", "tiles", "agreement", "inductor", "mode",
)  # fmt: skip
"""Names of the options that are part of a request as they are."""


@dataclass(frozen=True)
class Request:
    """What is asked of one graph. Fields without a docstring have the meaning of the option of their name."""

    limits: Limits = field(default_factory=Limits)
    calls: OpenCalls = field(default_factory=OpenCalls)
    """The calls of the graph that are open at once."""
    is_part: bool = False
    """True if the graph is one of several of a broken function, which keep a share together."""
    on_infeasible: str = "raise"
    on_planning_error: str = "fallback"
    compiler: str = "inductor"
    time_limit: float = 10.0
    cost_model: str = "roofline"
    interconnect_bandwidth: float | None = None
    interconnect_latency: float | None = None
    plan: tuple[PlanFile, ...] | None = None
    policy: Policy | str | None = None
    save: tuple[SavePattern, ...] = ()
    recompute: tuple[str, ...] = ()
    store: tuple[str, ...] | None = None
    chunk_loss: bool | int | str = "auto"
    tiles: bool | int | str = False
    agreement: str | tuple[int, ...] = field(default="auto", compare=False)
    inductor: tuple[tuple[str, object], ...] = ()
    mode: str | None = None

    @classmethod
    def of(cls, options: Options, limits: Limits, calls: OpenCalls | None = None, is_part: bool = False) -> Request:
        """Returns the request of ``options`` under ``limits``. Without ``calls``, the options tell the open calls."""
        return cls(
            limits=limits,
            calls=options.open_calls if calls is None else calls,
            is_part=is_part,
            on_infeasible=options.on_infeasible or ("raise" if limits.reference_share is None else "best_effort"),
            on_planning_error=options.on_planning_error or ("raise" if limits.bounds_memory else "fallback"),
            **{name: getattr(options, name) for name in TAKEN_OVER},
        )

    @property
    def forms(self) -> frozenset[str]:
        """The names of the forms that saved tensors may have beside the device."""
        if self.limits.host_bytes is None:
            return frozenset(self.store or ()) - {DEVICE, HOST}
        return frozenset(self.store or (HOST, BITS)) - {DEVICE}

    @property
    def fuses(self) -> bool:
        """True if Inductor compiles the graph."""
        return self.compiler == "inductor"

    @property
    def must_fit(self) -> bool:
        """True: raise an error if no plan fits. False: take the plan with the minimum peak.

        A part takes it because the graphs that follow are unknown, and a small one may have nothing to recompute. The step is
        judged as a whole when it runs.
        """
        return self.on_infeasible == "raise" and not self.is_part

    @property
    def falls_back(self) -> bool:
        """True if torch partitions a graph that cannot be planned. If False, such a graph is an error."""
        return self.on_planning_error == "fallback"

    def cache_key(self) -> str:
        """Returns text that is equal, in every process, for requests that lead to the same plan of the same graph."""
        both = ((self, one) for one in fields(self)), ((self.limits, one) for one in fields(Limits))
        parts = {one.name: getattr(owner, one.name) for owner, one in chain(*both) if one.compare and one.name != "limits"}
        parts["inductor"] = dict(self.inductor)
        parts["policy"] = policies.identity(policies.parse(self.policy))
        return json.dumps(stable(parts), sort_keys=True)
