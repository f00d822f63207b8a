"""The nodes that carry out each form of a saved tensor. A further form is one more row of ``FORMS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.capture.forms import GATHERED_OVER
from autoremat.host_memory import ops
from autoremat.passes.building import Builder
from autoremat.planner.graph.op import BITS, HOST, SHARDS, Form
from autoremat.torch_private import process_groups
from autoremat.torch_private.inductor_lowering import OP

FORWARD, BACKWARD = "must_be_in_forward", "must_be_in_backward"

aten, prims, collectives = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional


class FormNodes(Protocol):
    """Creates the nodes of a form at the insertion point of a builder. ``holder`` is the node that holds the value."""

    def begin_store(self, builder: Builder, holder: fx.Node, form: Form) -> fx.Node:
        """Returns the node that begins to store the value."""

    def end_store(self, builder: Builder, holder: fx.Node, begun: fx.Node, half: str) -> fx.Node:
        """Returns the node that keeps the value, once the store is complete. ``half`` is where it ends."""
        return begun

    def begin_load(self, builder: Builder, holder: fx.Node, stored: fx.Node) -> fx.Node:
        """Returns the node that begins to load the value."""

    def end_load(self, builder: Builder, holder: fx.Node, begun: fx.Node, stored: fx.Node) -> fx.Node:
        """Returns the node that the backward reads, once the load is complete."""
        return begun


class OnHost(FormNodes):
    """A copy in the host's memory. See :mod:`autoremat.host_memory.ops`."""

    def begin_store(self, builder: Builder, holder: fx.Node, form: Form) -> fx.Node:
        return _call(builder, holder, FORWARD, "to_host", ops.copy_to_host, holder, form.host_bytes)

    def end_store(self, builder: Builder, holder: fx.Node, begun: fx.Node, half: str) -> fx.Node:
        return _call(builder, holder, half, "on_host", ops.wait_for_copy_to_host, begun, holder)

    def begin_load(self, builder: Builder, holder: fx.Node, stored: fx.Node) -> fx.Node:
        device = holder.meta["val"].device
        return _call(builder, holder, BACKWARD, "from_host", ops.copy_from_host, stored, device)

    def end_load(self, builder: Builder, holder: fx.Node, begun: fx.Node, stored: fx.Node) -> fx.Node:
        return _call(builder, holder, BACKWARD, "loaded", ops.wait_for_copy_from_host, begun, stored)


class AsBits(FormNodes):
    """Eight booleans in each byte, in the sequence of the value's memory. The calls that pack and unpack are like others."""

    def begin_store(self, builder: Builder, holder: fx.Node, form: Form) -> fx.Node:
        call, size = partial(_call, builder, holder, FORWARD, "bits"), _size(holder, form)
        flat = _flattened(call, holder)
        bytes_ = call(prims.convert_element_type.default, flat, torch.uint8)
        rows = call(aten.view.default, call(aten.constant_pad_nd.default, bytes_, [0, -size % 8]), [-1, 8])
        shifted = call(aten.bitwise_left_shift.Tensor, rows, _positions(call, holder))
        return call(aten.sum.dim_IntList, shifted, [1], dtype=torch.uint8)  # any other type is that of a copy

    def begin_load(self, builder: Builder, holder: fx.Node, stored: fx.Node) -> fx.Node:
        call, value = partial(_call, builder, holder, BACKWARD, "loaded"), holder.meta["val"]
        rows = call(aten.bitwise_right_shift.Tensor, call(aten.unsqueeze.default, stored, 1), _positions(call, holder))
        flat = call(aten.view.default, call(aten.bitwise_and.Scalar, rows, 1), [-1])
        bits = call(prims.convert_element_type.default, call(aten.slice.Tensor, flat, 0, 0, value.numel()), torch.bool)
        return _unflattened(call, bits, holder)


class AsShards(FormNodes):
    """This rank's part of the value's memory, in the sequence of the ranks of a group. They gather the parts together."""

    def begin_store(self, builder: Builder, holder: fx.Node, form: Form) -> fx.Node:
        call, size = partial(_call, builder, holder, FORWARD, "shard"), _size(holder, form)
        part = size // len(form.ranks)
        before = part * process_groups.position_in(holder.meta[GATHERED_OVER])
        # Inductor would take the copy of a slice for a part of the whole, which then stays live. It crops by a copy.
        return call(aten.constant_pad_nd.default, _flattened(call, holder), [-before, before + part - size])

    def begin_load(self, builder: Builder, holder: fx.Node, stored: fx.Node) -> fx.Node:
        ranks = holder.meta["val"].numel() // stored.meta["val"].numel()
        gather, group = collectives.all_gather_into_tensor.default, holder.meta[GATHERED_OVER]
        return _call(builder, holder, BACKWARD, "gathered", gather, stored, ranks, group)

    def end_load(self, builder: Builder, holder: fx.Node, begun: fx.Node, stored: fx.Node) -> fx.Node:
        call = partial(_call, builder, holder, BACKWARD, "loaded")
        return _unflattened(call, call(collectives.wait_tensor.default, begun), holder)


def _size(holder: fx.Node, form: Form) -> int:
    size = holder.meta["val"].numel()
    if not isinstance(size, int):
        raise PlanInvalid(f"{holder.name} has no form {form.name!r} that a graph can carry out: its size is symbolic")
    return size


def _flattened(call: Callable[..., fx.Node], holder: fx.Node) -> fx.Node:
    """Returns a node with the elements of a node's tensor in the sequence of its memory."""
    outermost_first = call(aten.permute.default, holder, _outermost_first(holder))
    return call(aten.reshape.default, outermost_first, [holder.meta["val"].numel()])


def _unflattened(call: Callable[..., fx.Node], flat: fx.Node, holder: fx.Node) -> fx.Node:
    """Returns a node with the sizes and the strides of a node's tensor, for its elements in the sequence of its memory."""
    order = _outermost_first(holder)
    dense = call(aten.view.default, flat, [holder.meta["val"].size(dimension) for dimension in order])
    return call(aten.permute.default, dense, [order.index(dimension) for dimension in range(len(order))])


def _outermost_first(holder: fx.Node) -> list[int]:
    value = holder.meta["val"]
    return sorted(range(value.dim()), key=lambda dimension: -int(value.stride(dimension)))


def _positions(call: Callable[..., fx.Node], holder: fx.Node) -> fx.Node:
    device = holder.meta["val"].device
    return call(prims.iota.default, 8, start=0, step=1, dtype=torch.uint8, device=device, requires_grad=False)


def _call(builder: Builder, holder: fx.Node, half: str, suffix: str, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
    node = builder.make(holder, target, arguments, keywords, suffix)
    for of_the_holder in (OP, "recompute", "saved_tensor_with_no_vc_check"):
        node.meta.pop(of_the_holder, None)
    node.meta["partitioner_tag"] = half
    return node


FORMS: Mapping[str, FormNodes] = {HOST: OnHost(), BITS: AsBits(), SHARDS: AsShards()}
"""The nodes of each form, by its name."""
