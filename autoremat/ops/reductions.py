"""Tells which reductions end a pass: a kernel that reads their operand knows the result only at its end.

A kernel that reduces rows has each row in the cache when its result is known, and goes on with both. These end a pass, so what
depends on their result runs in another kernel, which reads the operand again:

- A reduction over dimensions that are not the innermost in memory, such as the statistics of a batch norm.
- A reduction of few long rows. Inductor divides each among several blocks, and another kernel combines their results.
- A scatter.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autoremat.ops import op_traits
from autoremat.torch_private.symbolic_sizes import size_hint

LONG_ROW = 8192
"""Most elements of a row that one block reduces if there are few rows (`reduction_split_factor` in Inductor's `choices.py`)."""

FEW_ROWS = 2
"""Rows per multiprocessor from which each row has one block, however long it is."""


def ends_pass(node: fx.Node, multiprocessors: int) -> bool:
    """Returns True if a kernel that reads the operands of ``node`` knows its result only at the end."""
    facts = op_traits.facts(node)
    if facts.scatters or not facts.reduces:
        return facts.scatters
    operand = node.all_input_nodes[0].meta["val"]
    reduced = _reduced(node, operand)
    sizes, strides = ([size_hint(number) for number in numbers] for numbers in (operand.shape, operand.stride()))
    rows = math.prod(size for dimension, size in enumerate(sizes) if dimension not in reduced)
    length = math.prod(size for dimension, size in enumerate(sizes) if dimension in reduced)
    steps = {dimension: stride for dimension, stride in enumerate(strides) if stride and sizes[dimension] > 1}
    innermost = min((stride for dimension, stride in steps.items() if dimension not in reduced), default=math.inf)
    return any(steps.get(dimension, 0) > innermost for dimension in reduced) or (
        rows < FEW_ROWS * multiprocessors and length > LONG_ROW
    )


def _reduced(node: fx.Node, operand: torch.Tensor) -> set[int]:
    target: Any = node.target
    named = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    if "normalized_shape" in named:
        return set(range(operand.dim() - len(named["normalized_shape"]), operand.dim()))
    chosen: Any = named.get("dim", named.get("dims"))
    return {one % max(1, operand.dim()) for one in ([chosen] if isinstance(chosen, int) else chosen or range(operand.dim()))}
