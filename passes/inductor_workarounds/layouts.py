"""Layouts of tensors that Inductor chooses: copies for convolutions, traced strides, and one buffer for several readers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autoremat.ops.op_traits import MATERIALIZED, facts, is_view, kind_of, packet
from autoremat.passes.building import make
from autoremat.planner.graph.op import Kind
from autoremat.torch_private import compilers
from autoremat.torch_private.layouts import LAYOUT_COPY
from autoremat.torch_private.symbolic_sizes import size_hint

aten = torch.ops.aten

OPERANDS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (1, 2)}
"""Positions of image and weight among the arguments."""

CHANNELS_LAST = (0, 2, 3, 1)
"""The dimensions in their sequence in memory: images, rows, columns, channels."""


def state_layout_copies(joint: fx.GraphModule) -> int:
    """States the copies of images and weights that Inductor makes for convolutions on a CPU, so that the planner sees them.

    Inductor runs convolutions of images channels-last there. In the forward, it copies inputs that lie otherwise into that
    layout, and it saves the copies for the backward. As ops of the joint graph, the copies are planned: a budget may have them
    made again from the inputs. Before:

        result                      = convolution(image, weight)
        for_image, for_weight, _    = convolution_backward(gradient, image, weight)

    After, if the weight is an input that is not channels-last:

        weight_laid                 = clone(weight, memory_format=channels_last)
        result                      = convolution(image, weight_laid)
        for_image, for_weight, _    = convolution_backward(gradient, image, weight_laid)

    Results keep the layouts with which they were traced (:func:`.laid_out_as_planned`): callers of the forward rely on them.
    Returns the number of copies.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(joint.graph.nodes):
        for position in OPERANDS.get(node.target, ()):
            operand = node.args[position]
            if node.target is aten.convolution.default and operand not in copies and _is_copied(operand):
                with joint.graph.inserting_before(node):
                    layout = {"memory_format": torch.channels_last}
                    copy = make(node, aten.clone.default, (operand,), layout, operand.name)
                copy.meta[LAYOUT_COPY] = True
                for key in ("recompute", "original_aten"):  # what is ordered for the convolution is not for the copy
                    copy.meta.pop(key, None)
                copies[operand] = copy
            if operand in copies:
                node.update_arg(position, copies[operand])
    return len(copies)


def _is_copied(operand: Any) -> bool:
    traced = operand.meta.get("val") if isinstance(operand, fx.Node) and operand.op == "placeholder" else None
    if not isinstance(traced, torch.Tensor) or traced.layout != torch.strided or traced.dim() != 4:
        return False
    # Hints are compared, because comparisons of symbolic numbers would add guards.
    strides = [size_hint(traced.stride()[dim]) for dim in CHANNELS_LAST if size_hint(traced.shape[dim]) > 1]
    return strides != sorted(strides, reverse=True)


def preserve_strides(backward: fx.GraphModule) -> int:
    """Gives tensors that are read by position in memory, as by ``as_strided``, the layout with which they were traced.

    Inductor chooses the layout of recomputed tensors after the layout of their inputs, which the forward's code determines.
    Images may become channels-last, although they were traced as contiguous. Only ops that use strides explicitly observe that.

         relu_recompute ── as_strided        becomes        relu_recompute ── clone, contiguous ── as_strided

    If the layout equals the traced one, Inductor drops the copy. Returns the number of copies.
    """
    inserted = 0
    for node in [n for n in backward.graph.nodes if facts(n).by_strides]:
        read = whole = node.args[0]
        if packet(node) is aten.as_strided:  # which reads the storage of its operand
            while whole.op == "call_function" and is_view(whole) and isinstance(whole.args[0], fx.Node):
                whole = whole.args[0]
        if whole.op != "call_function":
            continue  # the forward saves it, in the layout with which it was traced
        traced = whole.meta["val"]
        with backward.graph.inserting_before(node):
            if traced.is_contiguous():
                laid = backward.graph.call_function(aten.clone.default, (whole,), {"memory_format": torch.contiguous_format})
            elif all(isinstance(step, int) for step in traced.stride()):
                laid = backward.graph.call_function(compilers.force_stride_order(), (whole, list(traced.stride())))
            else:
                continue
        laid.meta = {"val": traced}
        if whole is read:
            node.args = (laid, *node.args[1:])
        else:
            # The view's offset in its storage is implicit, but the copy contains the whole storage.
            size, stride, *offset = node.args[1:]
            start = offset[0] if offset and offset[0] is not None else read.meta["val"].storage_offset()
            node.args = (laid, size, stride, start)
        inserted += 1
    return inserted


def materialize_shared(half: fx.GraphModule) -> int:
    """Marks pointwise results that several attentions read, or that an extern kernel reads through a view beside other readers.

    An extern kernel needs its operands as buffers. It may read a pointwise result through a view or in strides of its own
    choice, as an attention reads its mask. Inductor then materialises that view anew for each such kernel: as many masks as
    layers, all written by one kernel before the first use. Other readers recompute the result from its own operands, which stay
    live for them. A marked result is materialised once. Returns their number.
    """
    marked = 0
    for node in half.graph.nodes:
        if node.op == "call_function" and kind_of(node) is Kind.POINTWISE:
            readers = dict(_readers(node, seen_through=False))
            attentions = sum(facts(reader).is_attention for reader in readers)
            viewed = any(through and kind_of(reader) is Kind.EXTERN for reader, through in readers.items())
            if attentions > 1 or (viewed and len(readers) > 1):
                node.meta[MATERIALIZED] = True
                marked += 1
    return marked


def _readers(node: fx.Node, seen_through: bool) -> Iterator[tuple[fx.Node, bool]]:
    """Yields the calls that read the node's result, with True if they read it through a view."""
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield from _readers(user, True)
        elif user.op == "call_function":
            yield user, seen_through
