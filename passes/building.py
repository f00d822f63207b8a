"""Creates nodes next to existing ones, with fake results."""

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

OF_THE_VALUE = ("val", "tensor_meta", "eager_input_vals")
"""Keys of ``node.meta`` that describe a node's own result or operands."""


def make(
    like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, suffix: str = "part"
) -> fx.Node:
    """Returns a new call at the insertion point, with the metadata of ``like`` that describe its origin, named by both names.

    If ``target`` is a view and the operand's strides do not allow it, the call views a contiguous copy.
    """
    values, keywords = fx.map_arg((args, kwargs or {}), lambda node: node.meta["val"])
    mode = next(one.fake_mode for one in tree_leaves((like.meta.get("val"), values)) if hasattr(one, "fake_mode"))
    with mode, torch.no_grad():
        try:
            value = target(*values, **keywords)
        except (RuntimeError, ValueError):
            if target is not torch.ops.aten.view.default:
                raise
            whole = make(like, torch.ops.aten.clone.default, (args[0],), {"memory_format": torch.contiguous_format})
            return make(like, target, (whole, *args[1:]))
    node = like.graph.call_function(target, args, kwargs or {}, name=f"{like.name}_{suffix}")
    node.meta = {key: known for key, known in like.meta.items() if key not in OF_THE_VALUE} | {"val": value}
    return node
