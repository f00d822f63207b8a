"""Lists the forms of a captured graph's values: the ways to keep them between the halves, beside "as it is, on the device".

| form | values | seconds |
|---|---|---|
| host | every one below | those of the host link |
| bits | bool tensors of known size among them | the traffic of packing and of unpacking |

A value has forms if the forward computes it and nothing writes to it. The caller must not hold it. It must be large, and one
node must hold the whole storage as a dense tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

import torch
from torch import fx

from autoremat.capture.builder import written_values
from autoremat.capture.capture import Capture
from autoremat.ops.tensors import tensor_bytes
from autoremat.planner.cost.host_link import HostLink, host_form
from autoremat.planner.graph.forms import BITS, Engine, Form, Transfer
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Value
from autoremat.planner.settings import SETTINGS
from autoremat.torch_private.symbolic_sizes import most


def with_forms(captured: Capture, names: Set[str], link: HostLink | None) -> Capture:
    """Returns ``captured``, whose values have the forms ``names`` where they are possible.

    Without a ``link`` to the host, no value has the form "host".
    """
    graph, unit = captured.graph, captured.device.allocation_bytes
    values = list(graph.values)
    for number, node in _storable(captured):
        forms = _forms_of(values[number], node, graph, unit, link)
        values[number] = replace(values[number], forms=tuple(form for form in forms if form.name in names))
    return replace(captured, graph=replace(graph, values=tuple(values)))


def _storable(captured: Capture) -> Iterator[tuple[int, fx.Node]]:
    """Yields the values that may have forms, each with the node that holds it."""
    graph = captured.graph
    held = {*graph.forward_outputs, *graph.backward_outputs, *written_values(captured.op_nodes, captured.aliases)}
    for number in graph.forward_values:
        node = captured.value_nodes[number]
        is_large = graph.values[number].bytes >= SETTINGS.forms.minimum_bytes
        if is_large and number not in held and node is not None and _is_whole(node.meta.get("val")):
            yield number, node


def _is_whole(tensor: object) -> bool:
    """Returns True for a dense tensor that is its whole storage, at the largest planned sizes."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    shape, strides = ([most(size) for size in sizes] for sizes in (tensor.shape, tensor.stride()))
    return most(tensor.untyped_storage().nbytes()) == tensor_bytes(tensor) and _fills(shape, strides)


def _fills(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Returns True if the elements of a tensor lie next to one another, in any sequence of its dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _forms_of(value: Value, node: fx.Node, graph: Graph, unit: int, link: HostLink | None) -> Iterator[Form]:
    """Yields all forms that are possible for a value."""
    if link is not None:
        yield host_form(value.bytes, link)
    tensor = node.meta["val"]
    if tensor.dtype is torch.bool and isinstance(tensor.numel(), int):
        packed = -(-value.bytes // 8)
        seconds = (value.bytes + packed) * graph.saving_seconds_per_byte / 2  # one reads what the other writes
        # Uncompiled, each of the ops that convert has a result of its own.
        temporary = (0, 0) if graph.fuses else (2 * value.bytes + unit, value.bytes + unit)
        store, load = (Transfer(Engine.COMPUTE, seconds, bytes_) for bytes_ in temporary)
        yield Form(BITS, store, load, device_bytes=-(-packed // unit) * unit)
