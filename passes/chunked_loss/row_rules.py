"""One rule per op that computes row by row: its form on a chunk of rows (see ``row_partition.py``).

A new op needs a rule here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.capture import call_cost
from autoremat.ops import op_traits
from autoremat.passes.chunked_loss.row_partition import Arguments, Make, Region, Rows, Step, described, shape_of
from autoremat.planner.graph.op import Trait

aten = torch.ops.aten
prims = torch.ops.prims

VIEWS = (aten.view, aten._unsafe_view, aten.reshape)
SWAPS = (aten.t, aten.permute, aten.transpose)
POINTWISE = (
    aten.clone, aten.detach, aten.alias, aten._to_copy, aten.full_like, aten.zeros_like, aten.ones_like, aten.masked_fill,
    aten.where, aten.tanh_backward, aten.sigmoid_backward, aten.threshold_backward, prims.convert_element_type,
)  # fmt: skip
"""Pointwise ops that lack torch's ``pointwise`` tag."""

REDUCTIONS = (
    aten.sum, aten.mean, aten.amax, aten.amin, aten.prod, aten.any, aten.all, aten.logsumexp, aten.argmax, aten.argmin,
    aten.var, aten.std,
)  # fmt: skip
"""Reductions, called as (operand, dimensions, ...); the dimensions may be missing."""

ALONG = {
    aten._log_softmax: 1, aten._softmax: 1, aten._log_softmax_backward_data: 2, aten._softmax_backward_data: 2,
    aten.gather: 1, aten.scatter: 1, aten.scatter_add: 1, aten.slice: 1, aten.cumsum: 1,
    aten.slice_scatter: 2,
}  # fmt: skip
"""Ops along one dimension, which must not be a row dimension, and the position of that dimension among the arguments."""

CREATIONS = (aten.full, aten.zeros, aten.ones)
CREATIONS_LIKE = (aten.new_zeros, aten.new_full, aten.new_ones)
"""Ops that create a tensor like their operand, called as (operand, sizes, ...)."""

MEAN, SUM = 1, 2
"""Codes of ``nll_loss_forward`` for its reductions."""


def step_of(node: fx.Node, region: Region, lead: int | None = None) -> Step:
    """Returns the rule by which ``node`` runs chunk by chunk, given the region.

    ``lead`` is the number of row dimensions for a node that reads nothing of the region. Raises ``ChunkingUnsupported`` if the
    node does not compute row by row.
    """
    if node.op != "call_function" or node.target is not operator.getitem and call_cost.traits_of(node) & ~Trait.DISCONTINUOUS:
        raise ChunkingUnsupported(f"{described(node)} cannot be chunked")
    name = op_traits.packet(node)
    target = node.target
    if node.target is operator.getitem:
        return _unpacking(node, region)
    if name in CREATIONS and lead is not None:
        return _creation(node, lead)
    if name in CREATIONS_LIKE:
        return _creation_like(node, region, lead)
    if name in RULES:
        return RULES[name](node, region)
    if name is aten.expand:
        return _expand(node, region, lead)
    if name in VIEWS:
        return _view(node, region)
    if name in SWAPS:
        return _swap(node, region)
    if name in ALONG:
        return _along(node, region, ALONG[name], lead)
    if name in REDUCTIONS:
        return _reduction(node, region, lead)
    tagged = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    if name in POINTWISE or tagged:
        return _pointwise(node, region, lead)
    raise ChunkingUnsupported(f"{described(node)} reads it and is not known to compute row by row")


def _as_it_is(node: fx.Node) -> Callable[[Sequence[Any], Mapping[str, Any], int], Arguments]:
    return lambda args, kwargs, count: (node.target, tuple(args), dict(kwargs))


def _with_argument(node: fx.Node, place: int, value: Any) -> Callable[[Sequence[Any], Mapping[str, Any], int], Arguments]:
    return lambda args, kwargs, count: (node.target, (*args[:place], value, *args[place + 1 :]), dict(kwargs))


def _lead(node: fx.Node, region: Region, given: int | None) -> int:
    """Returns the number of row dimensions that all operands in the region share.

    Raises ``ChunkingUnsupported`` if they differ, or if the node reads nothing by rows.
    """
    held = {rows for operand in node.all_input_nodes if (rows := region.rows(operand)) is not None}
    if len(held) > 1 or any(rows.transposed for rows in held):
        raise ChunkingUnsupported(f"{described(node)} reads rows that are arranged in several ways")
    if not held and given is None:
        raise ChunkingUnsupported(f"{described(node)} reads nothing by rows")
    return held.pop().lead if held else given or 1


def _by_rows(node: fx.Node, region: Region, operand: Any, lead: int, row_shape: tuple[int, ...]) -> dict[fx.Node, Rows]:
    """Returns the reads of ``operand`` by rows. Raises ``ChunkingUnsupported`` if its rows do not have that shape."""
    if region.rows(operand) is None and shape_of(operand)[:lead] != row_shape:
        raise ChunkingUnsupported(f"{described(node)} reads {described(operand)}, whose rows are others")
    return {operand: Rows(lead)}


def _pointwise(node: fx.Node, region: Region, given: int | None) -> Step:
    """Returns the rule for a pointwise op: operands by rows, broadcast ones whole."""
    lead, made = _lead(node, region, given), shape_of(node)
    reads: dict[fx.Node, Rows | int | None] = {}
    for operand in node.all_input_nodes:
        if not isinstance(operand.meta.get("val"), torch.Tensor):
            raise ChunkingUnsupported(f"{described(node)} depends on a number that is not fixed")
        shape = shape_of(operand)
        missing = len(made) - len(shape)
        in_rows = shape[: max(0, lead - missing)]
        if region.rows(operand) is not None or (missing == 0 and in_rows == made[:lead] and math.prod(in_rows) > 1):
            if missing or in_rows != made[:lead]:
                raise ChunkingUnsupported(f"{described(node)} spreads rows over more dimensions")
            reads[operand] = Rows(lead)
        elif all(size == 1 for size in in_rows):
            reads[operand] = len(in_rows) - 1 if lead > 1 and in_rows else None
        else:
            raise ChunkingUnsupported(f"{described(node)} reads {described(operand)}, which differs between some rows only")
    return Step(reads, _as_it_is(node), Rows(lead))


def _creation(node: fx.Node, lead: int) -> Step:
    """Returns the rule for an op that creates a tensor of given sizes."""
    rest = shape_of(node)[lead:]
    return Step({}, lambda args, kwargs, count: (node.target, ([count, *rest], *args[1:]), dict(kwargs)), Rows(lead))


def _creation_like(node: fx.Node, region: Region, given: int | None) -> Step:
    """Returns the rule for an op that creates a tensor of given sizes after the type of its operand."""
    lead, made, operand = _lead(node, region, given), shape_of(node), node.args[0]
    held = region.holds(operand)
    if held and made[:lead] != shape_of(operand)[:lead]:
        raise ChunkingUnsupported(f"{described(node)} has other rows than what it is like")
    reads: dict[Any, Rows | int | None] = {operand: Rows(lead) if held else None}
    rest = made[lead:]
    return Step(
        reads, lambda args, kwargs, count: (node.target, (args[0], [count, *rest], *args[2:]), dict(kwargs)), Rows(lead)
    )


def _slice_backward(node: fx.Node, region: Region) -> Step:
    """Returns the rule for the gradient of a slice, which must not select rows."""
    lead, made = _lead(node, region, None), shape_of(node)
    dimension, rest = _inner(node, node.args[2], len(made), lead), made[lead:]  # type: ignore[arg-type]
    return Step(
        {node.args[0]: Rows(lead)},  # type: ignore[dict-item]
        lambda args, kwargs, count: (node.target, (args[0], [count, *rest], dimension, *args[3:]), {}),
        Rows(lead),
    )


def _padding(node: fx.Node, region: Region) -> Step:
    """Returns the rule for padding, which must not add rows."""
    lead, widths = _lead(node, region, None), _numbers(node.args[1:2])
    if len(widths) > 2 * (len(shape_of(node)) - lead):
        raise ChunkingUnsupported(f"{described(node)} adds rows")
    return Step({node.args[0]: Rows(lead)}, _as_it_is(node), Rows(lead))  # type: ignore[dict-item]


def _view(node: fx.Node, region: Region) -> Step:
    """Returns the rule for a view, which must keep rows apart from the dimensions within them."""
    operand = node.args[0]
    held = region.rows(operand)
    if held is None or held.transposed:
        raise ChunkingUnsupported(f"{described(node)} rearranges rows")
    made, before = shape_of(node), shape_of(operand)
    lead = next((k for k in range(1, len(made) + 1) if math.prod(made[:k]) == region.count), None)
    if lead is None:
        raise ChunkingUnsupported(f"{described(node)} merges rows with what is in them")
    rest = made[lead:]

    def call(args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> Arguments | None:
        return None if rest == before[held.lead :] else (aten.view.default, (args[0], [count, *rest]), {})

    return Step({operand: held}, call, Rows(lead))  # type: ignore[dict-item]  # a node, as the region holds it


def _swap(node: fx.Node, region: Region) -> Step:
    """Returns the rule for a transposition of two dimensions, one of which holds the rows."""
    operand = node.args[0]
    held = region.rows(operand)
    swaps = op_traits.packet(node) is aten.t or sorted(d % 2 for d in _numbers(node.args[1:])) == [0, 1]
    identity = op_traits.packet(node) is aten.permute and _numbers(node.args[1:]) == [0, 1]
    if held is None or held.lead != 1 or len(shape_of(node)) != 2 or not swaps or identity:
        raise ChunkingUnsupported(f"{described(node)} rearranges rows")
    return Step({operand: held}, _as_it_is(node), Rows(1, not held.transposed))  # type: ignore[dict-item]


def _numbers(arguments: Sequence[Any]) -> list[int]:
    """Returns the integers in arguments and in lists among them."""
    return [n for one in arguments for n in (one if isinstance(one, (list, tuple)) else [one]) if isinstance(n, int)]


def _inner(node: fx.Node, dimension: int, rank: int, lead: int) -> int:
    """Returns the index of a dimension within a chunk. Raises ``ChunkingUnsupported`` if it is a row dimension."""
    found = dimension % rank
    if found < lead:
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    return found - lead + 1


def _along(node: fx.Node, region: Region, place: int, given: int | None) -> Step:
    """Returns the rule for an op along the dimension that is argument ``place``."""
    lead = _lead(node, region, given)
    rank, row_shape = len(shape_of(node)), shape_of(node)[:lead]
    dimension = _inner(node, node.args[place] if len(node.args) > place else 0, rank, lead)  # type: ignore[arg-type]
    reads: dict[fx.Node, Rows | int | None] = {}
    for operand in node.all_input_nodes:
        reads.update(_by_rows(node, region, operand, lead, row_shape))
    return Step(reads, _with_argument(node, place, dimension), Rows(lead))


def _reduction(node: fx.Node, region: Region, given: int | None) -> Step:
    """Returns the rule for a reduction: within rows it gives rows; over all rows a sum or mean gives a sum."""
    lead = _lead(node, region, given)
    operand, *rest = node.args
    rank = len(shape_of(operand))
    dimensions = rest[0] if rest and rest[0] not in (None, []) else list(range(rank))
    listed = [d % rank for d in _numbers([dimensions])]
    reads: dict[fx.Node, Rows | int | None] = {operand: Rows(lead)}  # type: ignore[dict-item]
    if not set(listed) & set(range(lead)):
        inner = [_inner(node, d, rank, lead) for d in listed]
        number = inner if isinstance(dimensions, (list, tuple)) else inner[0]
        return Step(reads, _with_argument(node, 1, number), Rows(lead))
    keeps = len(rest) > 1 and bool(rest[1])
    if op_traits.packet(node) not in (aten.sum, aten.mean) or not set(listed) >= set(range(lead)) or (keeps and lead > 1):
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    inner = [0, *(d - lead + 1 for d in listed if d >= lead)]
    summed = math.prod(shape_of(operand)[d] for d in listed)

    def mean(make: Make, total: fx.Node, parts: list[fx.Node]) -> fx.Node:
        return make(aten.div.Tensor, total, summed)

    return Step(
        reads,
        lambda args, kwargs, count: (aten.sum.dim_IntList, (args[0], inner, keeps), dict(kwargs)),
        finish=mean if op_traits.packet(node) is aten.mean else None,
    )


def _unsqueeze(node: fx.Node, region: Region) -> Step:
    """Returns the rule for a new dimension within rows."""
    lead, rank = _lead(node, region, None), len(shape_of(node))
    place = _inner(node, node.args[1], rank, lead)  # type: ignore[arg-type]
    return Step({node.args[0]: Rows(lead)}, _with_argument(node, 1, place), Rows(lead))  # type: ignore[dict-item]


def _squeeze(node: fx.Node, region: Region) -> Step:
    """Returns the rule for dropping dimensions within rows."""
    lead, rank = _lead(node, region, None), len(shape_of(node.args[0]))
    if len(node.args) < 2:
        raise ChunkingUnsupported(f"{described(node)} may drop rows")
    inner = [_inner(node, d, rank, lead) for d in _numbers(node.args[1:])]
    places = inner if isinstance(node.args[1], (list, tuple)) else inner[0]
    return Step({node.args[0]: Rows(lead)}, _with_argument(node, 1, places), Rows(lead))  # type: ignore[dict-item]


def _expand(node: fx.Node, region: Region, given: int | None) -> Step:
    """Returns the rule for an expansion to the rows, or within them."""
    lead, made, operand = _lead(node, region, given), shape_of(node), node.args[0]
    before, rest = shape_of(operand), made[lead:]
    in_rows = before[: max(0, lead - (len(made) - len(before)))]
    if in_rows == made[:lead]:
        read: Rows | int | None = Rows(lead)
    elif not region.holds(operand) and all(size == 1 for size in in_rows):
        read = len(in_rows) - 1 if in_rows else None
    else:
        raise ChunkingUnsupported(f"{described(node)} spreads rows over more dimensions")
    reads = {operand: read}
    return Step(reads, lambda args, kwargs, count: (node.target, (args[0], [count, *rest]), {}), Rows(lead))  # type: ignore[arg-type]


def _product(node: fx.Node, region: Region) -> Step:
    """Returns the rule for a matrix product.

    Rows times a whole tensor give rows. A product over the rows, as in the gradient of a weight, gives a sum over rows.
    """
    *bias, left, right = node.args
    if node.kwargs or len(node.args) > 3 or any(not isinstance(n, fx.Node) for n in node.args):
        raise ChunkingUnsupported(f"{described(node)} has factors of its own")
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    reads: dict[fx.Node, Rows | int | None] = {}
    if region.rows(left) == Rows(1) and region.rows(right) is None and left is not right:
        reads = {left: Rows(1), right: None}
        for added in bias:
            by_rows = len(shape_of(added)) == 2 and shape_of(added)[0] == region.count
            reads[added] = Rows(1) if by_rows else None  # type: ignore[index]
        return Step(reads, _as_it_is(node), Rows(1))
    sums = region.rows(left) in (None, Rows(1, True)) and region.rows(right) in (None, Rows(1))
    if not sums or shape_of(left)[1] != region.count or any(region.holds(added) for added in bias):
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    reads = {left: Rows(1, True), right: Rows(1), **{added: None for added in bias if isinstance(added, fx.Node)}}
    return Step(reads, _as_it_is(node))


def projection_step(node: fx.Node) -> Step:
    """Returns the rule for the matrix product with which the region begins."""
    *bias, left, right = node.args
    reads: dict[Any, Rows | int | None] = {left: Rows(1), right: None}
    reads |= {added: None for added in bias if isinstance(added, fx.Node)}
    return Step(reads, _as_it_is(node), Rows(1))


def _loss(node: fx.Node, region: Region) -> Step:
    """Returns the rule for ``nll_loss_forward``: each chunk gives the sum of its losses and of its weights."""
    scores, labels, weight, reduction, _ = node.args
    if region.rows(scores) != Rows(1) or len(shape_of(scores)) != 2:
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    reads: dict[fx.Node, Rows | int | None] = dict(_by_rows(node, region, labels, 1, (region.count,)))
    reads[scores] = Rows(1)  # type: ignore[index]
    if isinstance(weight, fx.Node):
        reads[weight] = None
    return Step(reads, _with_argument(node, 3, SUM if reduction in (MEAN, SUM) else reduction), several=True)


def _unpacking(node: fx.Node, region: Region) -> Step:
    """Returns the rule for unpacking the losses or the weights of ``nll_loss_forward``."""
    call, number = node.args
    if not isinstance(call, fx.Node) or call.target is not aten.nll_loss_forward.default or not region.holds(call):
        raise ChunkingUnsupported(f"{described(node)} reads it and is not known to compute row by row")
    reads: dict[fx.Node, Rows | int | None] = {call: Rows(1)}
    if call.args[3] not in (MEAN, SUM) and number == 0:
        return Step(reads, _as_it_is(node), Rows(1))
    return Step(reads, _as_it_is(node), finish=_mean if call.args[3] == MEAN and number == 0 else None)


def _mean(make: Make, total: fx.Node, parts: list[fx.Node]) -> fx.Node:
    """Returns the weighted mean of the losses: their sum divided by the sum of the weights."""
    weight, *further = [make(operator.getitem, part.args[0], 1) for part in parts]
    for one in further:
        weight = make(aten.add.Tensor, weight, one)
    return make(aten.div.Tensor, total, weight)


def _loss_backward(node: fx.Node, region: Region) -> Step:
    """Returns the rule for the gradient of ``nll_loss_forward``, by rows."""
    gradient, scores, labels, weight, reduction, _, total = node.args
    if region.rows(scores) != Rows(1) or len(shape_of(scores)) != 2:
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    reads: dict[fx.Node, Rows | int | None] = dict(_by_rows(node, region, labels, 1, (region.count,)))
    reads |= {scores: Rows(1), total: None, gradient: None if reduction in (MEAN, SUM) else Rows(1)}  # type: ignore[dict-item]
    if isinstance(weight, fx.Node):
        reads[weight] = None
    return Step(reads, _as_it_is(node), Rows(1))


RULES: dict[Any, Callable[[fx.Node, Region], Step]] = {
    aten.slice_backward: _slice_backward,
    aten.constant_pad_nd: _padding,
    aten.mm: _product,
    aten.addmm: _product,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.nll_loss_forward: _loss,
    aten.nll_loss_backward: _loss_backward,
}
