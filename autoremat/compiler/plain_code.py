"""The peak of the code that Inductor generates without this package, for graphs whose simulated peak is rough.

On a CPU, Inductor copies images and weights of convolutions to channels last. Which of these copies it saves is not known
before. For such graphs the reference of a share is the peak of Inductor's own code, replayed as ours is. No kernel is compiled.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import fx

from autoremat.basics.errors import find_cause
from autoremat.basics.progress import now
from autoremat.compiler.joint_graph import JointGraph, PlanningContext, price_graph
from autoremat.compiler.lowering import EAGER_BACKWARD, GraphSource
from autoremat.compiler.partitioner import Partitioner
from autoremat.compiler.reference import MOST_OPS
from autoremat.compiler.replay_context import replay_context
from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.torch_private import compilers, dynamo, fake_tensors, inductor_lowering, joint_graphs

log = logging.getLogger("autoremat")


class _Known(Exception):
    """Ends a compilation once the peak of its code is known, or once it is clear that it will not be."""


def plain_code_peak(source: GraphSource, context: PlanningContext, device: torch.device) -> int | None:
    """Returns the peak in bytes of the code that Inductor generates for a graph without this package, with code headroom.

    Returns None unless the budget is a share of it and the simulated peak is rough, or if the code has no known peak.
    """
    is_share = context.request.limits.reference_share is not None and source.cuda_name is None
    if not is_share or not compilers.lays_channels_last(device.type) or not _has_convolution(source.module):
        return None
    now("generating code without a plan, for the reference peak")
    peaks: dict[bool, int] = {}
    partition = _AsTorchDoes(context)

    def observe(half: inductor_lowering.LoweredPeak) -> None:
        peaks[half.is_backward] = half.peak_bytes
        if len(peaks) == 2 or half.is_estimate:
            raise _Known

    module = dynamo.copied_with_sources(source.module)
    patches = {**source.patches, "custom_partitioner_fn": Partitioner(partition)}
    try:
        with inductor_lowering.without_kernels(), inductor_lowering.observe_lowering(lambda: partition.known, observe):
            compilers.compile_with_inductor(module, source.inputs, patches, EAGER_BACKWARD)
    except Exception as error:  # models and ops are open-ended, and the simulation takes the place of this figure
        if find_cause(error, _Known) is None:
            log.info("no code of Inductor's own to compare with", exc_info=error)
    return max(peaks.values()) if len(peaks) == 2 else None


def _has_convolution(module: fx.GraphModule) -> bool:
    return any("conv" in str(node.target) for node in module.graph.nodes if node.op in ("call_function", "call_module"))


class _AsTorchDoes:
    """Partitions joint graphs as torch does, and keeps the facts that the replay of the code needs."""

    def __init__(self, context: PlanningContext) -> None:
        self.context, self.known = context, ReplayContext()

    def __call__(self, joint: JointGraph) -> joint_graphs.PartitionedModules:
        """Returns the halves of ``joint``.

        Raises ``_Known`` if there is no backward, if the graph has many ops, or if memory beside its call counts.
        """
        if not joint.is_region:
            priced = price_graph(replace(joint, module=fake_tensors.copied_module(joint.module)), self.context)
            if priced is None or len(priced.graph.ops) > MOST_OPS:
                raise _Known
            if priced.graph.in_flight > 1 or priced.graph.resident_bytes:
                raise _Known
            self.known = replay_context(priced.captured, priced.kept_inputs)
        return joint_graphs.partition_as_torch_does(joint.module, joint.inputs, **joint.keywords)
