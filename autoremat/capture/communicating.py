"""Whether a graph of Dynamo's communicates with other ranks."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoremat.ops.op_traits import COLLECTIVE_NAMESPACES


def may_communicate(gm: fx.GraphModule) -> bool:
    """Returns True if the graph, or one inside of it, has a collective or a tensor subclass, which may bring collectives.

    Collectives of hooks, as those of DistributedDataParallel, lie outside of the graph.
    """
    bodies = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return any(_is_collective(node.target) or _is_subclass(node) for graph in bodies for node in graph.nodes)


def _is_collective(target: Any) -> bool:
    namespace = getattr(target, "namespace", None) or str(getattr(target, "_qualified_op_name", "")).partition("::")[0]
    return namespace in COLLECTIVE_NAMESPACES or str(getattr(target, "__module__", "")).startswith("torch.distributed")


def _is_subclass(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    values = value if isinstance(value, list | tuple) else (value,)
    return any(is_traceable_wrapper_subclass(one) for one in values)
