"""The reference peak of a share under Inductor: the peak of the code that Inductor generates without this package.

Only that code tells what Inductor needs: it moves kernels, saves copies in other layouts, and merges what the simulator keeps
apart. The code is replayed as ours is. No kernel is compiled, which is what takes most of the time of a compilation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autoremat.basics.errors import BudgetWarning, find_cause, is_user_error
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.compiler.cache_key import fingerprint
from autoremat.compiler.counting import code_unsplit_bytes
from autoremat.compiler.joint_graph import JointGraph, PlanningContext, PricedGraph, Reference, price_graph
from autoremat.compiler.lowering import EAGER_BACKWARD, GraphSource
from autoremat.compiler.partitioner import Partitioner
from autoremat.compiler.reference import CODE
from autoremat.compiler.replay_context import replay_context
from autoremat.planner.memory.wrapper_replay import INPUT_PREFIXES, ReplayContext
from autoremat.request.limits import Limits
from autoremat.torch_private import compilers, dynamo, fake_tensors, inductor_lowering, joint_graphs, tensor_identity
from autoremat.torch_private.symbolic_sizes import size_hint

log = logging.getLogger("autoremat")

MOST_KNOWN = 64
"""Number of graphs whose reference peak this process remembers, for other shares and for previews of the same graph."""

_known: dict[str, Reference | None] = {}


class _Known(Exception):
    """Ends a compilation once the code of both halves is known, or once it is clear that there is no backward."""


def reference_by_code(source: GraphSource, context: PlanningContext) -> Reference | None:
    """Returns the reference peak by the code that Inductor generates for a graph without this package.

    Returns None unless the budget is a share of it and Inductor compiles the graph for a device that is here, and for a graph
    without a backward. Warns with ``BudgetWarning`` if Inductor fails: the simulation takes the place of the code then.
    """
    request = context.request
    if request.limits.reference_share is None or not request.fuses or source.cuda_name is not None:
        return None
    key = fingerprint(source.module, source.inputs, replace(request, limits=Limits()), context.may_repeat_collectives)
    if key not in _known:
        now("generating code without a plan, for the reference peak")
        while len(_known) >= MOST_KNOWN:
            del _known[next(iter(_known))]
        _known[key] = _generated(source, context)
    return _known[key]


def _generated(source: GraphSource, context: PlanningContext) -> Reference | None:
    halves: dict[bool, inductor_lowering.LoweredPeak] = {}
    partition = _AsTorchDoes(context)

    def observe(half: inductor_lowering.LoweredPeak) -> None:
        halves[half.is_backward] = half
        if len(halves) == 2:
            raise _Known

    module = dynamo.copied_with_sources(source.module)
    patches = {**source.patches, "custom_partitioner_fn": Partitioner(partition)}
    try:
        with inductor_lowering.without_kernels(), inductor_lowering.observe_lowering(lambda: partition.replayed, observe):
            compilers.compile_with_inductor(module, source.inputs, patches, EAGER_BACKWARD)
    except Exception as error:  # models and ops are open-ended, and the simulation takes the place of this figure
        if find_cause(error, _Known) is None:
            if is_user_error(error) or dynamo.asks_to_restart(error):
                raise
            log.info("no code of Inductor's own", exc_info=error)
            warn_user(
                "memory_budget is a share of a simulated peak, which can differ from what Inductor needs by a third: its code "
                f"without autoremat could not be generated ({type(error).__name__}: {error}). Give the budget in bytes",
                BudgetWarning,
            )
    if partition.priced is None or len(halves) < 2:
        return None
    return partition.reference(halves)


@dataclass
class _AsTorchDoes:
    """Partitions joint graphs as torch does, and keeps the facts that the replay of the code needs."""

    context: PlanningContext
    priced: PricedGraph | None = None
    replayed: ReplayContext = field(default_factory=ReplayContext)
    saved: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage that the forward saves for the backward."""
    returned: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage that the forward returns."""

    def __call__(self, joint: JointGraph) -> joint_graphs.PartitionedModules:
        """Returns the halves of ``joint``. Raises ``_Known`` if there is no backward."""
        if joint.is_region:
            return joint_graphs.partition_as_torch_does(joint.module, joint.inputs, **joint.keywords)
        copied = replace(joint, module=fake_tensors.copied_module(joint.module))
        self.priced = price_graph(copied, self.context)
        if self.priced is None:
            raise _Known
        forward, backward = joint_graphs.partition_as_torch_does(joint.module, joint.inputs, **joint.keywords)
        aliases = self._note_outputs(forward, joint.num_forward_outputs)
        self.replayed = replace(replay_context(self.priced.captured, self.priced.kept_inputs), aliases=aliases)
        return forward, backward

    def _note_outputs(self, forward: fx.GraphModule, returned: int) -> dict[str, str]:
        """Notes the storages that the forward saves and returns. Returns the aliases among what it saves, and of its inputs.

        The first ``returned`` outputs are the function's.
        """
        names = {_storage_of(node)[0]: node.name for node in forward.graph.find_nodes(op="placeholder")}
        outputs, aliases = torch.utils._pytree.arg_tree_leaves(*forward.graph.output_node().args), dict[str, str]()
        for number, node in enumerate(outputs):
            if not isinstance(node, fx.Node) or node.op == "placeholder":
                continue
            key, size = _storage_of(node)
            if not key:
                continue
            if names.setdefault(key, node.name) != node.name:
                aliases[node.name] = names[key]
            if not names[key].startswith(INPUT_PREFIXES):
                (self.returned if number < returned else self.saved)[key] = size
        return aliases

    def reference(self, halves: dict[bool, inductor_lowering.LoweredPeak]) -> Reference:
        """Returns the reference peak of a step with this code for both halves, in the bytes that the budget counts."""
        assert self.priced is not None
        graph = self.priced.graph
        held = [*({**self.saved, **self.returned}.values())]
        beside = [*((graph.calls.in_flight - 1) * held), graph.calls.resident_bytes]
        size = max(half.peak_bytes for half in halves.values()) + sum(beside)
        allocations = {is_backward: half.allocations for is_backward, half in halves.items()}
        known = {is_backward: one for is_backward, one in allocations.items() if one is not None}
        if self.priced.captured.runs_on == "cuda" and len(known) == 2:
            size += code_unsplit_bytes(known, beside)
        return Reference(size, CODE, sum(self.saved.values()))


def _storage_of(node: fx.Node) -> tuple[int, int]:
    """Returns the identity and the bytes of the storage of a node's result; those of an empty one for other results."""
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return 0, 0
    key = tensor_identity.storage_key(tensor)
    return (0, 0) if key is None else (key, size_hint(tensor.untyped_storage().nbytes()))
