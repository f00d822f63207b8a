"""Takes the joint graphs of one attempt through the stages from *prepare* to *rewrite*, and falls back if a stage fails."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from autoremat.basics.errors import (
    AutorematError,
    BudgetInfeasible,
    BudgetWarning,
    ConstraintWarning,
    FallbackWarning,
    OptionsError,
    OptionWarning,
    fallback_message,
    planning_error,
)
from autoremat.basics.warn import warn_user
from autoremat.capture import source_info
from autoremat.compiler.joint_graph import JointGraph, PlanningContext, PricedGraph, price_graph
from autoremat.compiler.partitioner import Partitioner
from autoremat.compiler.planning import PlannedGraph, plan_graph
from autoremat.compiler.rewriting import rewrite
from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.torch_private import fake_tensors, joint_graphs

log = logging.getLogger("autoremat")


P = TypeVar("P", bound=PlannedGraph)


@dataclass
class Partitioning(Generic[P]):
    """Partitions the joint graphs of one attempt: nested compile regions first, then the graph around them.

    After the calls, the attributes describe the outermost graph. They keep their first values if a cache answered for the
    graph, or if it has no backward.
    """

    context: PlanningContext
    plan: Callable[[PricedGraph, PlanningContext], P]
    report_failure: Callable[[Exception], None] = lambda error: None
    """Tells the ranks that share the graph about an error after which this one falls back."""
    planned: P | None = field(default=None, init=False)
    replay_context: ReplayContext = field(default_factory=ReplayContext, init=False)
    memory_first: bool = field(default=False, init=False)
    pins_forward: bool = field(default=False, init=False)
    assumed_sizes: tuple[tuple[int, int], ...] = field(default=(), init=False)
    fell_back: bool = field(default=False, init=False)
    """True if planning failed and torch's partitioner takes a graph (fallback)."""

    def __call__(self, joint: JointGraph) -> joint_graphs.PartitionedModules:
        """Returns the forward and the backward of ``joint`` by its plan; those of torch's partitioner without a plan.

        Raises ``BudgetInfeasible`` if no plan fits, and ``PlanningError`` if a stage fails and no fallback is allowed.
        """
        untouched = fake_tensors.shallow_copy(joint.module.graph)
        request = self.context.request
        try:
            priced = price_graph(joint, self.context)
            if priced is not None:
                return self.plan_and_rewrite(priced)
        except (BudgetInfeasible, OptionsError, ConstraintWarning, BudgetWarning, OptionWarning):
            raise
        except Exception as error:  # models and ops are open-ended, so any error may occur; the graph shall train all the same
            if isinstance(error, AutorematError) and not request.falls_back:
                raise
            if not request.falls_back:
                raise planning_error(error, source_info.place_of(untouched)) from error
            self.report_failure(error)
            joint.module.graph = untouched
            self.fell_back, self.planned = True, None
            log.info("planning failed", exc_info=error)
            warn_user(fallback_message(error, source_info.place_of(untouched)), FallbackWarning)
        return joint_graphs.partition_as_torch_does(joint.module, joint.inputs, **joint.keywords)

    def plan_and_rewrite(self, priced: PricedGraph) -> joint_graphs.PartitionedModules:
        """Returns the halves of the plan, and keeps the plan for the later stages."""
        self.planned = self.plan(priced, self.context)
        rewritten = rewrite(self.planned)
        self.replay_context = rewritten.replay_context
        self.memory_first, self.pins_forward = rewritten.memory_first, rewritten.pins_forward
        self.assumed_sizes = rewritten.assumed_sizes
        return rewritten.modules


class _EndOfTracing(Exception):
    """Ends the tracing of a graph after its joint graph has been visited."""


@contextlib.contextmanager
def tracing_to(visit: Callable[[PricedGraph], object], context: PlanningContext) -> Iterator[Partitioner]:
    """Gives the body a partitioner to trace a graph with. The body ends when ``visit`` has received the priced joint graph.

    A graph without a backward is not visited. Nested compile regions, which the surrounding graph calls, are planned under
    ``context``.
    """

    def hand_over(joint: JointGraph) -> joint_graphs.PartitionedModules:
        if joint.is_region:
            return Partitioning(context, plan_graph)(joint)
        priced = price_graph(joint, context)
        if priced is not None:
            visit(priced)
        raise _EndOfTracing

    with contextlib.suppress(_EndOfTracing):
        yield Partitioner(hand_over)
