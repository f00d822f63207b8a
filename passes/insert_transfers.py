"""Inserts the stays of a schedule into the joint graph: each store in the forward, each load in the backward.

Before, a saved value crosses from the forward into the backward as it is. Afterwards what its form keeps of it crosses:

         tanh ── mm ── ... ── tanh_backward(tanh)
    becomes, for a stay on the host,
         tanh ── tanh_to_host ── mm ── tanh_on_host(tanh_to_host, tanh) ── ...
         ... ── tanh_from_host(tanh_on_host) ── mm_1 ── tanh_loaded(tanh_from_host, tanh_on_host) ── tanh_backward(tanh_loaded)

A store may also end in the backward. Then `tanh_to_host` crosses, and `tanh` beside it until the wait.

The loads are inserted along with the recomputation, because recomputed ops read them too.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.capture import communication
from autoremat.capture.capture import Capture
from autoremat.capture.forms import GATHERED_OVER
from autoremat.host_memory import ops
from autoremat.passes.building import make
from autoremat.planner.graph.op import BITS, HOST, SHARDS, Form
from autoremat.planner.graph.schedule import Schedule, Stay
from autoremat.torch_private import joint_graphs, process_groups
from autoremat.torch_private.inductor_lowering import OP

STORED = "autoremat_stored_value"
"""Key of ``node.meta`` for the number of the value that the node keeps in its form from the forward to the backward."""

FORWARD, BACKWARD = "must_be_in_forward", "must_be_in_backward"

aten, prims, collectives = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional


@dataclass(frozen=True)
class FormNodes:
    """Creates the nodes of a stay at the insertion point: ``begin_store`` and ``begin_load``, and here their ends."""

    stay: Stay
    form: Form
    holder: fx.Node
    """The node that holds the value in the forward."""

    def call(self, half: str, suffix: str, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        """Returns a new call, which runs in ``half`` of the step."""
        node = make(self.holder, target, arguments, keywords, suffix)
        for of_the_holder in (OP, "recompute", "saved_tensor_with_no_vc_check"):
            node.meta.pop(of_the_holder, None)
        node.meta["partitioner_tag"] = half
        return node

    def end_store(self, begun: fx.Node, half: str) -> fx.Node:
        """Returns the node that keeps the value, once the store is complete. ``half`` is where it ends."""
        return begun

    def end_load(self, begun: fx.Node, stored: fx.Node) -> fx.Node:
        """Returns the node that the backward reads, once the load is complete."""
        return begun


class OnHost(FormNodes):
    """A copy in the host's memory. See :mod:`autoremat.host_memory.ops`."""

    def begin_store(self) -> fx.Node:
        return self.call(FORWARD, "to_host", ops.copy_to_host, self.holder, self.form.host_bytes)

    def end_store(self, begun: fx.Node, half: str) -> fx.Node:
        return self.call(half, "on_host", ops.wait_for_copy_to_host, begun, self.holder)

    def begin_load(self, stored: fx.Node) -> fx.Node:
        return self.call(BACKWARD, "from_host", ops.copy_from_host, stored, self.holder.meta["val"].device)

    def end_load(self, begun: fx.Node, stored: fx.Node) -> fx.Node:
        return self.call(BACKWARD, "loaded", ops.wait_for_copy_from_host, begun, stored)


class AsBits(FormNodes):
    """Eight booleans in each byte, in the sequence of the value's memory. The calls that pack and unpack are like others."""

    def begin_store(self) -> fx.Node:
        call, size = partial(self.call, FORWARD, "bits"), _size(self.holder, self.form)
        bytes_ = call(prims.convert_element_type.default, _flattened(call, self.holder), torch.uint8)
        rows = call(aten.view.default, call(aten.constant_pad_nd.default, bytes_, [0, -size % 8]), [-1, 8])
        shifted = call(aten.bitwise_left_shift.Tensor, rows, _positions(call, self.holder))
        return call(aten.sum.dim_IntList, shifted, [1], dtype=torch.uint8)  # any other type is that of a copy

    def begin_load(self, stored: fx.Node) -> fx.Node:
        call, value = partial(self.call, BACKWARD, "loaded"), self.holder.meta["val"]
        rows = call(aten.bitwise_right_shift.Tensor, call(aten.unsqueeze.default, stored, 1), _positions(call, self.holder))
        flat = call(aten.view.default, call(aten.bitwise_and.Scalar, rows, 1), [-1])
        bits = call(prims.convert_element_type.default, call(aten.slice.Tensor, flat, 0, 0, value.numel()), torch.bool)
        return _unflattened(call, bits, self.holder)


class AsShards(FormNodes):
    """This rank's part of the value's memory, in the sequence of the ranks of a group. They gather the parts together."""

    def begin_store(self) -> fx.Node:
        call, size = partial(self.call, FORWARD, "shard"), _size(self.holder, self.form)
        part = size // len(self.form.ranks)
        before = part * process_groups.position_in(self.holder.meta[GATHERED_OVER])
        # Inductor would take the copy of a slice for a part of the whole, which then stays live. It crops by a copy.
        return call(aten.constant_pad_nd.default, _flattened(call, self.holder), [-before, before + part - size])

    def begin_load(self, stored: fx.Node) -> fx.Node:
        ranks = self.holder.meta["val"].numel() // stored.meta["val"].numel()
        gather, group = collectives.all_gather_into_tensor.default, self.holder.meta[GATHERED_OVER]
        return self.call(BACKWARD, "gathered", gather, stored, ranks, group)

    def end_load(self, begun: fx.Node, stored: fx.Node) -> fx.Node:
        call = partial(self.call, BACKWARD, "loaded")
        return _unflattened(call, call(collectives.wait_tensor.default, begun), self.holder)


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


FORMS: Mapping[str, type[OnHost | AsBits | AsShards]] = {HOST: OnHost, BITS: AsBits, SHARDS: AsShards}
"""What makes the nodes of each form, by its name."""


def _transfers(capture: Capture, schedule: Schedule) -> list[OnHost | AsBits | AsShards]:
    found: list[OnHost | AsBits | AsShards] = []
    for stay in schedule.stays:
        value, holder = capture.graph.values[stay.value], capture.value_nodes[stay.value]
        if holder is None or stay.form not in FORMS:
            raise PlanInvalid(f"{value.name} has no form {stay.form!r} that a graph can carry out: it may have {sorted(FORMS)}")
        found.append(FORMS[stay.form](stay, value.form(stay.form), holder))
    return found


def insert_stores(joint: fx.GraphModule, capture: Capture, schedule: Schedule) -> int:
    """Inserts the stores of ``schedule`` into the forward of ``joint``, in place. Returns their number.

    ``capture`` is that of ``joint``. Raises ``PlanInvalid`` for a form that no graph can carry out.
    """
    assert capture.joint is joint
    transfers = _transfers(capture, schedule)
    _gather_forward(capture, [one.holder for one in transfers])
    order = list(joint.graph.nodes)
    place = {node: number for number, node in enumerate(order)}
    begun: dict[int, fx.Node] = {}
    latest = 0
    # After the same execution, stores begin before others are waited for.
    due = [(one.stay.store, False, one) for one in transfers]
    due += [(one.stay.free, True, one) for one in transfers if one.stay.free < len(schedule.forward)]
    for position, is_end, one in sorted(due, key=lambda due: (due[0], due[1], due[2].stay.value)):
        call, value = capture.op_nodes[schedule.forward[position]], one.stay.value
        latest = max(latest, place[one.holder], *(place[node] for node in (call, *communication.waits_for(call))))
        with joint.graph.inserting_before(order[latest + 1]):
            if is_end:
                begun[value] = one.end_store(begun[value], FORWARD)
            else:
                begun[value] = one.begin_store()
    for value, node in begun.items():
        node.meta[STORED] = value
    return len(transfers)


def _gather_forward(capture: Capture, holders: list[fx.Node]) -> None:
    """Moves what the forward runs, and ``holders``, before the backward: ops that write to inputs are traced later."""
    begin = next(iter(capture.op_nodes[capture.graph.num_forward :]), capture.joint.graph.output_node())
    calls = [node for call in capture.op_nodes[: capture.graph.num_forward] for node in (call, *communication.waits_for(call))]
    needed = joint_graphs.needed_for([*calls, *holders])
    late = list(itertools.takewhile(lambda node: node is not begin, reversed(capture.joint.graph.nodes)))
    for node in reversed(late):
        if node in needed:
            begin.prepend(node)


class Loads:
    """The loads of a schedule, and the ends of stores in its backward. They are inserted on the way through the backward."""

    def __init__(self, capture: Capture, schedule: Schedule) -> None:
        stored = stored_values(capture.joint)
        self.transfers = _transfers(capture, schedule)
        self.stored = {one.stay.value: stored[one.stay.value] for one in self.transfers}
        self.begun: dict[int, fx.Node] = {}
        self.border = len(schedule.forward)

    def before(self, position: int, cursor: fx.Node) -> dict[int, fx.Node]:
        """Inserts what is due before the execution at ``position``, and before ``cursor``.

        Returns the nodes that hold the values whose loads are complete there, by value.
        """
        complete: dict[int, fx.Node] = {}
        with cursor.graph.inserting_before(cursor):
            for one in self.transfers:
                if self.border <= one.stay.free == position - 1:
                    self.stored[one.stay.value] = one.end_store(self.stored[one.stay.value], BACKWARD)
            for one in self.transfers:
                if one.stay.load == position:
                    self.begun[one.stay.value] = one.begin_load(self.stored[one.stay.value])
            for one in self.transfers:
                if one.stay.need == position:
                    value = one.stay.value
                    complete[value] = one.end_load(self.begun[value], self.stored[value])
        return complete


def stored_values(joint: fx.GraphModule) -> dict[int, fx.Node]:
    """Returns the nodes that keep stored values from the forward to the backward, by value."""
    return {node.meta[STORED]: node for node in joint.graph.nodes if STORED in node.meta}
