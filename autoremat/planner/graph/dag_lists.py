"""Checks and converts the lists that describe a directed acyclic graph: seconds and bytes of its ops, and its edges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx


def lists_of_networkx(directed: networkx.DiGraph[Any]) -> tuple[list[float], list[int], list[tuple[int, int]]]:
    """Returns the seconds and the bytes of the nodes in the sequence of their execution, and the edges.

    Raises ``ValueError`` for a cycle, and for a node without seconds or bytes.
    """
    import networkx

    place = {node: number for number, node in enumerate(directed)}
    try:
        nodes = list(networkx.lexicographical_topological_sort(directed, key=place.__getitem__))
    except networkx.NetworkXUnfeasible as error:
        raise ValueError("the graph has a circle, so its nodes cannot be run in order") from error
    if lacking := [node for node in nodes if not {"seconds", "bytes"} <= directed.nodes[node].keys()]:
        raise ValueError(f"the node {lacking[0]!r} has no seconds or no bytes")
    number = {node: index for index, node in enumerate(nodes)}
    return (
        [directed.nodes[node]["seconds"] for node in nodes],
        [directed.nodes[node]["bytes"] for node in nodes],
        [(number[producer], number[reader]) for producer, reader in directed.edges],
    )


def check_costs(seconds: Sequence[float], sizes: Sequence[int], rematerializable: Sequence[bool]) -> None:
    """Raises ``ValueError`` unless each op has finite seconds >= 0, a whole number of bytes >= 0 and a flag."""
    for name, given in (("sizes", sizes), ("rematerializable", rematerializable)):
        if len(given) != len(seconds):
            raise ValueError(f"{name} has {len(given)} entries, seconds has {len(seconds)}")
    for index, (duration, size) in enumerate(zip(seconds, sizes, strict=True)):
        if not (math.isfinite(duration) and duration >= 0):
            raise ValueError(f"seconds[{index}] is {duration}: expected a finite number >= 0")
        if not (math.isfinite(size) and size >= 0 and int(size) == size):
            raise ValueError(f"sizes[{index}] is {size}: expected a whole number of bytes >= 0")


def inputs_of(edges: Iterable[tuple[int, int]], count: int) -> list[tuple[int, ...]]:
    """Returns, for each of ``count`` ops, the values that it reads, sorted. Raises ``ValueError`` for an impossible edge."""
    inputs: list[set[int]] = [set() for _ in range(count)]
    for producer, reader in edges:
        if not (0 <= producer < count and 0 <= reader < count):
            raise ValueError(f"the edge ({producer}, {reader}) names an op that does not exist: there are {count}")
        if producer >= reader:
            raise ValueError(f"the edge ({producer}, {reader}) does not lead to a later op")
        inputs[reader].add(int(producer))
    return [tuple(sorted(read)) for read in inputs]
