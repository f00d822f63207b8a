"""Signatures of calls, and real arguments for them.

Each distinct kernel is measured once, alone, on synthetic tensors.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from autoremat.torch_private import higher_order
from autoremat.torch_private.symbolic_sizes import size_hint

LONGEST_WAIT = 10.0
"""Seconds to wait for another process that writes its measurements."""

REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
"""Errors that ops raise for arguments that they reject. An out-of-memory error is a ``RuntimeError`` too."""


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape, strides = ([size_hint(x) for x in sizes] for sizes in (value.shape, value.stride()))
        bits = f"{'~' * value.is_conj()}{'-' * value.is_neg()}"  # views that an op conjugates or negates as it reads
        return f"{bits}{str(value.dtype).removeprefix('torch.')}{shape}{strides}@{value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, fx.GraphModule):
        return hashlib.sha256(_body_text(value).encode()).hexdigest()
    return str(size_hint(value)) if isinstance(value, torch.SymInt) else str(value)


def _body_text(body: fx.GraphModule) -> str:
    """Returns text that is equal for equal graphs on equal arguments."""
    held = (_described(node.meta.get("val")) for node in body.graph.nodes if node.op == "placeholder")
    inner = (_body_text(one) for node in body.graph.nodes for one in higher_order.bodies(node))
    return "\n".join([body.code, *held, *inner])


def arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the node's arguments, with the (fake) values of argument nodes, and graphs for nodes that hold one."""

    def held(x: Any) -> Any:
        if not isinstance(x, fx.Node):
            return x
        return higher_order.held_graph(x) or x.meta.get("val")

    args, kwargs = torch.utils._pytree.tree_map(held, (node.args, node.kwargs))
    return tuple(args), dict(kwargs)


def node_of_call(op: Any, args: Any, kwargs: Any) -> fx.Node:
    """Returns a node that calls ``op``, in a graph of its own whose inputs hold the tensors among the arguments."""
    graph = fx.Graph()

    def held(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("operand")
        node.meta["val"] = value
        return node

    return graph.call_function(op, *torch.utils._pytree.tree_map(held, (tuple(args), dict(kwargs))))


def signature(node: fx.Node) -> str:
    """Returns text that is equal for equal calls: op, shapes, strides, types, other arguments."""
    args, kwargs = arguments(node)
    named = (f"{name}={_described(value)}" for name, value in sorted(kwargs.items()))
    return f"{node.target}({', '.join([*map(_described, args), *named])})"


def real(value: Any) -> Any:
    """Returns a real value for a fake one, in the same layout: random floats, or zeros for integers, which may be indices.

    Raises ``ValueError`` for a symbolic value that has no known number.
    """
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, torch.Tensor):
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise ValueError(f"{value} has no known value")
        return value
    shape, strides = ([size_hint(x) for x in sizes] for sizes in (value.shape, value.stride()))
    # Fill the storage, not the tensor: two of the tensor's elements may share one address.
    length = 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if value.dtype.is_floating_point or value.dtype.is_complex:
        # Numbers from 0 to 1 are valid probabilities. A CUDA kernel that rejects other numbers makes the device unusable for
        # the process.
        storage = torch.rand(length, device=value.device).to(value.dtype)
    else:
        storage = torch.zeros(length, dtype=value.dtype, device=value.device)
    made = storage.as_strided(shape, strides)
    made = made.conj() if value.is_conj() else made
    return torch.ops.aten._neg_view(made) if value.is_neg() else made
