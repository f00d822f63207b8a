"""The adapter for torch's higher-order ops: which there are, which bodies they run, which op or kernel they stand for.

As in ``torch_compat``, nothing here decides anything about plans.
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
"""Higher-order ops that do what their bodies do and no more, by name."""

LOOPED_OVER = {"scan": 2, "map_impl": 1}
"""For loops: the position of the argument along whose first dimension the body runs."""

HOLDS_RESULTS_TWICE = frozenset({"map_impl", "while_loop"})
"""Those that collect the results of all runs before they join them, or hold those of one run during the next."""


def name_of(node: fx.Node) -> str:
    """The name of the higher-order op that ``node`` calls; empty if it calls none."""
    target = node.target
    return str(target.name()) if isinstance(target, torch._ops.HigherOrderOperator) else ""  # type: ignore[no-untyped-call]


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that the call runs."""
    owner = node.graph.owning_module
    held = (n for n in node.all_input_nodes if n.op == "get_attr")
    found = (operator.attrgetter(str(n.target))(owner) for n in held)
    return [body for body in found if isinstance(body, fx.GraphModule)]


def written_op(node: fx.Node) -> torch._ops.OpOverload | None:
    """The op that ``node`` calls on copies of the arguments that it writes to, if it is such a call."""
    if node.target not in (auto_functionalized, auto_functionalized_v2):
        return None
    called = node.args[0]
    return called if isinstance(called, torch._ops.OpOverload) else None


def written_arguments(op: torch._ops.OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``op`` by its own names, from those of its wrapper; for a view that is written to, its base."""
    bases = kwargs.get("_all_bases", [])
    found = {}
    for argument in op._schema.arguments:
        base = kwargs.get(f"_{argument.name}_base_index")
        found[argument.name] = bases[base] if base is not None else kwargs.get(argument.name)
    return found


def triton_kernel(node: fx.Node) -> object | None:
    """The Triton kernel that ``node`` calls on copies of the arguments that it writes to, if it is such a call."""
    if node.target is not triton_kernel_wrap.triton_kernel_wrapper_functional:
        return None
    kernel: object = triton_kernel_wrap.kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    return kernel


def returned_operands(node: fx.Node) -> dict[Any, fx.Node]:
    """Of a nested compile region: the operands that it returns as they are, by the position of the result."""
    if name_of(node) != "invoke_subgraph":
        return {}
    (body,) = bodies(node)
    operands = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=False))
    (output,) = body.graph.find_nodes(op="output")
    results: Any = output.args[0]
    found = ((position, operands.get(result)) for position, result in enumerate(results) if isinstance(result, fx.Node))
    return {position: operand for position, operand in found if isinstance(operand, fx.Node)}
