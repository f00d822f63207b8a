"""Takes the joint graphs of one attempt through the stages from *prepare* to *rewrite*, and falls back if a stage fails."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import fx

from autoremat.basics.errors import (
    AutorematError,
    BudgetInfeasible,
    BudgetWarning,
    ConstraintWarning,
    FallbackWarning,
    OptionsError,
    OptionWarning,
    PlanInvalid,
    fallback_message,
    planning_error,
)
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.capture import source_info
from autoremat.compiler.joint_graph import JointGraph, Partitioner, PricedGraph, price_graph, refused_setting
from autoremat.compiler.peers import Peers
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.compiler.planning import SmallestGraph, plan_graph
from autoremat.compiler.problem import Problem
from autoremat.compiler.replay_context import replay_context
from autoremat.passes import apply_plan
from autoremat.planner.graph.op import Kind
from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.torch_private import fake_tensors, joint_graphs
from autoremat.torch_private.inductor_lowering import OP
from autoremat.torch_private.symbolic_sizes import assumed_limits

log = logging.getLogger("autoremat")

P = TypeVar("P", bound=PlannedGraph | SmallestGraph)


@dataclass(frozen=True)
class RewriteFacts:
    """Facts about the halves of a planned graph that lowering needs."""

    replay_context: ReplayContext = field(default_factory=ReplayContext)
    """Facts that the replay of the generated code cannot read from the code."""
    memory_first: bool = False
    """True if Inductor must keep the backward's sequence of ops and free each buffer after its last use. The plan of least time
    needs neither, unless it stores tensors in other forms."""
    pins_forward: bool = False
    """True if Inductor must keep the forward's sequence of ops too, because the plan places the stores there."""
    assumed_sizes: tuple[tuple[int, int], ...] = ()
    """See :attr:`autoremat.Report.assumed_sizes`."""
    hashes: tuple[str, str] = ("", "")
    """Hashes of forward and backward. Equal halves have equal code."""


@dataclass
class Partitioning(Generic[P]):
    """Partitions the joint graphs of one attempt: nested compile regions first, then the graph around them.

    After the calls, the attributes describe the outermost graph. They keep their first values if a cache answered for the
    graph, or if it has no backward.
    """

    problem: Problem
    plan: Callable[[PricedGraph], P]
    peers: Peers = field(default_factory=Peers)
    planned: P | None = field(default=None, init=False)
    facts: RewriteFacts = field(default_factory=RewriteFacts, init=False)
    fell_back: bool = field(default=False, init=False)
    """True if planning failed and torch's partitioner takes a graph (fallback)."""

    def __call__(self, joint: JointGraph) -> joint_graphs.PartitionedModules:
        """Returns the forward and the backward of ``joint`` by its plan; those of torch's partitioner without a plan.

        Raises ``BudgetInfeasible`` if no plan fits, and ``PlanningError`` if a stage fails and no fallback is allowed.
        """
        untouched = fake_tensors.shallow_copy(joint.module.graph)
        request = self.problem.request
        try:
            priced = price_graph(joint, self.problem)
            if priced is not None:
                self.planned = self.plan(self.peers.compare(priced))
                self.peers.note(priced, self.planned)
                modules, self.facts = rewrite(self.planned)
                return modules
        except (BudgetInfeasible, OptionsError, ConstraintWarning, BudgetWarning, OptionWarning):
            raise
        except Exception as error:  # models and ops are open-ended, so any error may occur; the graph shall train all the same
            if isinstance(error, AutorematError) and not request.falls_back:
                raise
            if not request.falls_back:
                raise planning_error(error, source_info.place_of(untouched)) from error
            self.peers.fail(error)
            joint.module.graph = untouched
            self.fell_back, self.planned = True, None
            log.info("planning failed", exc_info=error)
            warn_user(fallback_message(error, source_info.place_of(untouched)), FallbackWarning)
        return joint_graphs.partition_as_torch_does(joint.module, joint.inputs, **joint.keywords)


def rewrite(planned: PlannedGraph | SmallestGraph) -> tuple[joint_graphs.PartitionedModules, RewriteFacts]:
    """Returns the forward and the backward of the plan, and facts about them. Consumes the joint graph of ``planned``."""
    now("writing forward and backward")
    captured, plan, joint = planned.priced.captured, planned.plan, planned.priced.joint
    stays = bool(plan.schedule.stays)
    if stays and (setting := refused_setting(captured)):
        raise PlanInvalid(
            f"the plan keeps saved tensors in other forms than as they are on the device, which does not go together with "
            f"{setting}. Compile without that setting, or without `host_memory` and `store`"
        )
    for node, op in zip(captured.op_nodes, captured.graph.ops, strict=True):
        node.meta[OP] = op
    modules = apply_plan(captured, plan.schedule, joint.static_inputs)
    repeats_extern = any(plan.graph.ops[index].kind is Kind.EXTERN for index in plan.recomputed)
    returned = torch.utils._pytree.arg_tree_leaves(*modules[0].graph.output_node().args)
    saved = returned[joint.num_forward_outputs :]
    assumed = assumed_limits(node.meta.get("val") for node in saved if isinstance(node, fx.Node))
    memory_first = planned.is_binding or repeats_extern or stays
    forward, backward = (hashlib.sha256(f"{memory_first} {half.graph}".encode()).hexdigest() for half in modules)
    context = replay_context(captured, planned.priced.kept_inputs)
    return modules, RewriteFacts(context, memory_first, stays, tuple(assumed.items()), (forward, backward))


class _EndOfTracing(Exception):
    """Ends the tracing of a graph after its joint graph has been visited."""


@contextlib.contextmanager
def tracing_to(visit: Callable[[PricedGraph], object], problem: Problem) -> Iterator[Partitioner]:
    """Gives the body a partitioner to trace a graph with. The body ends when ``visit`` has received the priced joint graph.

    A graph without a backward is not visited. Nested compile regions, which the surrounding graph calls, are planned for the
    same ``problem``.
    """

    def hand_over(joint: JointGraph) -> joint_graphs.PartitionedModules:
        if joint.is_region:
            return Partitioning(problem, plan_graph)(joint)
        priced = price_graph(joint, problem)
        if priced is not None:
            visit(priced)
        raise _EndOfTracing

    with contextlib.suppress(_EndOfTracing):
        yield Partitioner(hand_over)
