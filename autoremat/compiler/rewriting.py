"""The stage that rewrites: from a planned graph to its forward and backward, and to the facts that lowering needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.basics.progress import now
from autoremat.compiler.forms import refused_setting
from autoremat.compiler.planning import PlannedGraph
from autoremat.compiler.replay_context import replay_context
from autoremat.passes import apply_plan
from autoremat.planner.graph.op import Kind
from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.torch_private import joint_graphs
from autoremat.torch_private.code_buffers import OP
from autoremat.torch_private.symbolic_sizes import assumed_limits


@dataclass(frozen=True)
class RewrittenGraph:
    """The halves of a planned graph as modules."""

    modules: joint_graphs.PartitionedModules
    """The forward and the backward."""
    replay_context: ReplayContext
    """Facts that the replay of the generated code cannot read from the code."""
    memory_first: bool
    """True if Inductor must keep the backward's sequence of ops and free each buffer after its last use. The plan of least time
    needs neither, unless it stores tensors in other forms."""
    pins_forward: bool = False
    """True if Inductor must keep the forward's sequence of ops too, because the plan places the stores there."""
    assumed_sizes: tuple[tuple[int, int], ...] = ()
    """See :attr:`autoremat.Report.assumed_sizes`."""


def rewrite(planned: PlannedGraph) -> RewrittenGraph:
    """Returns the forward and the backward of the plan. Consumes the joint graph of ``planned``."""
    now("writing forward and backward")
    captured, plan = planned.priced.captured, planned.plan
    if plan.schedule.stays and (setting := refused_setting(captured)):
        raise PlanInvalid(
            f"the plan keeps saved tensors in other forms than as they are on the device, which does not go together with "
            f"{setting}. Compile without that setting, or without `host_memory` and `store`"
        )
    for node, op in zip(captured.op_nodes, captured.graph.ops, strict=True):
        node.meta[OP] = op
    modules = apply_plan(captured, plan.schedule, planned.priced.joint.static_inputs)
    repeats_extern = any(plan.graph.ops[index].kind is Kind.EXTERN for index in plan.recomputed)
    memory_first = planned.is_binding or repeats_extern or bool(plan.schedule.stays)
    context = replay_context(captured, planned.priced.kept_inputs)
    returned = torch.utils._pytree.arg_tree_leaves(*modules[0].graph.output_node().args)
    saved = returned[planned.priced.joint.num_forward_outputs :]
    assumed = assumed_limits(node.meta.get("val") for node in saved if isinstance(node, fx.Node))
    return RewrittenGraph(modules, context, memory_first, bool(plan.schedule.stays), tuple(assumed.items()))
