"""Lists the forms of a captured graph's values: the ways to keep them between the halves, beside "as it is, on the device".

| form | values | seconds |
|---|---|---|
| host | every one below | those of the host link |
| bits | bool tensors of known size among them | the traffic of packing and of unpacking |
| shards | those that are equal on all ranks of a group, and divide among them | those of an all-gather |

A value has forms if the forward computes it and nothing writes to it. The caller must not hold it. It must be large, and one
node must hold the whole storage as a dense tensor.
"""

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

import torch
from torch import fx

from autoremat.capture.builder import written_values
from autoremat.capture.capture import Capture
from autoremat.capture.communication import Replicated, copies_nothing
from autoremat.planner.cost.links import HostLink, Links, Pattern, host_form, sent_bytes
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import BITS, SHARDS, Engine, Form, Transfer, Value
from autoremat.planner.settings import settings
from autoremat.torch_private import process_groups
from autoremat.torch_private.symbolic_sizes import most
from autoremat.torch_private.tensors import tensor_bytes

SENT = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool}
)
"""Types of elements that every backend gathers."""

GATHERED_OVER = "autoremat_gathered_over"
"""Key of ``node.meta`` for the name of the process group that gathers the shards of the value that the node holds."""


def with_forms(
    captured: Capture, names: Set[str], link: HostLink | None, replicated: Replicated | None = None, links: Links | None = None
) -> Capture:
    """Returns ``captured``, whose values have the forms ``names`` where they are possible.

    Without a ``link`` to the host, no value has the form "host". ``links`` are those of the groups over which the nodes
    ``replicated`` may be kept as shards.
    """
    graph, unit = captured.graph, captured.device.allocation_bytes
    values = list(graph.values)
    held = {*graph.forward_outputs, *graph.backward_outputs, *written_values(captured.op_nodes, captured.aliases)}
    for number in graph.forward_values:
        node, is_large = captured.value_nodes[number], values[number].bytes >= settings.least_form_bytes
        if number in held or not is_large or node is None or not _is_whole(node.meta.get("val")):
            continue
        forms = [*_forms_of(values[number], node, graph, unit, link)]
        if links is not None and replicated is not None:
            forms += _shards(node, captured, replicated.get(node, ()), links)
        values[number] = replace(values[number], forms=tuple(form for form in forms if form.name in names))
    return replace(captured, graph=replace(graph, values=tuple(values)))


def groups_of_shards(captured: Capture) -> tuple[str, ...]:
    """Returns the names of the process groups that gather shards, in the sequence of the graph."""
    values = zip(captured.graph.values, captured.value_nodes, strict=True)
    found = (node.meta[GATHERED_OVER] for value, node in values if node and any(f.name == SHARDS for f in value.forms))
    return tuple(dict.fromkeys(found))


def _is_whole(tensor: object) -> bool:
    """Returns True for a dense tensor that is its whole storage, at the largest planned sizes."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    shape, strides = ([most(size) for size in sizes] for sizes in (tensor.shape, tensor.stride()))
    if most(tensor.untyped_storage().nbytes()) != tensor_bytes(tensor):
        return False
    expected = 1  # the elements lie next to one another, in any sequence of the dimensions
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _forms_of(value: Value, node: fx.Node, graph: Graph, unit: int, link: HostLink | None) -> Iterator[Form]:
    if link is not None:
        yield host_form(value.bytes, link)
    tensor = node.meta["val"]
    if tensor.dtype is torch.bool and isinstance(tensor.numel(), int):
        packed = -(-value.bytes // 8)
        seconds = graph.machine.traffic_seconds(value.bytes, packed), graph.machine.traffic_seconds(packed, value.bytes)
        # Uncompiled, each of the ops that convert has a result of its own.
        temporary = (0, 0) if graph.machine.fuses else (2 * value.bytes + unit, value.bytes + unit)
        store, load = map(Transfer, (Engine.COMPUTE, Engine.COMPUTE), seconds, temporary)
        yield Form(BITS, store, load, device_bytes=-(-packed // unit) * unit)


def _shards(node: fx.Node, captured: Capture, groups: Iterable[str], links: Links) -> Iterator[Form]:
    """Yields the form as shards over the largest of ``groups``, if the value divides among its ranks.

    Its gather counts as if nothing ran beside it, as those of the graph do: they would share the network.
    """
    tensor, unit = node.meta["val"], captured.device.allocation_bytes
    group = max(groups, key=process_groups.size_of, default=None)
    ranks = sorted(process_groups.ranks_of(group)) if group is not None else []
    if group is None or len(ranks) < 2 or tensor.dtype not in SENT:
        return
    if not isinstance(tensor.numel(), int) or tensor.numel() % len(ranks):
        return
    node.meta[GATHERED_OVER] = group
    whole = tensor_bytes(tensor)
    shard, graph = whole // len(ranks), captured.graph
    link = links.of(len(ranks), captured.device.name)
    seconds = max(link.seconds(sent_bytes(Pattern.GATHER, whole, len(ranks))), graph.machine.traffic_seconds(shard, whole))
    store = Transfer(Engine.COMPUTE, graph.machine.traffic_seconds(shard, shard))
    load = Transfer(Engine.COMPUTE, seconds, 0 if copies_nothing(group, captured.runs_on) else whole)
    yield Form(SHARDS, store, load, device_bytes=-(-shard // unit) * unit, ranks=tuple(ranks))
