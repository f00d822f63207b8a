"""What a compilation captured and planned, for tests that look at it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from autoremat.compiler import partitioner
from autoremat.planner.plans.plan import Plan


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
    original = partitioner.Partitioner.choose

    def choose(self: partitioner.Partitioner, *arguments: Any) -> Plan:
        found.plans.append(original(self, *arguments))
        return found.plans[-1]

    partitioner.Partitioner.choose = choose  # type: ignore[method-assign]
    try:
        yield found
    finally:
        partitioner.Partitioner.choose = original  # type: ignore[method-assign]


def planned(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Seen, Callable[..., Any]]:
    """The plans of ``function``, compiled for ``inputs`` and run once, and the compiled function; uncompiled graphs unless
    ``options`` say otherwise."""
    torch._dynamo.reset()
    with seen() as found:
        compiled = torch.compile(function, backend="autoremat", options={"compiler": "aot_eager", **options})
        torch.manual_seed(0)
        compiled(*inputs)
    return found, compiled
