"""Gives tensors that are read by position in memory, as by ``as_strided``, the layout with which they were traced.

Inductor chooses the layout of recomputed tensors after the layout of their inputs, which the forward's code determines. Images
may become channels-last, although they were traced as contiguous. Only ops that use strides explicitly observe the difference.

         relu_recompute ── as_strided        becomes        relu_recompute ── clone, contiguous ── as_strided

If the layout equals the traced one, Inductor drops the copy. The pass applies to all supported versions of torch.
"""

from __future__ import annotations

import torch
from torch import fx

from autoremat.ops.op_traits import facts, is_view, packet
from autoremat.torch_private import compilers

aten = torch.ops.aten


def preserve_strides(backward: fx.GraphModule) -> int:
    """Inserts copies in the traced layout, in place, before the ops whose result depends on strides. Returns their number."""
    inserted = 0
    for node in [n for n in backward.graph.nodes if facts(n).by_strides]:
        read = node.args[0]
        whole = _storage_of(read) if packet(node) is aten.as_strided else read
        laid = _laid_as_traced(backward.graph, node, whole)
        if laid is not None and whole is not read:
            # The view's offset in its storage is implicit, but the copy contains the whole storage.
            size, stride, *offset = node.args[1:]
            start = offset[0] if offset and offset[0] is not None else read.meta["val"].storage_offset()
            node.args = (laid, size, stride, start)
        elif laid is not None:
            node.args = (laid, *node.args[1:])
        inserted += laid is not None
    return inserted


def _storage_of(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _laid_as_traced(graph: fx.Graph, reader: fx.Node, value: fx.Node) -> fx.Node | None:
    """Returns None for symbolic strides, and for a ``value`` that the forward saves, which has the layout already."""
    if value.op != "call_function":
        return None
    traced = value.meta["val"]
    with graph.inserting_before(reader):
        if traced.is_contiguous():
            laid = graph.call_function(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        elif all(isinstance(step, int) for step in traced.stride()):
            laid = graph.call_function(compilers.force_stride_order(), (value, list(traced.stride())))
        else:
            return None
    laid.meta = {"val": traced}
    return laid
