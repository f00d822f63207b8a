"""Facts about the operands and arguments of row-by-row ops, for their rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.passes.rows.row_partition import Arguments, Region, Rows, described, shape_of


def as_it_is(node: fx.Node) -> Callable[[Sequence[Any], Mapping[str, Any], int], Arguments]:
    return lambda args, kwargs, count: (node.target, tuple(args), dict(kwargs))


def with_argument(node: fx.Node, place: int, value: Any) -> Callable[[Sequence[Any], Mapping[str, Any], int], Arguments]:
    return lambda args, kwargs, count: (node.target, (*args[:place], value, *args[place + 1 :]), dict(kwargs))


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
