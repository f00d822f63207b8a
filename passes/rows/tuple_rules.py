"""The rules of ops that return tuples, and of their results (see ``row_rules.py``)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.ops import op_traits
from autoremat.passes.rows.row_partition import (
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
    shape_of,
    with_argument,
)

aten = torch.ops.aten

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
    operand, sizes, *rest = node.args
    lead = lead_of(node, region, given)
    dimension = inner_dimension(node, rest[0] if rest else 0, len(shape_of(operand)), lead)  # type: ignore[arg-type]
    reads = reads_by_rows(node, region, operand, lead, _row_sizes(node, region, operand, lead))
    return Step(reads, lambda args, kwargs, count: (node.target, (args[0], sizes, dimension), {}), Rows(lead), several=True)


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
    """Returns the rule for ``nll_loss_forward``: each chunk gives the sum of its losses and of its weights."""
    scores, labels, weight, reduction, _ = node.args
    if region.rows(scores) != Rows(1) or len(shape_of(scores)) != 2:
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    reads: dict[fx.Node, Rows | int | None] = dict(reads_by_rows(node, region, labels, 1, (region.count,)))
    reads[scores] = Rows(1)  # type: ignore[index]
    if isinstance(weight, fx.Node):
        reads[weight] = None
    return Step(reads, with_argument(node, 3, SUM if reduction in (MEAN, SUM) else reduction), Rows(1), several=True)


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


def _loss_backward(node: fx.Node, region: Region, given: int | None) -> Step:
    gradient, scores, labels, weight, reduction, _, total = node.args
    if region.rows(scores) != Rows(1) or len(shape_of(scores)) != 2:
        raise ChunkingUnsupported(f"{described(node)} mixes rows")
    reads: dict[fx.Node, Rows | int | None] = dict(reads_by_rows(node, region, labels, 1, (region.count,)))
    reads |= {scores: Rows(1), total: None, gradient: None if reduction in (MEAN, SUM) else Rows(1)}  # type: ignore[dict-item]
    if isinstance(weight, fx.Node):
        reads[weight] = None
    return Step(reads, as_it_is(node), Rows(1))


TUPLE_RULES: dict[Any, Callable[[fx.Node, Region, int | None], Step]] = {
    operator.getitem: _unpacking,
    aten.split: _split,
    aten.split_with_sizes: _split,
    aten.var_mean: _moments,
    aten.native_layer_norm: _norm,
    aten.native_layer_norm_backward: _norm,
    aten._fused_rms_norm: _norm,
    aten._fused_rms_norm_backward: _norm,
    aten.nll_loss_forward: _loss,
    aten.nll_loss_backward: _loss_backward,
}
"""None of these ops draws at random or mutates a tensor."""
