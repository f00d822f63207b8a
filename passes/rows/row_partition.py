"""The vocabulary of ops that compute row by row and can run on a chunk of rows.

The *rows* of a value are its leading dimensions, such as batch and token position. Their number of dimensions does not matter:
values of shape (batch, length, words) and (batch x length, words) have the same rows. A *part* (chunk) of a value consists of
consecutive rows, flattened to one dimension.

An op computes row by row if a chunk of its result needs only the same chunk of its operands, and operands without rows. An op
that sums over all rows also counts, because the sums of chunks can be added. ``row_rules.py`` states the rule for each op.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.capture.source_info import origin
from autoremat.torch_private import joint_graphs
from autoremat.torch_private.symbolic_sizes import size_hint

aten = torch.ops.aten

Arguments = tuple[fx.node.Target, tuple[Any, ...], dict[str, Any]]
"""A call: its target, positional arguments and keyword arguments."""

Make = Callable[..., fx.Node]
"""Creates a node that calls its first argument with the other arguments."""


@dataclass(frozen=True)
class Rows:
    """The position of a value's rows: its first ``lead`` dimensions, or, if ``transposed``, the second of two dimensions."""

    lead: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Step:
    """The rule by which a node runs on a chunk. Without ``rows`` and ``several``, the results of all chunks are summed."""

    reads: Mapping[fx.Node, Rows | int | None]
    """Operands by the way in which a chunk reads them. ``Rows``: the same chunk of the operand. A number: the whole operand
    without that many leading dimensions, all of size 1. None: the whole operand."""
    call: Callable[[Sequence[Any], Mapping[str, Any], int], Arguments | None]
    """Returns the call for a chunk from the positional arguments, the keyword arguments and the number of rows. None means that
    the first operand is the result."""
    rows: Rows | None = None
    several: bool = False
    """True if the result is a tuple, of which each chunk has its own."""
    finish: Callable[[Make, fx.Node, list[fx.Node]], fx.Node] | None = None
    """Completes a sum, given a function that creates nodes, the sum, and the summands of all chunks."""

    @property
    def by_part(self) -> bool:
        """True if each chunk has a result of its own."""
        return self.several or self.rows is not None


@dataclass
class Region:
    """The nodes found so far that run chunk by chunk; ``count`` is the number of rows of the whole."""

    count: int
    steps: dict[fx.Node, Step] = field(default_factory=dict)
    ends: set[fx.Node] = field(default_factory=set)
    """Nodes of the region whose readers do not run chunk by chunk."""

    def holds(self, thing: Any) -> bool:
        """Returns True if ``thing`` is a node with one result per chunk, for readers that run chunk by chunk."""
        return isinstance(thing, fx.Node) and thing in self.steps and self.steps[thing].by_part and thing not in self.ends

    def rows(self, thing: Any) -> Rows | None:
        """Returns the position of the rows of a node that the region holds; None for anything else."""
        return self.steps[thing].rows if self.holds(thing) else None


def row_dimensions(shape: Sequence[int], count: int) -> Rows | None:
    """Returns the position of ``count`` rows in a tensor of these sizes; None if its leading sizes have another product."""
    return next((Rows(lead) for lead in range(1, len(shape) + 1) if math.prod(shape[:lead]) == count), None)


def size_hints(node: Any) -> tuple[int, ...]:
    """Returns the present sizes of a node's tensor; empty if it is no tensor."""
    return tuple(size_hint(size) for size in getattr(node.meta.get("val"), "shape", ()))


WIDENS = 2
"""Minimum ratio of a product's width to the width of the rows that it reads."""


def widens(node: fx.Node) -> bool:
    """Returns True if the node is a matrix product of the forward that makes rows much wider."""
    if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return False
    return not joint_graphs.is_traced_in_backward(node) and size_hints(node)[1] >= WIDENS * size_hints(node.args[-2])[1]


def has_dynamic_sizes(node: fx.Node) -> bool:
    """Returns True if a size of the node's tensor is symbolic."""
    return not all(type(size) is int for size in node.meta["val"].shape)


def shape_of(node: Any) -> tuple[int, ...]:
    """Returns the sizes of a node's tensor. Raises ``ChunkingUnsupported`` if it is no tensor or its sizes are dynamic."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise ChunkingUnsupported(f"{described(node)} is no tensor")
    if has_dynamic_sizes(node):
        what = "its sizes are dynamic"
        raise ChunkingUnsupported(
            f"{what}: compile with dynamic=False", f"compile with dynamic=False: {what}, so the loss cannot be chunked"
        )
    return tuple(value.shape)


def described(node: Any) -> str:
    """Returns a text for messages that names the node, its module and its source line."""
    if not isinstance(node, fx.Node):
        return repr(node)
    module, source = origin(node)
    return f"{node.target}" + (f" in {module}" if module else "") + (f" at {source}" if source else "")


# -- operands and arguments, for the rules ---------------------------------------------------------------------------------


def as_it_is(node: fx.Node) -> Callable[[Sequence[Any], Mapping[str, Any], int], Arguments]:
    return lambda args, kwargs, count: (node.target, tuple(args), dict(kwargs))


def with_argument(node: fx.Node, place: int, value: Any) -> Callable[[Sequence[Any], Mapping[str, Any], int], Arguments]:
    return lambda args, kwargs, count: (node.target, (*args[:place], value, *args[place + 1 :]), dict(kwargs))


def with_sizes(node: fx.Node, place: int, rest: Sequence[int]) -> Callable[[Sequence[Any], Mapping[str, Any], int], Arguments]:
    return lambda args, kwargs, count: (node.target, (*args[:place], [count, *rest], *args[place + 1 :]), dict(kwargs))


def lead_of(node: fx.Node, region: Region, given: int | None) -> int:
    """Returns the number of row dimensions that all operands in the region share.

    Raises ``ChunkingUnsupported`` if they differ, or if the node reads nothing by rows.
    """
    held = {rows for operand in node.all_input_nodes if (rows := region.rows(operand)) is not None}
    if len(held) > 1 or any(rows.transposed for rows in held):
        raise ChunkingUnsupported(f"{described(node)} reads rows that are arranged in several ways")
    if not held and given is None:
        raise ChunkingUnsupported(f"{described(node)} reads nothing by rows")
    return held.pop().lead if held else given or 1


def reads_by_rows(node: fx.Node, region: Region, operand: Any, lead: int, row_shape: tuple[int, ...]) -> dict[fx.Node, Rows]:
    """Returns the reads of ``operand`` by rows. Raises ``ChunkingUnsupported`` if its rows do not have that shape."""
    if region.rows(operand) is None and shape_of(operand)[:lead] != row_shape:
        raise ChunkingUnsupported(f"{described(node)} reads {described(operand)}, whose rows are others")
    return {operand: Rows(lead)}


def integers(arguments: Sequence[Any]) -> list[int]:
    """Returns the integers in arguments and in lists among them."""
    return [n for one in arguments for n in (one if isinstance(one, (list, tuple)) else [one]) if isinstance(n, int)]


def inner_dimension(node: fx.Node, dimension: int, rank: int, lead: int) -> int:
    """Returns the index of a dimension within a chunk. Raises ``ChunkingUnsupported`` if it is a row dimension."""
    found = dimension % rank
    if found < lead:
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    return found - lead + 1
