"""The buffers of code that Inductor generates: their bytes, their origins in the graph, and which of them a half receives."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoremat.planner.memory.wrapper_replay import ReplayContext
from autoremat.torch_private.symbolic_sizes import most_of_expression


def layout_bytes(buffer: Any, device_type: str = "cpu") -> int:
    """Returns the bytes of an Inductor buffer; 0 for a buffer that stands for several results or for none.

    A buffer on the host has none if the memory of another device counts.
    """
    from torch._inductor.virtualized import V

    layout = _layout(buffer)
    if layout is None or layout.device.type == "cpu" != device_type:
        return 0
    return most_of_expression(layout.storage_size(), V.graph.sizevars) * int(layout.dtype.itemsize)


def _layout(buffer: Any) -> Any | None:
    """Returns the layout of an Inductor buffer; None for a buffer that stands for several results, and for other objects."""
    from torch._inductor import ir

    try:
        layout = buffer.get_layout() if isinstance(buffer, ir.IRNode) else None
    except NotImplementedError:
        return None
    return layout if isinstance(layout, ir.Layout) else None


def results(buffer: Any) -> list[str]:
    """Returns the names of the buffers that hold the results of the call that ``buffer`` stands for.

    Results that are views of the call's operands have no memory of their own, and are left out.
    """
    from torch._inductor import ir

    if not isinstance(buffer, ir.ExternKernel) or buffer.get_inputs_that_alias_output():
        return []
    found = torch.utils._pytree.tree_leaves(getattr(buffer, "outputs", ()))
    return [result.get_name() for result in found if type(result) is ir.MultiOutput]


def _strides(buffer: Any) -> tuple[object, ...]:
    """Returns the strides of the dimensions that are longer than 1; an empty tuple for objects that are not tensors."""
    layout = _layout(buffer)
    return () if layout is None else tuple(step for size, step in zip(layout.size, layout.stride, strict=True) if size != 1)


def received(lowering: Any, known: ReplayContext, source: str = "") -> tuple[dict[str, int], set[str]]:
    """Returns the bytes of the tensors that a backward receives, by name, and the names of those that it cannot free.

    A forward receives none that count. Of tensors that share memory, the one that the code in ``source`` frees
    last has it.
    """
    if not lowering.is_backward:
        return {}, set()
    counted = {
        name: layout_bytes(buffer, known.device_type)
        for name, buffer in lowering.graph_inputs.items()
        if not known.is_input(name, _strides(buffer))
    }
    together: dict[str, list[str]] = {}
    for name in counted:
        together.setdefault(known.aliases.get(name, name), []).append(name)
    for names_of_one in together.values():
        *earlier, last = sorted(names_of_one, key=lambda name: source.rfind(f"del {name}\n") % (len(source) + 1))
        counted |= {last: max(counted[name] for name in names_of_one), **dict.fromkeys(earlier, 0)}
    return counted, {name for name in counted if name in known.held or name.startswith("tangents")}


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
