"""Projects only the tokens whose logits are used: moves a selection of rows from behind the projection to before it.

A loss that shifts logits against labels (``logits[:, :-1]``) drops one token of each sequence after computing its logits. In
the backward the gradients of these logits are zeros.

    Before:  used = f(mm(x, w).view(b, t, v))[:, :-1]    d = g(pad(d_used)).view(b * t, v); dx = mm(d, w'); dw = mm(d', x)
    After:   y = x.view(b, t, h)[:, :-1]                 dx = pad(mm(g(d_used), w')).view(b * t, h); dw = mm(g(d_used)', y)
             used = f(mm(y, w))

Each rewrite is a small one that holds by itself: a selection moves up through one op, a padding with zeros moves down through
one op. ``f`` and ``g`` stand for ops that compute each row by itself; ``g`` makes zeros of zeros. A frozen projection has no
gradient, so its selection moves alone.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat.ops import op_traits
from autoremat.passes.building import make
from autoremat.passes.rows.row_partition import shape_of
from autoremat.passes.rows.row_rules import ALONG, POINTWISE, VIEWS
from autoremat.planner.graph.op import SEQUENTIAL
from autoremat.torch_private import joint_graphs

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
PADDINGS = (aten.slice_backward.default, aten.slice_scatter.default)
CONVERSIONS = (aten._to_copy, torch.ops.prims.convert_element_type)

SOFTMAX_GRADIENTS = (aten._log_softmax_backward_data, aten._softmax_backward_data)

ALONG_LAST = {name: ALONG[name] for name in (aten._log_softmax, aten._softmax, *SOFTMAX_GRADIENTS)}
"""Ops along the last dimension, and the position of that dimension among the arguments."""

ZEROS_OF_ZEROS = (*CONVERSIONS, *SOFTMAX_GRADIENTS, aten.mul, aten.div, aten.neg, aten.clone, aten.tanh_backward)
"""Ops that make zeros where their first operand is zero."""


def select_before_projecting(graph: fx.Graph, widths: Iterable[int]) -> None:
    """Moves selections of rows, and the paddings of their gradients, to where rows are narrower than each of ``widths``."""
    hoist = _Hoist(graph, min(widths))
    hoist.everywhere(_is_padding, hoist.sink)  # before selections, as these gradients read rows of the forward
    hoist.everywhere(_is_selection, hoist.lift)


def _is_selection(node: fx.Node) -> bool:
    """Returns True if ``node`` takes rows of a tensor with rows in several dimensions."""
    if node.target is not aten.slice.Tensor or node.kwargs or not _is_static(node, node.args[0]):
        return False
    return len(shape_of(node)) >= 3 and _place(node, 1, shape_of(node.args[0]))[0] < len(shape_of(node)) - 1


def _is_padding(node: fx.Node) -> bool:
    if node.target not in PADDINGS or node.kwargs or not joint_graphs.is_traced_in_backward(node):
        return False
    base: Any = node.args[0]
    is_zeros = isinstance(base, fx.Node) and base.target is aten.full.default and base.args[1] == 0
    if not _is_static(node, _padded(node)) or (node.target is PADDINGS[1] and not is_zeros):
        return False
    return len(shape_of(node)) >= 3 and _place(node, 2, shape_of(node))[0] < len(shape_of(node)) - 1


def _is_static(*nodes: Any) -> bool:
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]
    return all(isinstance(v, torch.Tensor) and all(type(size) is int for size in v.shape) for v in values)


def _padded(padding: fx.Node) -> Any:
    return padding.args[PADDINGS.index(padding.target)]


def _place(node: fx.Node, first: int, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Returns (dimension, start, end, step) of a selection whose dimension is argument ``first``."""
    given: list[Any] = [*node.args[first:], *[None] * 4]
    dimension, start, end, step = (given[0] or 0) % len(shape), given[1], given[2], given[3]
    low, high, step = slice(start, end, step).indices(shape[dimension])
    return dimension, low, high, step


def _is_row_by_row(node: fx.Node) -> bool:
    """Returns True if each row of the node's tensor follows from the same row of its operands, whose sizes are fixed."""
    name = op_traits.packet(node)
    if node.op != "call_function" or not _is_static(node, *node.all_input_nodes):
        return False
    if name in ALONG_LAST:
        return node.args[ALONG_LAST[name]] in (-1, len(shape_of(node)) - 1)
    return (name in POINTWISE or op_traits.is_pointwise(node)) and not op_traits.traits_of(node) & SEQUENTIAL


def _keeps_zeros(reader: fx.Node, operand: fx.Node) -> bool:
    """Returns True if rows of ``reader`` are zero where rows of ``operand`` are, whatever its other operands are."""
    if op_traits.packet(reader) not in ZEROS_OF_ZEROS or list(reader.args).count(operand) != 1 or reader.args[0] is not operand:
        return False
    return _is_row_by_row(reader) and shape_of(reader) == shape_of(operand)


def _keeps_rows(view: fx.Node) -> bool:
    return op_traits.packet(view) in VIEWS and _is_static(view) and shape_of(view)[-1] == shape_of(view.args[0])[-1]


@dataclass(frozen=True)
class _Hoist:
    """Moves selections up and paddings down, one op at a time, among tensors with rows of about ``width``."""

    graph: fx.Graph
    width: int

    def everywhere(self, applies: Callable[[fx.Node], bool], move: Callable[[fx.Node], bool]) -> None:
        moved = True
        while moved:
            moved = any([move(node) for node in list(self.graph.nodes) if applies(node) and self.is_wide(node) and node.users])
            self.graph.eliminate_dead_code()

    def is_wide(self, node: fx.Node) -> bool:
        return 2 * shape_of(node)[-1] > self.width

    # -- selections ---------------------------------------------------------------------------------------------------------

    def lift(self, selection: fx.Node) -> bool:
        """Moves ``selection`` before the op whose result it takes rows of. Returns False if that is impossible."""
        source: Any = selection.args[0]
        place = _place(selection, 1, shape_of(source))
        readers = [user for user in source.users if user.users]
        if source.op != "call_function" or any(
            not _is_selection(user) or _place(user, 1, shape_of(source)) != place for user in readers
        ):
            return False
        with self.graph.inserting_before(source):
            made = self.selected(source, place, shape_of(selection))
        if made is None:
            return False
        for user in readers:
            user.replace_all_uses_with(made)
        for copy in [n for n in made.users if n.target is aten.clone.default and made.meta["val"].is_contiguous()]:
            copy.replace_all_uses_with(made)
        return True

    def selected(self, source: fx.Node, place: tuple[int, int, int, int], shape: tuple[int, ...]) -> fx.Node | None:
        """Returns the rows at ``place`` of ``source``, computed from rows of its operands; None if it is no such op."""
        if _is_row_by_row(source):
            return self.repeat(source, source.args, lambda operand: self.rows_of(operand, place, source))
        base: Any = source.args[0]
        if not _keeps_rows(source) or any(user is not source and user.users for user in base.users):
            return None
        if base.target in PRODUCTS and not base.kwargs:
            *bias, rows, weight = base.args
            if any(len(shape_of(one)) != 1 for one in bias):
                return None
            apart = make(source, aten.view.default, (rows, [*shape_of(source)[:-1], shape_of(rows)[-1]]))
            taken = make(source, aten.slice.Tensor, (apart, *place))
            flat = make(source, aten.view.default, (taken, [math.prod(shape[:-1]), shape_of(rows)[-1]]))
            return make(source, aten.view.default, (make(base, base.target, (*bias, flat, weight)), list(shape)))
        if base.op == "call_function" and _is_row_by_row(base):  # the view moves up first, then the selection
            whole = self.repeat(base, base.args, lambda operand: self.viewed(operand, base, source))
            return None if whole is None else make(source, aten.slice.Tensor, (whole, *place))
        return None

    def rows_of(self, operand: fx.Node, place: tuple[int, int, int, int], like: fx.Node) -> fx.Node | None:
        """Returns the rows at ``place`` of an operand of ``like``; an operand that all rows share as it is."""
        shape, whole = shape_of(operand), shape_of(like)
        if shape == whole:
            return make(like, aten.slice.Tensor, (operand, *place))
        missing = len(whole) - len(shape)
        if place[0] < missing or shape[place[0] - missing] == 1:
            return operand
        return make(like, aten.slice.Tensor, (operand, place[0] - missing, *place[1:]))

    @staticmethod
    def viewed(operand: fx.Node, like: fx.Node, view: fx.Node) -> fx.Node | None:
        """Returns an operand of ``like``, with its rows in the dimensions of ``view``."""
        shape, rows = shape_of(operand), shape_of(view)[:-1]
        if len(shape) < len(shape_of(like)):
            return operand
        if shape[:-1] != shape_of(like)[:-1]:
            return None
        for known in operand.users:
            if _keeps_rows(known) and shape_of(known)[:-1] == rows and not joint_graphs.is_traced_in_backward(known):
                return known
        return make(like, aten.view.default, (operand, [*rows, shape[-1]]))

    @staticmethod
    def repeat(node: fx.Node, args: Any, change: Callable[[fx.Node], fx.Node | None]) -> fx.Node | None:
        """Returns ``node`` with each operand changed; None if one cannot be."""
        changed = {operand: change(operand) for operand in node.all_input_nodes}
        if None in changed.values():
            return None
        args, kwargs = fx.map_arg((args, node.kwargs), lambda operand: changed[operand])
        if (place := ALONG_LAST.get(op_traits.packet(node), 0)) > 0:
            args = (*args[:place], -1, *args[place + 1 :])
        return make(node, node.target, args, dict(kwargs))

    # -- paddings -----------------------------------------------------------------------------------------------------------

    def sink(self, padding: fx.Node) -> bool:
        """Moves ``padding`` behind the ops that read it. Returns False if that is impossible."""
        readers = [user for user in padding.users if user.users]
        return any([self.sink_behind(padding, reader) for reader in readers])

    def sink_behind(self, padding: fx.Node, reader: fx.Node) -> bool:
        place, gradient = _place(padding, 2, shape_of(padding)), _padded(padding)
        if _keeps_rows(reader):
            moved = [self.sink_behind_view(padding, reader, user) for user in reader.users if user.users]
            return any(moved)
        with self.graph.inserting_before(reader):
            made = None
            if op_traits.packet(reader) in (aten.add, aten.sub) and len(reader.args) == 2 and not reader.kwargs:
                terms = [n for n in reader.args if isinstance(n, fx.Node) and _is_padding(n)]
                if len(terms) == 2 and len({_place(n, 2, shape_of(n)) for n in terms}) == 1:
                    made = make(reader, reader.target, tuple(map(_padded, terms)))
            elif _keeps_zeros(reader, padding):
                made = self.repeat(reader, reader.args, lambda n: gradient if n is padding else self.rows_of(n, place, reader))
            if made is not None:
                reader.replace_all_uses_with(self.pad(made, padding, reader))
        return made is not None

    def sink_behind_view(self, padding: fx.Node, view: fx.Node, reader: fx.Node) -> bool:
        with self.graph.inserting_before(reader):
            if _keeps_zeros(reader, view):
                made = self.repeat(reader, reader.args, lambda n: padding if n is view else self.viewed(n, reader, padding))
                if made is None:
                    return False
                made = make(reader, aten.view.default, (made, list(shape_of(reader))))
            elif len(shape_of(view)) == 2 and _is_understood(reader, view):
                made = self.multiplied(padding, view, reader)
            else:
                return False
        if made is not None:
            reader.replace_all_uses_with(made)
        return True

    def multiplied(self, padding: fx.Node, view: fx.Node, reader: fx.Node) -> fx.Node | None:
        """Returns what replaces ``reader``, a product with padded rows or a sum of them. None if its readers are replaced."""
        gradient, name = _padded(padding), op_traits.packet(reader)
        flat = make(reader, aten.view.default, (gradient, [math.prod(shape_of(gradient)[:-1]), shape_of(view)[-1]]))
        if name is aten.mm:
            rows = make(reader, reader.target, (flat, reader.args[1]))
            apart = make(reader, aten.view.default, (rows, [*shape_of(gradient)[:-1], shape_of(rows)[-1]]))
            padded = self.pad(apart, padding, reader)
            return make(reader, aten.view.default, (padded, list(shape_of(reader))))
        made = make(reader, reader.target, (flat, *reader.args[1:]))
        if name is aten.sum:
            return made
        for product in list(reader.users):
            with self.graph.inserting_before(product):
                added, whole = product.args[:-2], product.args[-1]
                apart = make(product, aten.view.default, (whole, [*shape_of(padding)[:-1], shape_of(whole)[-1]]))
                taken = make(product, aten.slice.Tensor, (apart, *_place(padding, 2, shape_of(padding))))
                used = make(product, aten.view.default, (taken, [shape_of(flat)[0], shape_of(whole)[-1]]))
                product.replace_all_uses_with(make(product, product.target, (*added, made, used)))
        return None

    @staticmethod
    def pad(rows: fx.Node, padding: fx.Node, like: fx.Node) -> fx.Node:
        shape = [*shape_of(padding)[:-1], shape_of(rows)[-1]]
        if padding.target is PADDINGS[0]:
            return make(like, padding.target, (rows, shape, *padding.args[2:]))
        zeros: Any = padding.args[0]
        full = make(like, zeros.target, (shape, 0), {**zeros.kwargs, "dtype": rows.meta["val"].dtype})
        return make(like, padding.target, (full, rows, *padding.args[2:]))


def _is_understood(reader: fx.Node, gradient: fx.Node) -> bool:
    """Returns True if ``reader`` is a product with the gradient, or a sum of the gradient over rows."""
    name = op_traits.packet(reader)
    if name is aten.mm:
        return reader.args[0] is gradient and reader.args[1] is not gradient
    if name in (aten.t, aten.permute):
        return all(user.target in PRODUCTS and user.args[-2] is reader and not user.kwargs for user in reader.users)
    return name is aten.sum and len(reader.args) > 1 and list(reader.args[1]) == [0]  # type: ignore[arg-type]
