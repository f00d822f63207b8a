"""Creates nodes next to existing ones, with fake results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

OF_THE_VALUE = ("val", "tensor_meta", "eager_input_vals")
"""Keys of ``node.meta`` that describe a node's own result or operands."""


@dataclass(frozen=True)
class Builder:
    """Inserts nodes at the insertion point of ``graph``. ``fake_mode`` is the mode of the fake results in ``node.meta``."""

    graph: fx.Graph
    fake_mode: Any

    @classmethod
    def beside(cls, node: fx.Node) -> Builder:
        """Returns a builder for the graph of ``node``, whose result is a fake tensor."""
        return cls(node.graph, node.meta["val"].fake_mode)

    def make(
        self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, suffix: str = "part"
    ) -> fx.Node:
        """Returns a new call with the metadata of ``like`` that describe its origin, named by ``like`` and ``suffix``.

        If ``target`` is a view and the operand's strides do not allow it, the call views a contiguous copy.
        """
        values, keywords = fx.map_arg(args, _value), fx.map_arg(kwargs or {}, _value)
        with self.fake_mode, torch.no_grad():
            try:
                value = target(*values, **keywords)
            except (RuntimeError, ValueError):
                if target is not aten.view.default:
                    raise
                whole = self.make(like, aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format})
                return self.make(like, target, (whole, *args[1:]))
        node = self.graph.call_function(target, args, kwargs or {}, name=f"{like.name}_{suffix}")
        node.meta = {key: known for key, known in like.meta.items() if key not in OF_THE_VALUE} | {"val": value}
        return node


def _value(node: fx.Node) -> Any:
    return node.meta["val"]
