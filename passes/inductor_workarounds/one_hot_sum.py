"""Replaces sums over rows with a single nonzero entry by that entry.

In each row, the gradient of a cross entropy is the incoming gradient at the target's place and zero elsewhere. The gradient of
log-softmax needs its sum. Inductor finds the place by comparing the target with an iota of 64-bit integers over the columns,
and does not vectorise a sum over that. Losses with class weights, label smoothing or half precision have another form and are
left.

Before:

    count  = iota(columns)                                       [1, columns]
    one    = where(target == count, value, 0)                    [rows, columns]
    total  = sum(one * gradient, 1)                              [rows, 1]; target and gradient are [rows, 1]

After:

    hit    = where(0 <= target < columns, value, 0)
    total  = hit * gradient + 0 * abs(gradient)

The term ``0 * abs(gradient)`` keeps the bits: it is NaN for a gradient that is not finite, and else +0.0, as in the original
sum.

The pass is only for graphs that Inductor compiles; elsewhere the gradient of log-softmax is one op. It also needs a CPU whose
limit on the size of an expression admits the whole gradient. With a lower limit, as on CUDA, a buffer as large as the logits
would stand between two expressions. The default limit of torch 2.11 and 2.12 is too low; the pass is for torch 2.13 and later.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import fx

from autoremat.passes.building import Builder
from autoremat.torch_private.symbolic_sizes import size_hint

aten, prims = torch.ops.aten, torch.ops.prims

OPERATIONS = 35
"""Number of operations in the gradient of the logits after the rewrite, as one expression."""

CONSTANTS = (aten.scalar_tensor.default, aten.full.default)
INDEX_TYPES = (torch.int32, torch.int64)
"""Types of targets that are rewritten. Targets of other types may lie between two counts or be too narrow for the last one, and
compare differently."""

RESHAPES = (aten.view.default, aten.reshape.default, aten.unsqueeze.default)


@dataclass(frozen=True)
class OneHot:
    """A tensor that is ``value`` where ``target`` equals the index along a dimension of ``columns``, and ``zero`` elsewhere."""

    target: fx.Node
    columns: int
    value: fx.Node
    zero: fx.Node


def simplify_one_hot_sum(joint: fx.GraphModule) -> int:
    """Rewrites such sums in ``joint`` in place, a joint graph for Inductor, and returns the number of rewritten sums."""
    sums = [node for node in joint.graph.nodes if node.op == "call_function" and node.target is aten.sum.dim_IntList]
    rewritten = sum(_rewrite(node) for node in sums)
    if rewritten:
        joint.graph.eliminate_dead_code()
    return rewritten


def _rewrite(total: fx.Node) -> bool:
    """Rewrites ``total`` if it sums a one-hot tensor times a gradient over one dimension, and returns True if so."""
    product, dims = total.args[0], total.args[1]
    if total.kwargs or not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor or product.kwargs:
        return False
    if not isinstance(dims, list) or len(dims) != 1 or not isinstance(dims[0], int):
        return False
    result = _value(product)
    if result is None or result.dim() == 0 or not result.dtype.is_floating_point:
        return False
    dim = dims[0] % result.dim()
    for first, second in itertools.permutations(product.args):
        one_hot, gradient = _one_hot(first, result, dim), _thin(second, result, dim)
        if one_hot is not None and gradient is not None and gradient.meta["val"].dtype == result.dtype:
            _replace(total, one_hot, gradient, dim)
            return True
    return False


def _replace(total: fx.Node, one_hot: OneHot, gradient: fx.Node, dim: int) -> None:
    """Replaces ``total`` by the entry that it sums."""
    build = Builder.beside(total)
    with total.graph.inserting_before(total):
        not_below = build.make(total, aten.ge.Scalar, (one_hot.target, 0))
        not_above = build.make(total, aten.lt.Scalar, (one_hot.target, one_hot.columns))
        inside = build.make(total, aten.logical_and.default, (not_below, not_above))
        hit = build.make(total, aten.where.self, (inside, one_hot.value, one_hot.zero))
        entry = build.make(total, aten.mul.Tensor, (hit, gradient))
        size = build.make(total, aten.abs.default, (gradient,))
        others = build.make(total, aten.mul.Tensor, (size, 0.0))
        found = build.make(total, aten.add.Tensor, (entry, others))
        if len(total.args) < 3 or not total.args[2]:
            found = build.make(total, aten.squeeze.dim, (found, dim))
    total.replace_all_uses_with(found)


def _one_hot(node: object, like: torch.Tensor, dim: int) -> OneHot | None:
    """Returns ``node`` as a one-hot tensor along ``dim`` with as many rows and columns as ``like``; None if it is not one."""
    if not isinstance(node, fx.Node) or node.target is not aten.where.self:
        return None
    condition, value, zero = node.args
    columns = like.shape[dim]
    if (
        not isinstance(columns, int)
        or columns < 2
        or not isinstance(condition, fx.Node)
        or condition.target is not aten.eq.Tensor
    ):
        return None
    if not isinstance(value, fx.Node) or not isinstance(zero, fx.Node) or _constant(value) is None or _constant(zero) != 0:
        return None
    for first, second in itertools.permutations(condition.args):
        target = _thin(first, like, dim)
        if target is not None and target.meta["val"].dtype in INDEX_TYPES and _counts(second, columns, like.dim() - dim):
            return OneHot(target, columns, value, zero)
    return None


def _thin(node: object, like: torch.Tensor, dim: int) -> fx.Node | None:
    """Returns ``node`` before its expansion along ``dim``, if it has one column there and the rows of ``like``; else None."""
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.expand.default and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    value = _value(node)
    if value is None or value.dim() != like.dim() or not _is_one(value.shape[dim]):
        return None
    # Compare hints, because comparing symbols adds guards.
    return node if all(size_hint(value.shape[i]) == size_hint(n) for i, n in enumerate(like.shape) if i != dim) else None


def _counts(node: object, columns: int, from_the_end: int) -> bool:
    """Returns True if ``node`` is the iota from 0 to ``columns`` - 1 along one dimension, and all others have size 1.

    ``from_the_end`` is the position of that dimension, counted from the last one, which is 1.
    """
    value = _value(node) if isinstance(node, fx.Node) else None
    if not isinstance(node, fx.Node) or value is None or value.dim() < from_the_end:
        return False
    counted = value.dim() - from_the_end
    if not all(n == columns if i == counted else _is_one(n) for i, n in enumerate(value.shape)):
        return False
    while node.target in RESHAPES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.target is prims.iota.default and (node.kwargs.get("start"), node.kwargs.get("step")) == (0, 1)


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def _constant(node: fx.Node) -> object:
    """Returns the number that ``node`` holds as a tensor without dimensions, or None."""
    value = _value(node)
    return node.args[-1] if node.target in CONSTANTS and value is not None and value.dim() == 0 else None


def _value(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None
