"""The hash by which a graph is known again in another compilation. It covers only the computation of the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoremat.torch_private import symbolic_sizes


def graph_key(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Returns a hash of the graph's ops and of the sizes, types and devices of its inputs.

    Names and source lines are left out, because they depend on the function around the graph.
    """
    numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        target = "" if node.op in ("placeholder", "output", "get_attr") else _name(node.target)
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        lines.append(f"{node.op} {target} {arguments if node.op != 'placeholder' else ''}")
    lines += map(_sizes_and_type, inputs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _name(target: Any) -> str:
    return target if isinstance(target, str) else f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _sizes_and_type(value: Any) -> str:
    """Returns the properties of an input that the plans of its graph depend on, as text."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    hints = [symbolic_sizes.size_hint(size) for size in value.shape]
    return f"{hints} {value.dtype} {value.device} {value.requires_grad}"
