"""Torch's private names that a step of several graphs needs: Inductor's way to a joint graph, autograd's nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.autograd.graph import Node

from autoremat.torch_private import compat

COMPILED_NODE = "CompiledFunctionBackward"
VIEWS_DEEP = 4
"""How many views may stand between an output and the node of its compiled graph: AOTAutograd makes outputs that alias another
one outside of the graph."""


def trace_as_inductor_does(module: fx.GraphModule, inputs: Sequence[Any], config: dict[str, Any]) -> Callable[..., Any]:
    """As ``compile_with_inductor`` up to the code generation: the same joint graph for ``custom_partitioner_fn``; its halves
    run op by op. No cache is read or written."""
    from torch._inductor.compile_fx import compile_fx

    def interpret(module: fx.GraphModule, _inputs: Sequence[Any], **_: Any) -> Any:
        return compat._run_uncompiled(module, _inputs)

    with compat.without_caches():
        compiled: Any = compile_fx(module, inputs, inner_compile=cast(Any, interpret), config_patches=config)
    return cast(Callable[..., Any], compiled)


def backward_node(outputs: Iterable[Any], inputs: Iterable[Any] = ()) -> Node | None:
    """The autograd node of the compiled graph that made ``outputs`` of ``inputs``; None if no backward can come."""
    earlier = {node for level in _levels(inputs) for node in level}  # of graphs that made the inputs, which outputs may view
    for level in _levels(outputs):
        for node in level:
            if COMPILED_NODE in node.name() and node not in earlier:
                return node
    return None


def _levels(tensors: Iterable[Any]) -> Iterator[list[Node]]:
    """The autograd nodes of ``tensors``, then those that these follow, a few times."""
    level = [tensor.grad_fn for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None]
    for _ in range(VIEWS_DEEP):
        yield level
        level = [following for node in level for following, _ in node.next_functions if following is not None]


def keeps_graph() -> bool:
    """Whether the backward that runs now keeps what was saved for it (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def retraces_backwards() -> bool:
    """Whether compiled autograd traces backwards anew, also those of compiled graphs."""
    from torch._dynamo import compiled_autograd, config

    return bool(config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The leaf tensors whose gradients ``tensor.backward()`` would accumulate."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found: dict[int, torch.Tensor] = {}
    seen, stack = {tensor.grad_fn}, [tensor.grad_fn]
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(found.values())


def hooks_after_gradients(leaf: torch.Tensor) -> list[Callable[..., Any]]:
    """What Python runs once the gradient of ``leaf`` is there; not the hooks of torch's own data parallelism."""
    return list((leaf._post_accumulate_grad_hooks or {}).values())


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` made the module, or ``module.compile`` its call."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None
