"""Torch's private names for higher-order ops: their names, their bodies, and the ops or kernels that they wrap."""

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

HOLDS_RUNS = frozenset({"map_impl", "while_loop"})
"""Loops that hold their results twice in generated code."""

HOLDS_RESULTS = {"map_impl": 1, "while_loop": 1, "associative_scan": 3}
"""Loops that hold as much as their results beside them, several times over. They join the collected results, hold one run's
results during the next run, or combine pairs of elements, then pairs of pairs."""

EAGER_ATTENTION = {"flex_attention": 6, "flex_attention_backward": 12}
"""Attention that eager code computes with whole matrices of scores, and a bound on how many it holds at once."""

INDEX_BYTES = 16
"""Bytes of positions for each element of one run's stacked results in an eager scan: a tensor of them, and a product of it."""

CHUNKED_OP = "torch_nn._linear_cross_entropy_batch_chunked"
"""The beginning of the names of the custom ops of ``F.linear_cross_entropy``."""


def name_of(node: fx.Node) -> str:
    """Returns the name of the higher-order op that ``node`` calls; empty if it calls none."""
    target = node.target
    return str(target.name()) if isinstance(target, torch._ops.HigherOrderOperator) else ""  # type: ignore[no-untyped-call]


def held_graph(node: fx.Node) -> fx.GraphModule | None:
    """Returns the graph that ``node`` holds as an attribute of its module; None for other nodes."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    found = operator.attrgetter(str(node.target))(node.graph.owning_module)
    return found if isinstance(found, fx.GraphModule) else None


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graphs that the call runs."""
    return [body for body in map(held_graph, node.all_input_nodes) if body is not None]


def results_of(body: fx.GraphModule) -> list[torch.Tensor]:
    """Returns the (fake) tensors that a run of ``body`` returns."""
    values = (n.meta.get("val") for n in body.graph.output_node().all_input_nodes)
    return [value for value in values if isinstance(value, torch.Tensor)]


def describe_results(graph: fx.Graph) -> None:
    """Gives calls of nested regions the (fake) results of their bodies, where they have none.

    Torch's propagation of fake tensors leaves the first call of each body without.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        if "val" not in node.meta:
            (body,) = bodies(node)
            returned = body.graph.output_node().args[0]
            node.meta["val"] = torch.fx.map_arg(returned, lambda result: result.meta.get("val"))


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
    results: Any = body.graph.output_node().args[0]
    found = ((position, operands.get(result)) for position, result in enumerate(results) if isinstance(result, fx.Node))
    return {position: operand for position, operand in found if isinstance(operand, fx.Node)}


def chunked_by(joint: fx.GraphModule) -> str:
    """Returns what computes a loss of ``joint`` in chunks: a function of torch or a setting of Inductor; empty if nothing does.

    Both make one opaque op of the projection and the loss, which no later pass chunks again.
    """
    for node in joint.graph.nodes:
        if str(node.target).startswith(CHUNKED_OP):
            return "torch.nn.functional.linear_cross_entropy"
        if any(body.meta.get("produced_by_chunker") for body in bodies(node)):
            return "Inductor (auto_chunker.enable)"
    return ""
