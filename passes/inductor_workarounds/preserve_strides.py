"""Gives values that are read by position in memory, as ``as_strided`` does, the layout that they were traced with.

A recomputed value lies as the code generator finds best, after its inputs, which lie as the forward's code left them: images
channels last, whatever they were. Nothing minds but who counts in strides.

         relu_recompute ── as_strided        becomes        relu_recompute ── clone, contiguous ── as_strided

Where the layout is the traced one anyway, the code generator drops the copy.
"""

from __future__ import annotations

import torch
from torch import fx

from autoremat.ops.op_traits import BY_STRIDES, is_view, packet
from autoremat.torch_private import compat

aten = torch.ops.aten


def preserve_strides(backward: fx.GraphModule) -> None:
    """Lay out what ``op_rules.BY_STRIDES`` read first, in place."""
    for node in [n for n in backward.graph.nodes if packet(n) in BY_STRIDES]:
        read = node.args[0]
        whole = _storage_of(read) if packet(node) is aten.as_strided else read
        laid = _laid_as_traced(backward.graph, node, whole)
        if laid is not None and whole is not read:
            # Where a view begins in its storage is part of what it says; the copy has the whole storage.
            size, stride, *offset = node.args[1:]
            start = offset[0] if offset and offset[0] is not None else read.meta["val"].storage_offset()
            node.args = (laid, size, stride, start)
        elif laid is not None:
            node.args = (laid, *node.args[1:])
    backward.recompile()


def _storage_of(node: fx.Node) -> fx.Node:
    """What has the storage that ``node`` is a view of."""
    while node.op == "call_function" and is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _laid_as_traced(graph: fx.Graph, reader: fx.Node, value: fx.Node) -> fx.Node | None:
    """A copy of ``value`` for ``reader`` in its traced layout; None if that cannot be said, or ``value`` is not made here: what
    the forward saves for such a reader lies as traced."""
    if value.op != "call_function":
        return None
    traced = value.meta["val"]
    with graph.inserting_before(reader):
        if traced.is_contiguous():
            laid = graph.call_function(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        elif all(isinstance(step, int) for step in traced.stride()):
            laid = graph.call_function(compat.force_stride_order(), (value, list(traced.stride())))
        else:
            return None
    laid.meta = {"val": traced}
    return laid
