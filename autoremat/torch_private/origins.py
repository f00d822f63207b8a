"""Torch's private names for the origins of Inductor's buffers: the nodes of the graph whose kernels write them."""

from __future__ import annotations

from typing import Any

from torch import fx

OP = "autoremat_op"
"""Key of ``node.meta`` for the planner's op that a node is. Clones of the node and Inductor's graph keep it."""


class Origins:
    """The nodes of the graph that became the kernels of its code.

    Nodes that Inductor's own passes have created belong to no op.
    """

    def __init__(self, lowering: Any) -> None:
        self.lowering, self.place = lowering, {node: place for place, node in enumerate(lowering.module.graph.nodes)}

    def of(self, name: str) -> list[fx.Node]:
        """Returns the nodes whose kernel writes the buffer ``name``, in sequence, with operands that are computed there."""
        from torch._inductor import ir

        buffer = self.lowering.try_get_buffer(name)
        origins = buffer.origins if isinstance(buffer, ir.IRNode) else ()
        return sorted((node for node in origins if node in self.place), key=self.place.__getitem__)

    def workspace(self, name: str) -> int | None:
        """Returns the workspace of the node that became the extern kernel of a buffer; None if no op is known."""
        from torch._inductor import ir

        if not isinstance(self.lowering.try_get_buffer(name), ir.ExternKernel) or not (nodes := self.of(name)):
            return None
        op = nodes[-1].meta.get(OP)  # operands come before the node that reads them
        return None if op is None else op.workspace_bytes
