"""The places at which a captured graph is cut into parts of about equal bytes of parameters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from autoremat.torch_private.dynamo import nesting_of, switches_autocast
from autoremat.torch_private.tensors import storage_bytes, storage_key

WINDOW = 0.25
"""The share of a part by which a cut may miss the place of equal parts, for fewer bytes across it."""


def divided(module: fx.GraphModule, inputs: Sequence[Any], device_type: str, count: int) -> dict[fx.Node, int]:
    """Returns the part of each node, from 0, of a graph in at most ``count`` parts of about equal bytes of parameters.

    Each part is the first to read some of the parameters that require gradients, so these gradients leave after its backward.
    There are fewer parts than ``count`` if there are fewer places to cut, and one if there is none.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    arrived = list(accumulate(_arriving_bytes(module, inputs, nodes, device_type)))
    crossing = _crossing_bytes(module, nodes, device_type)
    whole = arrived[-1] if arrived else 0
    # A cut before node ``i`` leaves ``arrived[i - 1]`` bytes of parameters to the parts before it.
    allowed = {i: size for i, size in enumerate(crossing) if size is not None and i and 0 < arrived[i - 1] < whole}

    def rank(place: int, ideal: float) -> tuple[bool, float, float]:
        miss, size = abs(arrived[place - 1] - ideal), allowed[place]
        is_far = miss > WINDOW * whole / count
        return (True, miss, size) if is_far else (False, size, miss)

    cuts: dict[int, int] = {}
    for number in range(1, count) if allowed else ():
        place = min(allowed, key=lambda i: rank(i, number * whole / count))
        cuts.setdefault(arrived[place - 1], place)
    places = sorted(cuts.values())
    return {node: bisect_right(places, i) for i, node in enumerate(nodes)}


def _arriving_bytes(module: fx.GraphModule, inputs: Sequence[Any], nodes: Sequence[fx.Node], device_type: str) -> list[int]:
    """Returns, for each of ``nodes``, the bytes of the parameters that it is the first to read and that require gradients."""
    place = {node: i for i, node in enumerate(nodes)}
    arriving = [0] * len(nodes)
    for node, tensor in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        readers = [place[user] for user in node.users if user in place]
        if readers and isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            arriving[min(readers)] += storage_bytes(tensor, device_type)
    return arriving


@dataclass(frozen=True)
class _Span:
    """A stretch of the graph, from the first node that makes a value to the last one that reads it.

    ``bytes`` is None if no cut may separate these nodes.
    """

    first: int
    last: int
    bytes: int | None

    def joined(self, other: _Span) -> _Span:
        size = None if self.bytes is None or other.bytes is None else min(self.bytes, other.bytes)
        return _Span(min(self.first, other.first), max(self.last, other.last), size)


def _crossing_bytes(module: fx.GraphModule, nodes: Sequence[fx.Node], device_type: str) -> list[int | None]:
    """Returns, for each of ``nodes``, the bytes of the results that a cut before it would cross; None if none may be there."""
    spans = _spans(module, nodes, device_type)
    more, refused = [0] * (len(nodes) + 1), [0] * (len(nodes) + 1)
    for span in spans:
        changed, by = (refused, 1) if span.bytes is None else (more, span.bytes)
        if span.first < span.last:
            changed[span.first + 1] += by
            changed[span.last + 1] -= by
    depths = accumulate(map(nesting_of, nodes), initial=0)  # inside of a transform of torch.func, state is live
    found = zip(accumulate(more), accumulate(refused), depths, strict=True)
    return [None if number or depth else size for size, number, depth in found][: len(nodes)]


def _spans(module: fx.GraphModule, nodes: Sequence[fx.Node], device_type: str) -> list[_Span]:
    """Returns the spans of all results. Views have one with their base.

    A tensor that changes in place stays within a part: a plan may save it before the change, where eager code would not.
    """
    place = {node: i for i, node in enumerate(nodes)}
    found: dict[int, _Span] = {}
    for node in module.graph.nodes:
        value, readers = node.meta.get("example_value"), [place[user] for user in node.users if user in place]
        if node.op in ("get_attr", "output") or switches_autocast(node) or isinstance(value, torch.SymInt | int):
            continue  # torch repeats these in each part, or hands them over
        if not isinstance(value, torch.Tensor):
            if node in place:
                found[id(node)] = _Span(place[node], max([place[node], *readers]), None)
            continue
        key = storage_key(value)
        touched = [*readers, *([place[node]] if node in place else [])]
        size = None if value._version else 0 if node.op == "placeholder" else storage_bytes(value, device_type)
        if touched:
            span = _Span(min(touched), max(touched), size)
            found[key] = span if key not in found else found[key].joined(span)
    return list(found.values())
