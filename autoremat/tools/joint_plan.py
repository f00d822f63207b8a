"""The core as a library: plans AOTAutograd's joint graph, and splits it into forward and backward by the plan.

A *joint graph* computes outputs and gradients from the inputs of a function (*primals*) and the gradients of its outputs
(*tangents*). AOTAutograd hands it to a partitioner: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import CaptureError, OptionsError
from autoremat.compiler.joint_graph import JointGraph, Partitioner, price_graph
from autoremat.compiler.lowering import Partitioning, rewrite
from autoremat.compiler.planned_graph import PlannedGraph
from autoremat.compiler.planning import plan_graph
from autoremat.compiler.problem import Problem, source_hash
from autoremat.options.options import Options
from autoremat.planner.plans.plan import Plan
from autoremat.report.report import Report
from autoremat.request.budgets import refuse_step_profiles, request_of
from autoremat.request.request import Request
from autoremat.request.surroundings import Surroundings
from autoremat.torch_private import compilers, fake_tensors, joint_graphs


@dataclass(frozen=True)
class JointPlan:
    """A joint graph with the plan that splits it."""

    graph: PlannedGraph

    @property
    def plan(self) -> Plan:
        """The schedule of forward and backward. Bytes are peaks above what was live before the step."""
        return self.graph.plan

    @property
    def report(self) -> Report:
        """The plan in figures, as :func:`autoremat.explain` returns them."""
        return self.graph.report


def plan_joint(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> JointPlan:
    """Returns the cheapest plan of ``joint`` within a memory budget. The module itself stays as it is.

    Arguments:

    - ``joint``: a joint graph of AOTAutograd. Placeholders are the primals, then the tangents. Outputs are those of the
      function, then one gradient or None per primal. Nodes have fake tensors in ``meta["val"]``.
    - ``joint_inputs``: the values of the placeholders: a pair of primals and tangents, as AOTAutograd passes them.
    - ``num_fwd_outputs``: the number of outputs of the function.
    - ``static_lifetime_input_indices``: positions of parameters and buffers among the primals.
    - ``options``: those of ``torch.compile``. ``memory_budget`` is a number of bytes, or a share of the peak of torch's own
      partition, by simulation. ``compiler`` says what runs the halves: "inductor", or "aot_eager" for op by op.

    Raises ``BudgetInfeasible`` if no plan fits, ``OptionsError`` for options that need a running step, and ``CaptureError`` for
    a graph without a backward.
    """
    copied = fake_tensors.copied_module(joint)
    keywords = {"num_fwd_outputs": num_fwd_outputs, "static_lifetime_input_indices": list(static_lifetime_input_indices)}
    problem = Problem(_request(options), lowers=False)
    priced = price_graph(JointGraph(copied, joint_inputs, keywords), problem)
    if priced is None:
        raise CaptureError("the joint graph has no backward, so there is nothing to plan: pass the graph of a step that trains")
    return JointPlan(plan_graph(priced))


def apply_plan(planned: JointPlan) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the forward and the backward of a plan, as torch's partitioner returns them. A plan is applied once.

    The forward takes the primals, and returns the outputs and the saved tensors. The backward takes the saved tensors and the
    tangents, and returns one gradient or None per primal.
    """
    return rewrite(planned.graph)[0]


def partitioner(options: Mapping[str, Any] | None = None) -> Partitioner:
    """Returns a partitioner for AOTAutograd (``partition_fn``) and for Inductor (``custom_partitioner_fn``).

    It plans each joint graph with :func:`plan_joint` and splits it with :func:`apply_plan`. The budget bounds the simulated
    peak: only ``torch.compile(backend="autoremat")`` looks at the code and plans again. Nested compile regions and graphs
    that cannot be planned are partitioned as ``options`` say.
    """
    request = _request(options)

    def partition(joint: JointGraph) -> joint_graphs.PartitionedModules:
        return Partitioning(Problem(request, lowers=False), plan_graph)(joint)

    return Partitioner(partition, ("autoremat", source_hash(), request.cache_key()))


def _request(options: Mapping[str, Any] | None) -> Request:
    parsed = Options.parse(options, None, compilers.inductor_config_names)
    refuse_step_profiles(parsed)
    if not isinstance(parsed.memory_budget, int | float | None):
        raise OptionsError(f"memory_budget={parsed.memory_budget!r} needs a step that runs. Accepted here: bytes or a share")
    return request_of(parsed, Surroundings(torch.device("cpu"), runs_here=False))
