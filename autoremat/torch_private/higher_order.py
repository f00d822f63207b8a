"""Torch's private names for higher-order ops: their names, their bodies, and the ops or kernels that they wrap.

This module decides nothing about plans.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

RUNS_BODIES = frozenset(
    {
        "cond", "while_loop", "scan", "associative_scan", "map_impl", "invoke_subgraph", "flex_attention",
        "flex_attention_backward",
    }
)  # fmt: skip
"""Names of higher-order ops whose only work is that of their bodies."""

LOOPED_OVER = {"scan": 2, "map_impl": 1}
"""Loops, with the position of the argument along whose first dimension the body runs."""

HOLDS_RESULTS_TWICE = frozenset({"map_impl", "while_loop"})
"""Loops that hold their results twice: they join the collected results, or hold one run's results during the next run."""


def name_of(node: fx.Node) -> str:
    """Returns the name of the higher-order op that ``node`` calls; empty if it calls none."""
    target = node.target
    return str(target.name()) if isinstance(target, torch._ops.HigherOrderOperator) else ""  # type: ignore[no-untyped-call]


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graphs that the call runs."""
    owner = node.graph.owning_module
    held = (n for n in node.all_input_nodes if n.op == "get_attr")
    found = (operator.attrgetter(str(n.target))(owner) for n in held)
    return [body for body in found if isinstance(body, fx.GraphModule)]


def written_op(node: fx.Node) -> torch._ops.OpOverload | None:
    """Returns the op that ``node`` calls on copies of its mutated arguments; None if ``node`` is no such call."""
    if node.target not in (auto_functionalized, auto_functionalized_v2):
        return None
    called = node.args[0]
    return called if isinstance(called, torch._ops.OpOverload) else None


def written_arguments(op: torch._ops.OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``op`` under its own names, from those of its functionalizing wrapper.

    A mutated view is represented by its base.
    """
    bases = kwargs.get("_all_bases", [])
    found = {}
    for argument in op._schema.arguments:
        base = kwargs.get(f"_{argument.name}_base_index")
        found[argument.name] = bases[base] if base is not None else kwargs.get(argument.name)
    return found


def triton_kernel(node: fx.Node) -> object | None:
    """Returns the Triton kernel that ``node`` calls on copies of its mutated arguments; None if ``node`` is no such call."""
    if node.target is not triton_kernel_wrap.triton_kernel_wrapper_functional:
        return None
    kernel: object = triton_kernel_wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    return kernel


def returned_operands(node: fx.Node) -> dict[Any, fx.Node]:
    """Returns the operands that a nested compile region returns unchanged, by the position of the result."""
    if name_of(node) != "invoke_subgraph":
        return {}
    (body,) = bodies(node)
    operands = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=False))
    (output,) = body.graph.find_nodes(op="output")
    results: Any = output.args[0]
    found = ((position, operands.get(result)) for position, result in enumerate(results) if isinstance(result, fx.Node))
    return {position: operand for position, operand in found if isinstance(operand, fx.Node)}
