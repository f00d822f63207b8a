"""The stages of one attempt from *prepare* to *lower*: joint graphs are partitioned by plans, and Inductor generates code.

If a stage fails, torch's partitioner takes the graph. A decision on the peak of the code may end the compilation early.
"""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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
    find_cause,
    planning_error,
)
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.capture import source_info
from autoremat.compiler.attempts import Verdict
from autoremat.compiler.joint_graph import JointGraph, Partitioner, PricedGraph, price_graph, refused_setting
from autoremat.compiler.peers import Peers
from autoremat.compiler.planned_graph import PlannedGraph, replay_context
from autoremat.compiler.planning import SmallestGraph, plan_graph
from autoremat.compiler.problem import Problem
from autoremat.compiler.reference import Rehearsal
from autoremat.host_memory import ops
from autoremat.passes import apply_plan
from autoremat.planner.cost.datasheets import UNKNOWN_GPU, datasheet
from autoremat.planner.graph.op import Kind
from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.torch_private import compilers, dynamo, fake_tensors, inductor_lowering, joint_graphs, layouts, named_card
from autoremat.torch_private.inductor_lowering import OP, LoweredPeak
from autoremat.torch_private.symbolic_sizes import assumed_limits

log = logging.getLogger("autoremat")

Compiled = Callable[..., Any]
Halves = Mapping[bool, LoweredPeak]
"""The generated code of the forward (False) and of the backward (True)."""

P = TypeVar("P", bound=PlannedGraph | SmallestGraph)
T = TypeVar("T")


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
    rehearsal: Rehearsal | None = None
    """What finds the reference of the budget meanwhile."""
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
            known = None if self.rehearsal is None else self.rehearsal.take_priced(joint)
            priced = known or price_graph(joint, self.problem)
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
    context = replay_context(planned.priced)
    return modules, RewriteFacts(context, memory_first, stays, tuple(assumed.items()), (forward, backward))


def visited(problem: Problem, module: fx.GraphModule, inputs: Sequence[Any], visit: Callable[[PricedGraph], T]) -> T | None:
    """Traces a graph, and returns what ``visit`` returns for its priced joint graph; None without a backward.

    Nested compile regions, which the surrounding graph calls, are planned for the same ``problem``.
    """
    found: list[T] = []

    def hand_over(joint: JointGraph) -> joint_graphs.PartitionedModules:
        if joint.is_region:
            return Partitioning(problem, plan_graph)(joint)
        priced = price_graph(joint, problem)
        if priced is not None:
            found.append(visit(priced))
        raise fake_tensors.Stop

    fake_tensors.trace_joint(module, inputs, Partitioner(hand_over), problem.request.fuses, problem.patches)
    return found[0] if found else None


# -- code ------------------------------------------------------------------------------------------------------------------


def code_peaks(halves: Halves) -> dict[bool, int]:
    """Returns the peaks of ``halves``. CUDA graphs record both into one pool, which keeps the most bytes of either of them."""
    pool = max((half.pool_bytes or 0 for half in halves.values()), default=0)
    return {is_backward: half.peak_bytes + pool - (half.pool_bytes or 0) for is_backward, half in halves.items()}


def lower(
    problem: Problem,
    partitioning: Partitioning[PlannedGraph],
    identity: tuple[object, ...],
    decide: Callable[[Halves], Verdict | None],
) -> tuple[Compiled | None, Halves, Verdict | None]:
    """Returns the compiled callable and the halves with generated code; or None, the halves and the verdict that rejects them.

    Inductor compiles the graph, with ``partitioning`` under the name ``identity`` in torch's caches. After the code of each
    half, ``decide`` receives the halves so far. None lets Inductor continue.
    """
    halves: dict[bool, LoweredPeak] = {}

    def observe(half: LoweredPeak) -> None:
        halves[half.is_backward] = half
        verdict = decide(halves)
        if verdict is not None:
            raise fake_tensors.Stop(verdict)

    assert problem.module is not None
    module = dynamo.copied_with_sources(problem.module)  # Inductor takes ownership, so another attempt needs a fresh one
    partitioner = Partitioner(partitioning, identity)
    patches = {**problem.patches, "custom_partitioner_fn": partitioner}
    answers: AbstractContextManager[None] = contextlib.nullcontext()
    if problem.cuda_name is not None and not torch.cuda.is_available():  # code for a card that is not here
        answers = named_card.generating_for(datasheet(problem.cuda_name) or UNKNOWN_GPU, problem.cuda_name)
    try:
        with (
            inductor_lowering.sequenced(lambda: partitioning.facts.memory_first, lambda: partitioning.facts.pins_forward),
            inductor_lowering.kernels_corrected(patches),
            layouts.laid_out_as_planned((ops.copy_to_host, ops.wait_for_copy_to_host)),
            inductor_lowering.observe_lowering(lambda: partitioning.facts.replay_context, observe),
            answers,
        ):
            return compilers.compile_with_inductor(module, problem.inputs, patches, eager_backward=True), halves, None
    except Exception as error:
        rejected = find_cause(error, fake_tensors.Stop)
        if rejected is None:
            raise
        return None, halves, rejected.args[0]
    finally:
        partitioner.release()
