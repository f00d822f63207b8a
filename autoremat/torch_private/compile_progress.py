"""Torch's private names for its progress with a graph: traced ops, and Inductor's stages. This module decides no plans."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from autoremat.basics.progress import Tally, now
from autoremat.torch_private.hooks import Method, hooked

KERNEL = re.compile(r"= async_compile\.\w+\(")
"""Matches a kernel in generated code that is compiled by itself."""


def _half_of(lowering: Any) -> str:
    """Returns the name for messages of a graph that Inductor lowers."""
    return "graph" if lowering.is_inference else "backward" if lowering.is_backward else "forward"


@contextlib.contextmanager
def tracing_is_told(doing: str) -> Iterator[None]:
    """Names the current step ``doing`` and reports the ops that torch's tracers record while active."""
    from torch.fx.proxy import TracerBase

    ops = Tally()

    def told_create_node(create_node: Method, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        ops.done += 1
        return create_node(tracer, *args, **kwargs)

    now(doing, ops.count)
    with hooked(TracerBase, "create_node", told_create_node):
        yield


@contextlib.contextmanager
def inductor_is_told() -> Iterator[None]:
    """Reports Inductor's progress while active: lowering, code generation, and compiled kernels out of all kernels."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CodeCacheFuture
    from torch._inductor.graph import GraphLowering, SubgraphLowering

    nodes, kernels = Tally(), Tally()
    half = "graph"

    def told_run(run: Method, lowering: Any, *args: Any) -> Any:
        if not isinstance(lowering, SubgraphLowering):
            nodes.total, nodes.done = len(lowering.module.graph.nodes), 0
            now(f"lowering the {_half_of(lowering)}", nodes.count)
        return run(lowering, *args)

    def told_run_node(run_node: Method, lowering: Any, node: Any) -> Any:
        nodes.done += 1
        return run_node(lowering, node)

    def told_generate(generate: Method, lowering: Any) -> Any:
        if isinstance(lowering, SubgraphLowering):
            return generate(lowering)
        nonlocal half
        half = _half_of(lowering)
        now(f"generating code of the {half}")
        generated = generate(lowering)
        kernels.total, kernels.done = len(KERNEL.findall(generated[0].value)), 0
        now(f"compiling kernels of the {half}", kernels.count if kernels.total else None)
        return generated

    def told_load(load: Method, compiler: Any, *args: Any) -> Any:
        loaded = load(compiler, *args)
        kernels.done += not isinstance(loaded, CodeCacheFuture)  # a future is still compiling
        return loaded

    def told_wait(wait: Method, compiler: Any, scope: dict[str, Any]) -> None:
        waited_for = [name for name, kernel in scope.items() if isinstance(kernel, Future | CodeCacheFuture)]

        def count() -> tuple[int, int]:
            open_ones = sum(isinstance(scope.get(name), Future | CodeCacheFuture) for name in waited_for)
            return len(waited_for) - open_ones, len(waited_for)

        if waited_for:
            now(f"compiling kernels of the {half}", count)
        wait(compiler, scope)

    with (
        hooked(GraphLowering, "run", told_run),
        hooked(GraphLowering, "run_node", told_run_node),
        hooked(GraphLowering, "codegen", told_generate),
        hooked(AsyncCompile, "cpp_pybinding", told_load),
        hooked(AsyncCompile, "wait", told_wait),
    ):
        yield
