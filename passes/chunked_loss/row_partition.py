"""Which ops compute row by row, and how each of them runs on some of the rows.

The *rows* of a value are its leading dimensions, such as batch and position of tokens, whatever number of dimensions that is: a
value of shape (batch, length, words) and one of shape (batch x length, words) have the same rows. A *part* of it are some
consecutive rows, flattened to one dimension. An op computes row by row if a part of its result needs only that part of
its operands, and whatever has no rows; or if it sums over all rows, and parts can be summed one after the other.

Here are the words; ``row_rules.py`` says how each op does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.capture.source_info import origin

Arguments = tuple[fx.node.Target, tuple[Any, ...], dict[str, Any]]
"""What to call, with which positional and keyword arguments."""

Make = Callable[..., fx.Node]
"""Makes a node that calls its first argument with the others."""


@dataclass(frozen=True)
class Rows:
    """How a value holds its rows: in its first ``lead`` dimensions, or, ``transposed``, in the second of two."""

    lead: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Step:
    """How a node runs on a part. Neither with ``rows`` nor ``several``, its results for all parts are summed."""

    reads: Mapping[fx.Node, Rows | int | None]
    """Operands of which the part is read; those of which so many leading dimensions, all 1, are dropped; others whole: None."""
    call: Callable[[Sequence[Any], Mapping[str, Any], int], Arguments | None]
    """From the arguments with operands replaced, and the number of rows; None: the first operand as it is."""
    rows: Rows | None = None
    several: bool = False
    """Whether the result is a tuple, of which each part has its own."""
    finish: Callable[[Make, fx.Node, list[fx.Node]], fx.Node] | None = None
    """What becomes of a sum: from what makes nodes, the sum, and the nodes of all parts."""

    @property
    def by_part(self) -> bool:
        """Whether each part has a result of its own."""
        return self.several or self.rows is not None


@dataclass
class Region:
    """The nodes found so far that run part by part; ``count`` rows in all."""

    count: int
    steps: dict[fx.Node, Step] = field(default_factory=dict)
    ends: set[fx.Node] = field(default_factory=set)
    """Of these nodes, those whose readers do not run part by part."""

    def holds(self, thing: Any) -> bool:
        """Whether each part has a result of its own of the node, for readers that run part by part."""
        return isinstance(thing, fx.Node) and thing in self.steps and self.steps[thing].by_part and thing not in self.ends

    def rows(self, thing: Any) -> Rows | None:
        """How a node that the region holds has its rows; None for all else."""
        return self.steps[thing].rows if self.holds(thing) else None


def shape_of(node: Any) -> tuple[int, ...]:
    """The sizes of a node's tensor. Raises ``ChunkingUnsupported`` if they are not fixed."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise ChunkingUnsupported(f"{described(node)} is no tensor")
    if not all(type(size) is int for size in value.shape):
        what = "its sizes are dynamic"
        raise ChunkingUnsupported(
            f"{what}: compile with dynamic=False", f"compile with dynamic=False: {what}, so the loss cannot be had in parts"
        )
    return tuple(value.shape)


def described(node: Any) -> str:
    """A node for people."""
    if not isinstance(node, fx.Node):
        return repr(node)
    module, source = origin(node)
    return f"{node.target}" + (f" in {module}" if module else "") + (f" at {source}" if source else "")
