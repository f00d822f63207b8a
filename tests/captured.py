"""What a compilation captured and planned, for tests that look at it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from autoremat.compiler import compile_loop
from autoremat.compiler.joint_graph import PricedGraph
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.options.options import Options
from autoremat.planner.plans.plan import Plan
from autoremat.tools.explain import previews
from autoremat.torch_private import inductor_lowering
from autoremat.torch_private.inductor_lowering import LoweredPeak


@dataclass
class Seen:
    """The plans of all graphs that were planned, in order."""

    plans: list[Plan] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        """The newest."""
        return self.plans[-1]

    def recomputed(self) -> list[tuple[str, str]]:
        """(module path, target) of each execution beyond the first."""
        ops = (self.plan.graph.ops[index] for index in self.plan.recomputed)
        return [(op.module, op.target) for op in ops]

    def saved(self) -> set[tuple[str, str]]:
        """(module path, target) of what makes the values that cross to the backward."""
        graph = self.plan.graph
        ops = (graph.ops[graph.values[v].producer] for v in self.plan.saved)
        return {(op.module, op.target) for op in ops}


@contextlib.contextmanager
def seen() -> Iterator[Seen]:
    """Collects the plans of what is compiled in the block."""
    found = Seen()
    original = compile_loop.plan_graph

    def plan_graph(priced: PricedGraph, extra_headroom_bytes: int = 0) -> PlannedGraph:
        planned = original(priced, extra_headroom_bytes)
        found.plans.append(planned.plan)
        return planned

    with mock.patch.object(compile_loop, "plan_graph", plan_graph):
        yield found


@contextlib.contextmanager
def generated() -> Iterator[list[tuple[str, LoweredPeak]]]:
    """Collects the code of each half that Inductor generates in the block, with its peak."""
    found: list[tuple[str, LoweredPeak]] = []
    original = inductor_lowering._lowered_peak

    def keep(lowering: Any, source: str, known: Any) -> LoweredPeak:
        found.append((source, original(lowering, source, known)))
        return found[-1][1]

    with mock.patch.object(inductor_lowering, "_lowered_peak", keep):
        yield found


def priced(function: Callable[..., Any], *inputs: Any, device: str | None = None, **options: Any) -> PricedGraph:
    """The graph of a step as the planner gets it, for uncompiled code by default."""
    given = Options(**{"compiler": "aot_eager", "on_planning_error": "raise", **options})
    (found,), _ = previews(function, inputs, {}, given, device, lambda priced: priced)
    return found


def planned(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Seen, Callable[..., Any]]:
    """The plans of ``function``, compiled for ``inputs`` and run once, and the compiled function; uncompiled by default."""
    torch._dynamo.reset()
    with seen() as found:
        compiled = torch.compile(function, backend="autoremat", options={"compiler": "aot_eager", **options})
        torch.manual_seed(0)
        compiled(*inputs)
    return found, compiled
