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
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class PassRun:
    """What one pass did."""

    name: str
    rewrites: int
    seconds: float


@dataclass(frozen=True)
class Interface:
    """What a pass must preserve of a graph."""

    inputs: tuple[str, ...]
    """Names, types, sizes and layouts of the placeholders."""
    outputs: tuple[str, ...]
    """Types, sizes and layouts of the outputs."""
    effects: tuple[str, ...]
    """Names and targets of random draws, mutations and other effects, in the sequence of the graph."""

    @classmethod
    def of(cls, graph: fx.Graph) -> Interface:
        """Returns the interface of ``graph``."""
        inputs = tuple(f"{node.name}: {_described(node)}" for node in graph.find_nodes(op="placeholder"))
        outputs = tuple(_described(leaf) for node in graph.find_nodes(op="output") for leaf in tree_leaves(node.args))
        effects = tuple(f"{node.name}: {node.target}" for node in graph.nodes if traits_of(node) & SEQUENTIAL)
        return cls(inputs, outputs, effects)


def run_passes(module: fx.GraphModule, *passes: Pass) -> tuple[PassRun, ...]:
    """Runs ``passes`` on ``module`` in place, in this sequence, and returns what each did.

    Raises ``RuntimeError``, with the name of the pass, if a pass breaks the graph.
    """
    runs = tuple(_run(module, one) for one in passes)
    if any(run.rewrites for run in runs):
        module.recompile()
    return runs


def _run(module: fx.GraphModule, one: Pass) -> PassRun:
    name = (one.func if isinstance(one, partial) else one).__name__
    before = Interface.of(module.graph) if environment.said(environment.VERIFY_PASSES) == "1" else None
    begin = time.perf_counter()
    run = PassRun(name, one(module), time.perf_counter() - begin)
    log.debug("%s: %d rewrites in %.2f ms", name, run.rewrites, 1e3 * run.seconds)
    if run.rewrites:
        _lint(module.graph, name)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("the graph after %s:\n%s", name, module.print_readable(print_output=False))
    if before is not None:
        _compare(before, Interface.of(module.graph), name)
    return run


def _lint(graph: fx.Graph, name: str) -> None:
    """Raises ``RuntimeError`` if the graph is malformed after the pass of that name."""
    try:
        graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise RuntimeError(f"the pass {name} leaves a malformed graph: {error}") from error


def _compare(before: Interface, after: Interface, name: str) -> None:
    """Raises ``RuntimeError`` with the first difference if the pass of that name changed the interface."""
    for part, expected in asdict(before).items():
        found = getattr(after, part)
        if found != expected:
            pairs = zip((*expected, "nothing"), (*found, "nothing"), strict=False)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
            raise RuntimeError(f"the pass {name} changes the {part} of the graph: {new} in place of {old}")


def _described(leaf: Any) -> str:
    """Returns the type, sizes and layout of a node's result; the text of anything else."""
    value = leaf.meta.get("val", "unknown") if isinstance(leaf, fx.Node) else leaf
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes, strides = (", ".join(map(str, numbers)) for numbers in (value.shape, value.stride()))
    return f"{value.dtype} on {value.device} of sizes ({sizes}) and strides ({strides})"
