"""The adapter between AOTAutograd, which calls a partitioner, and a function of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autoremat.compiler.joint_graph import JointGraph
from autoremat.torch_private import joint_graphs

Partition = Callable[[JointGraph], joint_graphs.PartitionedModules]
"""Returns the forward and the backward of a joint graph."""


class Partitioner(joint_graphs.CustomPartitionerFn):
    """Hands the joint graphs of one compilation to ``partition``.

    ``identity`` stands for everything that the result depends on and that torch does not hash itself. None disables torch's
    caches.
    """

    def __init__(self, partition: Partition, identity: tuple[object, ...] | None = None) -> None:
        self.partition: Partition | None = partition
        self.identity = identity

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **keywords: Any) -> joint_graphs.PartitionedModules:
        assert self.partition is not None, "called after release"
        return self.partition(JointGraph(gm, joint_inputs, keywords))

    def release(self) -> None:
        """Drops ``partition``, and with it the plans: Inductor's compiled code keeps a reference to the partitioner."""
        self.partition = None

    # Torch copies, prints and hashes the configuration that contains this object. Only its identity matters there.

    def uuid(self) -> Any:
        """Returns the identity."""
        return self.identity

    def __getstate__(self) -> dict[str, Any]:
        return {"identity": self.identity, "partition": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self

    def __repr__(self) -> str:
        return f"Partitioner{self.identity}"
