"""One rule per op that computes row by row: its form on a chunk of rows (see ``row_partition.py``).

A new op needs a rule here.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.capture import call_cost
from autoremat.ops import op_traits
from autoremat.passes.rows.row_partition import (
    Arguments,
    Make,
    Region,
    Rows,
    Step,
    as_it_is,
    described,
    inner_dimension,
    integers,
    lead_of,
    reads_by_rows,
    row_dimensions,
    shape_of,
    with_argument,
    with_sizes,
)
from autoremat.planner.graph.op import Trait

aten, prims = torch.ops.aten, torch.ops.prims

NORMS = {
    aten.native_layer_norm: (0, slice(2, 4)), aten.native_layer_norm_backward: (1, slice(5, 7)),
    aten._fused_rms_norm: (0, slice(2, 3)), aten._fused_rms_norm_backward: (1, slice(4, 5)),
}  # fmt: skip
"""Norms and their gradients: the places of the operand, which is followed by the normalized sizes, and of the weights."""

NORM_GRADIENTS = (aten.native_layer_norm_backward, aten._fused_rms_norm_backward)

MEAN, SUM = 1, 2
"""Codes of ``nll_loss_forward`` for its reductions."""


def _row_sizes(node: fx.Node, region: Region, operand: Any, lead: int) -> tuple[int, ...]:
    sizes = shape_of(operand)[:lead]
    if math.prod(sizes) != region.count:
        raise ChunkingUnsupported(f"{described(node)} reads {described(operand)}, whose rows are others")
    return sizes


def _split(node: fx.Node, region: Region, given: int | None) -> Step:
    operand, _, *rest = node.args
    lead = lead_of(node, region, given)
    dimension = inner_dimension(node, rest[0] if rest else 0, len(shape_of(operand)), lead)  # type: ignore[arg-type]
    reads = reads_by_rows(node, region, operand, lead, _row_sizes(node, region, operand, lead))
    return Step(reads, with_argument(node, 2, dimension), Rows(lead), several=True)


def _moments(node: fx.Node, region: Region, given: int | None) -> Step:
    operand, *dimensions = node.args
    lead, listed = lead_of(node, region, given), integers(dimensions)
    if node.target is not aten.var_mean.correction or not listed:
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    inner = [inner_dimension(node, d, len(shape_of(operand)), lead) for d in listed]
    reads = reads_by_rows(node, region, operand, lead, _row_sizes(node, region, operand, lead))
    return Step(reads, with_argument(node, 1, inner), Rows(lead), several=True)


def _norm(node: fx.Node, region: Region, given: int | None) -> Step:
    lead = lead_of(node, region, given)
    place, weights = NORMS[op_traits.packet(node)]
    operand, normalized = node.args[place : place + 2]
    if len(shape_of(operand)) - len(normalized) < lead:  # type: ignore[arg-type]
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    sizes = _row_sizes(node, region, operand, lead)
    reads: dict[fx.Node, Rows | int | None] = {}
    for one in node.all_input_nodes:
        reads |= {one: None} if one in node.args[weights] else reads_by_rows(node, region, one, lead, sizes)
    return Step(reads, as_it_is(node), Rows(lead), several=True)


def _loss(node: fx.Node, region: Region, given: int | None) -> Step:
    """Returns the rule for ``nll_loss_forward``, of which each chunk gives sums of losses and of weights, or its backward."""
    is_backward = op_traits.packet(node) is aten.nll_loss_backward
    scores, labels, weight, reduction = node.args[is_backward : is_backward + 4]
    if region.rows(scores) != Rows(1) or len(shape_of(scores)) != 2:
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    reads: dict[Any, Rows | int | None] = {**reads_by_rows(node, region, labels, 1, (region.count,)), scores: Rows(1)}
    if isinstance(weight, fx.Node):
        reads[weight] = None
    if not is_backward:
        return Step(reads, with_argument(node, 3, SUM if reduction in (MEAN, SUM) else reduction), Rows(1), several=True)
    reads |= {node.args[6]: None, node.args[0]: None if reduction in (MEAN, SUM) else Rows(1)}
    return Step(reads, as_it_is(node), Rows(1))


def _unpacking(node: fx.Node, region: Region, given: int | None) -> Step:
    call, number = node.args
    if not isinstance(call, fx.Node) or not region.holds(call) or op_traits.packet(call) not in TUPLE_RULES:
        raise ChunkingUnsupported(f"{described(node)} reads it and is not known to compute row by row")
    name = op_traits.packet(call)
    reads: dict[fx.Node, Rows | int | None] = {call: Rows(1)}
    if name is aten.nll_loss_forward:
        reduction = call.args[3]
        if reduction in (MEAN, SUM) or number != 0:
            return Step(reads, as_it_is(node), finish=_mean if reduction == MEAN and number == 0 else None)
    elif name in NORM_GRADIENTS and number != 0:
        return Step(reads, as_it_is(node))
    rows = region.rows(call)
    assert rows is not None
    return Step(reads, as_it_is(node), rows)


def _mean(make: Make, total: fx.Node, parts: list[fx.Node]) -> fx.Node:
    """Returns the weighted mean of the losses: their sum divided by the sum of the weights."""
    weight, *further = [make(operator.getitem, part.args[0], 1) for part in parts]
    for one in further:
        weight = make(aten.add.Tensor, weight, one)
    return make(aten.div.Tensor, total, weight)


TUPLE_RULES: dict[Any, Callable[[fx.Node, Region, int | None], Step]] = {
    operator.getitem: _unpacking,
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.var_mean: _moments,
    aten.nll_loss_forward: _loss,
    aten.nll_loss_backward: _loss,
    **dict.fromkeys(NORMS, _norm),
}
"""None of these ops draws at random or mutates a tensor."""


VIEWS = (aten.view, aten._unsafe_view, aten.reshape)
PRODUCTS = (aten.mm, aten.addmm)
SWAPS = (aten.t, aten.permute, aten.transpose)
POINTWISE = (
    aten.clone, aten.detach, aten.alias, aten._to_copy, aten.full_like, aten.zeros_like, aten.ones_like, aten.masked_fill,
    aten.where, aten.tanh_backward, aten.sigmoid_backward, aten.threshold_backward, prims.convert_element_type,
    aten.elu_backward, aten.hardsigmoid_backward, aten.hardswish_backward, aten.hardtanh_backward, aten.leaky_relu_backward,
    aten.mish_backward, aten.softplus_backward,
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
    aten.slice_scatter: 2, aten.cat: 1, aten.glu: 1, aten.glu_backward: 2, aten.unsqueeze: 1,
}  # fmt: skip
"""Ops along one dimension, which must not be a row dimension, and the position of that dimension among the arguments."""

CREATIONS = (aten.full, aten.zeros, aten.ones)
CREATIONS_LIKE = (aten.new_zeros, aten.new_full, aten.new_ones)
"""Ops that create a tensor like their operand, called as (operand, sizes, ...)."""


def step_of(node: fx.Node, region: Region, lead: int | None = None) -> Step:
    """Returns the rule by which ``node`` runs chunk by chunk, given the region.

    ``lead`` is the number of row dimensions for a node that reads nothing of the region. Raises ``ChunkingUnsupported`` if the
    node does not compute row by row.
    """
    name = op_traits.packet(node)
    if node.op != "call_function" or (name not in TUPLE_RULES and call_cost.traits_of(node) & ~Trait.DISCONTINUOUS):
        raise ChunkingUnsupported(f"{described(node)} cannot be chunked")
    if name in RULES:
        return RULES[name](node, region, lead)
    if name in CREATIONS and lead is not None:
        return Step({}, with_sizes(node, 0, shape_of(node)[lead:]), Rows(lead))
    if name in ALONG:
        return _along(node, region, ALONG[name], lead)
    if name in POINTWISE or op_traits.is_pointwise(node):
        return _broadcast(node, region, lead)
    raise ChunkingUnsupported(f"{described(node)} reads it and is not known to compute row by row")


def _broadcast(node: fx.Node, region: Region, given: int | None) -> Step:
    """Returns the rule for pointwise ops and ``expand``: operands have the rows of the result, or the same for all rows."""
    lead, made = lead_of(node, region, given), shape_of(node)
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
    call = with_sizes(node, 1, made[lead:]) if op_traits.packet(node) is aten.expand else as_it_is(node)
    return Step(reads, call, Rows(lead))


def _creation_like(node: fx.Node, region: Region, given: int | None) -> Step:
    lead, made, operand = lead_of(node, region, given), shape_of(node), node.args[0]
    held = region.holds(operand)
    if held and made[:lead] != shape_of(operand)[:lead]:
        raise ChunkingUnsupported(f"{described(node)} has other rows than what it is like")
    reads: dict[Any, Rows | int | None] = {operand: Rows(lead) if held else None}
    return Step(reads, with_sizes(node, 1, made[lead:]), Rows(lead))


def _slice_backward(node: fx.Node, region: Region, given: int | None) -> Step:
    lead, made = lead_of(node, region, given), shape_of(node)
    dimension, rest = inner_dimension(node, node.args[2], len(made), lead), made[lead:]  # type: ignore[arg-type]
    return Step(
        {node.args[0]: Rows(lead)},  # type: ignore[dict-item]
        lambda args, kwargs, count: (node.target, (args[0], [count, *rest], dimension, *args[3:]), {}),
        Rows(lead),
    )


def _padding(node: fx.Node, region: Region, given: int | None) -> Step:
    lead, widths = lead_of(node, region, given), integers(node.args[1:2])
    if len(widths) > 2 * (len(shape_of(node)) - lead):
        raise ChunkingUnsupported(f"{described(node)} adds rows")
    return Step({node.args[0]: Rows(lead)}, as_it_is(node), Rows(lead))  # type: ignore[dict-item]


def _view(node: fx.Node, region: Region, given: int | None) -> Step:
    operand = node.args[0]
    held = region.rows(operand)
    made, before = shape_of(node), shape_of(operand)
    if held is None and given is not None and not region.holds(operand):
        held = row_dimensions(before, region.count)
    if held is None or held.transposed:
        raise ChunkingUnsupported(f"{described(node)} rearranges rows")
    lead = row_dimensions(made, region.count)
    if lead is None:
        raise ChunkingUnsupported(f"{described(node)} merges rows with what is in them")
    rest = made[lead.lead :]

    def call(args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> Arguments | None:
        return None if rest == before[held.lead :] else (aten.view.default, (args[0], [count, *rest]), {})

    return Step({operand: held}, call, lead)  # type: ignore[dict-item]  # a node, as it has rows


def _swap(node: fx.Node, region: Region, given: int | None) -> Step:
    operand = node.args[0]
    held = region.rows(operand)
    swaps = op_traits.packet(node) is aten.t or sorted(d % 2 for d in integers(node.args[1:])) == [0, 1]
    identity = op_traits.packet(node) is aten.permute and integers(node.args[1:]) == [0, 1]
    if held is None or held.lead != 1 or len(shape_of(node)) != 2 or not swaps or identity:
        raise ChunkingUnsupported(f"{described(node)} rearranges rows")
    return Step({operand: held}, as_it_is(node), Rows(1, not held.transposed))  # type: ignore[dict-item]


def _along(node: fx.Node, region: Region, place: int, given: int | None) -> Step:
    lead = lead_of(node, region, given)
    rank, row_shape = len(shape_of(node)), shape_of(node)[:lead]
    dimension = inner_dimension(node, node.args[place] if len(node.args) > place else 0, rank, lead)  # type: ignore[arg-type]
    reads: dict[fx.Node, Rows | int | None] = {}
    for operand in node.all_input_nodes:
        reads.update(reads_by_rows(node, region, operand, lead, row_shape))
    return Step(reads, with_argument(node, place, dimension), Rows(lead))


def _reduction(node: fx.Node, region: Region, given: int | None) -> Step:
    """Returns the rule for a reduction: within rows it gives rows; over all rows a sum or mean gives a sum."""
    lead = lead_of(node, region, given)
    operand, *rest = node.args
    rank = len(shape_of(operand))
    _row_sizes(node, region, operand, lead)
    dimensions = rest[0] if rest and rest[0] not in (None, []) else list(range(rank))
    listed = [d % rank for d in integers([dimensions])]
    reads: dict[fx.Node, Rows | int | None] = {operand: Rows(lead)}  # type: ignore[dict-item]
    if not set(listed) & set(range(lead)):
        inner = [inner_dimension(node, d, rank, lead) for d in listed]
        number = inner if isinstance(dimensions, (list, tuple)) else inner[0]
        return Step(reads, with_argument(node, 1, number), Rows(lead))
    keeps = len(rest) > 1 and bool(rest[1])
    if op_traits.packet(node) not in (aten.sum, aten.mean) or not set(listed) >= set(range(lead)):
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    inner = [0, *(d - lead + 1 for d in listed if d >= lead)]
    summed = math.prod(shape_of(operand)[d] for d in listed)
    is_mean, flattens = op_traits.packet(node) is aten.mean, keeps and lead > 1

    def finish(make: Make, total: fx.Node, parts: list[fx.Node]) -> fx.Node:
        total = make(aten.view.default, total, list(shape_of(node))) if flattens else total
        return make(aten.div.Tensor, total, summed) if is_mean else total

    return Step(
        reads,
        lambda args, kwargs, count: (aten.sum.dim_IntList, (args[0], inner, keeps), dict(kwargs)),
        finish=finish if is_mean or flattens else None,
    )


def _squeeze(node: fx.Node, region: Region, given: int | None) -> Step:
    lead, rank = lead_of(node, region, given), len(shape_of(node.args[0]))
    if len(node.args) < 2:
        raise ChunkingUnsupported(f"{described(node)} may drop rows")
    inner = [inner_dimension(node, d, rank, lead) for d in integers(node.args[1:])]
    places = inner if isinstance(node.args[1], (list, tuple)) else inner[0]
    return Step({node.args[0]: Rows(lead)}, with_argument(node, 1, places), Rows(lead))  # type: ignore[dict-item]


def _product(node: fx.Node, region: Region, given: int | None) -> Step:
    """Rows times a whole tensor give rows. A product over the rows, as in the gradient of a weight, gives a sum over rows."""
    *bias, left, right = node.args
    if node.kwargs or len(node.args) > 3 or any(not isinstance(n, fx.Node) for n in node.args):
        raise ChunkingUnsupported(f"{described(node)} has factors of its own")
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    reads: dict[fx.Node, Rows | int | None] = {}
    read_apart = given == 1 and not region.holds(left) and shape_of(left)[0] == region.count
    by_rows = region.rows(left) == Rows(1) or read_apart
    if by_rows and not region.holds(right) and left is not right:
        reads = {left: Rows(1), right: None}
        for added in bias:
            has_rows = len(shape_of(added)) == 2 and shape_of(added)[0] == region.count
            reads[added] = Rows(1) if has_rows else None  # type: ignore[index]
        return Step(reads, as_it_is(node), Rows(1))
    sums = region.rows(left) in (None, Rows(1, True)) and region.rows(right) in (None, Rows(1))
    if not sums or shape_of(left)[1] != region.count or any(region.holds(added) for added in bias):
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    reads = {left: Rows(1, True), right: Rows(1), **{added: None for added in bias if isinstance(added, fx.Node)}}
    return Step(reads, as_it_is(node))


RULES: dict[Any, Callable[[fx.Node, Region, int | None], Step]] = {
    **TUPLE_RULES,
    **dict.fromkeys(CREATIONS_LIKE, _creation_like),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(SWAPS, _swap),
    **dict.fromkeys(REDUCTIONS, _reduction),
    aten.expand: _broadcast,
    aten.slice_backward: _slice_backward,
    aten.constant_pad_nd: _padding,
    aten.squeeze: _squeeze,
}
