"""Runs passes one after the other on a graph module, under the contract in README.md here.

    run_passes(backward, materialize_shared, preserve_strides)

Each pass is linted and timed. The logger ``autoremat.passes`` has the seconds and the graph after each pass, at level DEBUG.
With ``AUTOREMAT_VERIFY_PASSES=1``, as in all tests, what a pass must preserve is compared too.

Torch's ``PassManager`` is not used: it replaces the error of a pass by a bare ``Exception``, and callers tell ``PlanInvalid``
and ``ChunkingUnsupported`` apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autoremat.basics import environment
from autoremat.ops.op_traits import traits_of
from autoremat.planner.graph.op import SEQUENTIAL

log = logging.getLogger("autoremat.passes")

Pass = Callable[[fx.GraphModule], int]
"""Rewrites the graph of a module in place. Returns the number of its rewrites; after 0 the graph is as before."""


def run_passes(module: fx.GraphModule, *passes: Pass) -> list[int]:
    """Runs ``passes`` on ``module`` in place, in this sequence, and returns the number of rewrites of each.

    Raises ``RuntimeError``, with the name of the pass, if a pass breaks the graph.
    """
    rewrites = [_run(module, one) for one in passes]
    if any(rewrites):
        module.recompile()
    return rewrites


def _run(module: fx.GraphModule, one: Pass) -> int:
    name = (one.func if isinstance(one, partial) else one).__name__
    before = _interface(module.graph) if environment.said(environment.VERIFY_PASSES) == "1" else {}
    begin = time.perf_counter()
    rewrites = one(module)
    log.debug("%s: %d rewrites in %.2f ms", name, rewrites, 1e3 * (time.perf_counter() - begin))
    if rewrites:
        try:
            module.graph.lint()
        except (RuntimeError, AssertionError) as error:
            raise RuntimeError(f"the pass {name} leaves a malformed graph: {error}") from error
        if log.isEnabledFor(logging.DEBUG):
            log.debug("the graph after %s:\n%s", name, module.print_readable(print_output=False))
    after = _interface(module.graph) if before else {}
    for part, expected in before.items():
        if after[part] != expected:
            pairs = zip((*expected, "nothing"), (*after[part], "nothing"), strict=False)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
            raise RuntimeError(f"the pass {name} changes the {part} of the graph: {new} in place of {old}")
    return rewrites


def _interface(graph: fx.Graph) -> dict[str, list[str]]:
    """Returns what a pass must preserve: the form of inputs and outputs, and the sequence of all effects."""
    return {
        "inputs": [f"{node.name}: {_described(node)}" for node in graph.find_nodes(op="placeholder")],
        "outputs": [_described(leaf) for leaf in tree_leaves(graph.output_node().args)],
        "effects": [f"{node.name}: {node.target}" for node in graph.nodes if traits_of(node) & SEQUENTIAL],
    }


def _described(leaf: Any) -> str:
    value = leaf.meta.get("val", "unknown") if isinstance(leaf, fx.Node) else leaf
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes, strides = (", ".join(map(str, numbers)) for numbers in (value.shape, value.stride()))
    return f"{value.dtype} on {value.device} of sizes ({sizes}) and strides ({strides})"
