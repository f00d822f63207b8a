"""Compares what a pass must preserve (`passes/README.md`) before and after it, for every pass of every test."""

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autoremat import passes
from autoremat.ops.op_traits import traits_of
from autoremat.planner.graph.op import SEQUENTIAL

_run = passes._run


def run_and_compare(module: fx.GraphModule, one: passes.Pass) -> int:
    before = interface(module.graph)
    rewrites = _run(module, one)
    after, name = interface(module.graph), getattr(one, "func", one).__name__
    for part, expected in before.items():
        if after[part] != expected:
            pairs = zip((*expected, "nothing"), (*after[part], "nothing"), strict=False)
            old, new = next(pair for pair in pairs if pair[0] != pair[1])
            raise RuntimeError(f"the pass {name} changes the {part} of the graph: {new} in place of {old}")
    return rewrites


def interface(graph: fx.Graph) -> dict[str, list[str]]:
    """The form of inputs and outputs, and the sequence of all effects."""
    return {
        "inputs": [f"{node.name}: {described(node)}" for node in graph.find_nodes(op="placeholder")],
        "outputs": [described(leaf) for leaf in tree_leaves(graph.output_node().args)],
        "effects": [f"{node.name}: {node.target}" for node in graph.nodes if traits_of(node) & SEQUENTIAL],
    }


def described(leaf: Any) -> str:
    value = leaf.meta.get("val", "unknown") if isinstance(leaf, fx.Node) else leaf
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes, strides = (", ".join(map(str, numbers)) for numbers in (value.shape, value.stride()))
    return f"{value.dtype} on {value.device} of sizes ({sizes}) and strides ({strides})"
