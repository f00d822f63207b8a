"""Projects only the tokens whose logits are used: moves a selection of rows from behind the projection to before it.

A loss that shifts logits against labels (``logits[:, :-1]``) drops one token of each sequence after computing its logits. In
the backward the gradients of these logits are zeros.

    Before:  used = mm(x, w).view(b, t, v)[:, :-1]       d = pad(d_used).view(b * t, v); dx = mm(d, w'); dw = mm(d', x)
    After:   y = x.view(b, t, h)[:, :-1]                 dx = pad(mm(d_used, w')).view(b * t, h); dw = mm(d_used', y)
             used = mm(y, w)

The rewrite requires that nothing else reads the logits and their gradient. The dropped rows only add zeros to the sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoremat.ops import op_traits
from autoremat.passes.building import Builder
from autoremat.passes.rows.row_partition import shape_of
from autoremat.passes.rows.row_rules import VIEWS
from autoremat.torch_private import joint_graphs

aten = torch.ops.aten
CONVERSIONS = (aten._to_copy, torch.ops.prims.convert_element_type)
PRODUCTS = (aten.mm.default, aten.addmm.default)


def select_before_projecting(projection: fx.Node) -> fx.Node:
    """Returns the projection to chunk: one of fewer rows if only some rows of ``projection`` are used, else ``projection``."""
    chain = _chain(projection)
    found = [user for user in chain[-1].users if user.target is aten.slice.Tensor]
    if len(found) != 1 or len(chain[-1].users) != 1:
        return projection
    before, after = shape_of(chain[-1]), shape_of(found[0])
    if len(before) < 3 or before[-1] != after[-1] or len(before) != len(after):
        return projection
    if math.prod(before[:-1]) != shape_of(projection)[0]:
        return projection
    paddings = [n for n in projection.graph.nodes if _undoes(n, found[0])]
    if len(paddings) != 1:
        return projection
    gradients = _chain(paddings[0])
    if len(shape_of(gradients[-1])) != 2 or not all(_is_understood(user, gradients[-1]) for user in gradients[-1].users):
        return projection
    return _Exchange(projection, chain, found[0], paddings[0], gradients).run()


def _chain(node: fx.Node) -> list[fx.Node]:
    """Returns ``node`` and its successors, each the only reader of the previous one.

    Successors are conversions, and views that change only the row dimensions.
    """
    found = [node]
    while len(found[-1].users) == 1:
        (user,) = found[-1].users
        keeps_width = user.op == "call_function" and op_traits.packet(user) in (*VIEWS, *CONVERSIONS)
        if not keeps_width or shape_of(user)[-1] != shape_of(node)[-1]:
            break
        found.append(user)
    return found


def _place(node: fx.Node, first: int, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Returns (dimension, start, end, step) of a selection whose dimension is argument ``first``."""
    given: list[Any] = [*node.args[first:], *[None] * 4]
    dimension, start, end, step = (given[0] or 0) % len(shape), given[1], given[2], given[3]
    low, high, step = slice(start, end, step).indices(shape[dimension])
    return dimension, low, high, step


def _undoes(node: fx.Node, selection: fx.Node) -> bool:
    """Returns True if ``node`` pads a gradient of ``selection`` with zeros to the shape before the selection."""
    if node.target not in (aten.slice_backward.default, aten.slice_scatter.default) or node.kwargs:
        return False
    whole = shape_of(selection.args[0])
    if not joint_graphs.is_traced_in_backward(node) or shape_of(node) != whole:
        return False
    if node.target is aten.slice_scatter.default and not _is_zeros(node.args[0]):
        return False
    gradient = node.args[0] if node.target is aten.slice_backward.default else node.args[1]
    return shape_of(gradient) == shape_of(selection) and _place(node, 2, whole) == _place(selection, 1, whole)


def _is_zeros(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default and bool(node.args[1] == 0)


def _is_understood(user: fx.Node, gradient: fx.Node) -> bool:
    """Returns True if ``user`` is a product with the gradient, or a sum of the gradient over rows."""
    name = op_traits.packet(user)
    if name is aten.mm:
        return user.args[0] is gradient and user.args[1] is not gradient
    if name in (aten.t, aten.permute):
        return all(reader.target in PRODUCTS and reader.args[-2] is user and not reader.kwargs for reader in user.users)
    return name is aten.sum and len(user.args) > 1 and list(user.args[1]) == [0]  # type: ignore[arg-type]


@dataclass
class _Exchange:
    """The rewrite of one projection: selects rows before it, and pads the gradients of its operands instead of its own."""

    projection: fx.Node
    chain: list[fx.Node]
    selection: fx.Node
    padding: fx.Node
    gradients: list[fx.Node]
    selected: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The used rows of tensors that are multiplied with rows of logits or of their gradient, by tensor."""

    def __post_init__(self) -> None:
        self.build = Builder.beside(self.projection)
        self.before, self.after = shape_of(self.selection.args[0])[:-1], shape_of(self.selection)[:-1]
        self.rows = math.prod(self.after)

    def run(self) -> fx.Node:
        """Rewrites the graph and returns the new projection."""
        graph = self.projection.graph
        *bias, operand, weight = self.projection.args
        with graph.inserting_before(self.projection):
            rows = self.select(operand, self.projection)
            projection = self.build.make(self.projection, self.projection.target, (*bias, rows, weight))
            used = self.shaped(self.converted(projection, self.chain), self.after, self.selection)
        for copy in [n for n in self.selection.users if n.target is aten.clone.default]:
            copy.replace_all_uses_with(used)
        self.selection.replace_all_uses_with(used)
        gradient = self.padding.args[0 if self.padding.target is aten.slice_backward.default else 1]
        with graph.inserting_before(self.padding):
            flat = self.converted(self.shaped(gradient, (self.rows,), self.padding), self.gradients)
        for user in list(self.gradients[-1].users):
            self.redirect(user, flat)
        graph.eliminate_dead_code()
        return projection

    def redirect(self, user: fx.Node, flat: fx.Node) -> None:
        """Replaces a reader of the gradient of all rows by one that reads the gradient of the used rows."""
        graph, name = user.graph, op_traits.packet(user)
        with graph.inserting_before(user):
            if name is aten.mm:
                made = self.pad(self.build.make(user, user.target, (flat, user.args[1])), user)
            else:
                made = self.build.make(user, user.target, (flat, *user.args[1:]))
        if name in (aten.mm, aten.sum):
            user.replace_all_uses_with(made)
            return
        for reader in list(user.users):
            with graph.inserting_before(reader):
                *added, _, rows = reader.args
                sum_ = self.build.make(reader, reader.target, (*added, made, self.select(rows, reader)))
            reader.replace_all_uses_with(sum_)

    def select(self, rows: Any, like: fx.Node) -> fx.Node:
        """Returns the used rows of ``rows``."""
        if rows not in self.selected:
            apart = self.shaped(rows, self.before, like)
            place = _place(self.selection, 1, shape_of(self.selection.args[0]))
            taken = self.build.make(like, aten.slice.Tensor, (apart, *place))
            self.selected[rows] = self.shaped(taken, (self.rows,), like)
        return self.selected[rows]

    def pad(self, rows: fx.Node, like: fx.Node) -> fx.Node:
        """Returns zeros for all rows, with ``rows`` at the places of the used ones."""
        apart, shape = self.shaped(rows, self.after, like), [*self.before, shape_of(rows)[-1]]
        if self.padding.target is aten.slice_backward.default:
            padded = self.build.make(like, self.padding.target, (apart, shape, *self.padding.args[2:]))
        else:
            zeros = self.padding.args[0]
            assert isinstance(zeros, fx.Node)
            keywords = {**zeros.kwargs, "dtype": rows.meta["val"].dtype}
            full = self.build.make(like, zeros.target, (shape, 0), keywords)
            padded = self.build.make(like, self.padding.target, (full, apart, *self.padding.args[2:]))
        return self.shaped(padded, (math.prod(self.before),), like)

    def shaped(self, node: Any, rows: tuple[int, ...], like: fx.Node) -> fx.Node:
        """Returns ``node`` viewed with its rows in the dimensions ``rows``."""
        return self.build.make(like, aten.view.default, (node, [*rows, shape_of(node)[-1]]))

    def converted(self, node: fx.Node, chain: list[fx.Node]) -> fx.Node:
        """Returns ``node`` after the conversions in ``chain``."""
        for one in chain[1:]:
            if op_traits.packet(one) in CONVERSIONS:
                node = self.build.make(one, one.target, (node, *one.args[1:]), dict(one.kwargs))
        return node
