"""Builds a :class:`~autoremat.planner.graph.graph.Graph` from a joint FX graph, with maps back to FX nodes.

Views, tuple unpacking and symbolic arithmetic are not ops. They are *helpers*, which cost nothing and are recomputed wherever
they are needed. Every other call becomes an op, a collective together with its waits
(:mod:`autoremat.capture.communication`). Every storage that an op allocates becomes a value.

The joint graph is traced forward first. The backward begins with the first op that depends on a tangent or that autograd
traced. Later ops belong to it too, except those that the forward's outputs or effects need. A custom op that is not declared
pure also begins the backward, if it follows the forward's last op.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import CaptureError, OptionWarning
from autoremat.basics.warn import warn_user
from autoremat.capture import call_cost, communication
from autoremat.capture.builder import Alias, Builder, flatten, written_values
from autoremat.capture.pricing import Pricer, Prices
from autoremat.capture.source_info import decomposed_from, names, origin, scopes
from autoremat.ops import op_traits
from autoremat.ops.op_traits import BATCH_NORM_RESULTS, averages_of, ends_pass
from autoremat.planner.cost.device import Device, Pricing, cpu_device, cuda_device
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint, Op, Role, Trait, Value
from autoremat.torch_private import joint_graphs
from autoremat.torch_private.tensors import device_of, tensor_bytes
from autoremat.workspaces.measurement import one_graph


@dataclass(frozen=True)
class Capture:
    """The planner's graph, and the FX node of each op and value."""

    joint: fx.GraphModule
    graph: Graph
    op_nodes: tuple[fx.Node, ...]
    value_nodes: tuple[fx.Node | None, ...]
    """The node that holds exactly the value: its op, the unpacking of its op, or a placeholder. None for an unread value."""
    aliases: dict[fx.Node, Alias]
    num_fwd_outputs: int
    device: Device
    runs_on: str
    """The type of the planned device. The trace may run on another device that represents it."""
    pricing: Pricing
    """Where the seconds of the ops come from."""
    unknown_workspaces: tuple[str, ...] = ()
    """Kernels with unknown workspaces. For these, an estimate counts, or 0."""


def may_train(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Returns True if autograd can request a backward of a graph that Dynamo captured."""
    tensors = [*inputs, *gm.parameters()]
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def device_of_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> torch.device:
    """Returns the device of a graph that Dynamo captured: the first accelerator that holds one of its tensors, else the CPU."""
    results = [node.meta.get("example_value") for node in gm.graph.nodes]
    return device_of(t for t in (*inputs, *gm.parameters(), *results) if isinstance(t, torch.Tensor))


def device_of_joint(joint: fx.GraphModule) -> torch.device:
    """Returns the device of a step: the first accelerator that holds a value of its joint graph, else the CPU."""
    values = (node.meta.get("val") for node in joint.graph.nodes)
    return device_of(value for value in values if isinstance(value, torch.Tensor))


def device_rates(device: torch.device, cuda_name: str | None) -> Device:
    """Returns the rates of ``device``, or of the CUDA device ``cuda_name``.

    Warns with ``OptionWarning``, once for each kind of device, if that is neither a CPU nor CUDA.
    """
    if device.type == "cpu" and cuda_name is None:
        return cpu_device(torch.get_num_threads())
    if cuda_name is None:
        cuda_name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type
    if device.type not in ("cpu", "cuda"):
        _warn_of_kind(device.type)
    return cuda_device(cuda_name)


@cache
def _warn_of_kind(kind: str) -> None:
    warn_user(
        f"the device {kind} is planned as a middling CUDA card: seconds, workspaces and the peak are a guess, for "
        "autoremat has been tried on CPUs and CUDA cards only. Compare the step's peak with the allocator's own figure",
        OptionWarning,
    )


@contextlib.contextmanager
def _naming(node: fx.Node) -> Iterator[None]:
    """Turns any error about ``node`` into a ``CaptureError`` with the op's name and its source."""
    try:
        yield
    except Exception as error:  # formulas and metadata of unforeseen ops can raise any error
        module, source = origin(node)
        where = f" of {module or 'the model'} at {source or 'an unknown line'}"
        raise CaptureError(f"{node.op} {node.target} ({node.name}){where}: {type(error).__name__}: {error}") from error


def _is_backward(builder: Builder, required: set[fx.Node]) -> dict[fx.Node, bool]:
    """Returns, for each call, True if it belongs to the backward. The module's docstring has the rule."""
    tangent_values = {v for v, value in enumerate(builder.values) if value.role is Role.TANGENT}
    found: dict[fx.Node, bool] = {}
    begun = False
    of_forward = (i for i, n in enumerate(builder.calls) if n in required or joint_graphs.is_traced_in_forward(n))
    last_of_forward = max(of_forward, default=-1)
    for index, node in enumerate(builder.calls):
        depends = any(v in tangent_values for v in builder.reads[node]) or joint_graphs.must_be_in_backward(node)
        if depends:
            tangent_values.update(builder.makes[node])
            begun = True
        begun = begun or (joint_graphs.is_traced_in_backward(node) and node not in required)
        # A function with its own backward may call a custom op there before it reads a gradient.
        begun = begun or (index > last_of_forward and Trait.OPAQUE in call_cost.traits_of(node))
        found[node] = depends or (begun and node not in required)
    return found


def _required_in_forward(builder: Builder) -> set[fx.Node]:
    outputs, _ = joint_graphs.joint_outputs(builder.joint, builder.num_fwd_outputs)
    returned = [n for n in outputs if isinstance(n, fx.Node) and not joint_graphs.must_be_in_backward(n)]
    return joint_graphs.needed_for([*returned, *filter(_pins, builder.calls)])


def _pins(node: fx.Node) -> bool:
    """Returns True if the forward must run the node for its effect."""
    if joint_graphs.is_traced_in_backward(node) or joint_graphs.must_be_in_backward(node):
        return False
    effects = Trait.MUTATING | Trait.EFFECTFUL | Trait.COLLECTIVE
    return joint_graphs.must_be_in_forward(node) or bool(call_cost.traits_of(node) & effects)


def _overwritten_inputs(builder: Builder) -> set[int]:
    """Returns the inputs that are written in the forward or after it, so that the backward would read changed data."""
    written = joint_graphs.inputs_written_afterwards(builder.joint)
    found = {value for node in written for value in flatten(builder.aliases.get(node))}
    return found | written_values(builder.calls, builder.aliases)


def _read_again(builder: Builder, node: fx.Node) -> set[int]:
    """Returns the values that a second run of the node reads. Nobody else may read the new averages of a batch norm."""
    averages = {value for average in averages_of(node) for value in flatten(builder.aliases.get(average))}
    moved = set(builder.makes[node][BATCH_NORM_RESULTS:])
    readers = (reader for reader, read in builder.reads.items() if not moved.isdisjoint(read))
    is_free = all(joint_graphs.must_be_in_forward(reader) for reader in readers)
    return set(builder.reads[node]) - (averages if is_free else set())


def _op(
    builder: Builder,
    node: fx.Node,
    backward: bool,
    overwritten: set[int],
    pricer: Pricer,
    runs_on: str,
    named: tuple[str, ...],
) -> Op:
    cost = call_cost.cost_of(node, builder.device_type, runs_on, builder.fuses)
    builder.unknown_workspaces |= cost.unknown
    for value, excess in zip(builder.makes[node], cost.excess_bytes, strict=False):
        builder.values[value] = replace(builder.values[value], bytes=builder.values[value].bytes + excess)
    traits = call_cost.traits_of(node)
    if builder.may_repeat_collectives and communication.is_gathering(node):
        traits = traits & ~Trait.COLLECTIVE | Trait.GATHER
    if overwritten.intersection(_read_again(builder, node)):
        traits |= Trait.READS_MUTATED_INPUT
    module, source = origin(node)
    op = Op(
        node.name, str(node.target), builder.reads[node], builder.makes[node], not backward, 0.0, cost.flops,
        cost.moved_bytes, cost.workspace_bytes, op_traits.kind_of(node, runs_on), traits, _order_of(node), module,
        source,
        () if backward else scopes(node), decomposed_from(node), named, _in_place(builder, node),
        op_traits.inlining_of(node, runs_on), ends_pass=ends_pass(node, pricer.device.multiprocessors),
        demanded=op_traits.demanded(node),
    )  # fmt: skip
    return pricer.price(node, op)


def _order_of(node: fx.Node) -> Constraint:
    """Returns the model's constraint on the op. A collective runs again only if the model orders that for its waits too."""
    orders = {op_traits.order_of(part) for part in (node, *communication.waits_for(node))}
    return orders.pop() if len(orders) == 1 else Constraint.SAVE if Constraint.SAVE in orders else Constraint.NONE


def _in_place(builder: Builder, node: fx.Node) -> tuple[int, ...]:
    """Returns the values that are read at the positions that the node writes, if it has a single result."""
    if len(builder.makes[node]) != 1:
        return ()
    found: dict[int, None] = {}
    for operand in op_traits.works_in_place(node):
        value, tensor = builder.aliases.get(operand), operand.meta["val"]
        if isinstance(value, int) and builder.values[value].bytes == tensor_bytes(tensor):
            found[value] = None
    return tuple(found)


def runs_on_type(joint: fx.GraphModule, cuda_name: str | None) -> str:
    """Returns the type of the planned device: CUDA if a card is named, else the type of the device of the trace."""
    return device_of_joint(joint).type if cuda_name is None else "cuda"


def capture(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    fuses: bool,
    cuda_name: str | None = None,
    may_repeat_collectives: bool = False,
    prices: Prices | None = None,
) -> Capture:
    """Returns the priced graph of a prepared joint module whose first ``num_fwd_outputs`` outputs are the forward's.

    With ``cuda_name``, the traced device represents the CUDA device of that name. With ``may_repeat_collectives``, all ranks
    follow the plan, so an all-gather may run again. Raises ``CaptureError``, with the node's name, if a node is not understood.
    """
    device = device_of_joint(joint)
    builder = Builder(joint, num_fwd_outputs, device.type, fuses, may_repeat_collectives=may_repeat_collectives)
    for node in joint.graph.nodes:
        with _naming(node):
            builder.visit(node)
    required = _required_in_forward(builder)
    backward = _is_backward(builder, required)
    ordered = sorted(builder.calls, key=lambda n: backward[n])  # stable: joint order within each half
    number = {node: index for index, node in enumerate(ordered)}
    pricer = Pricer(prices or Prices(), device, device_rates(device, cuda_name), fuses)
    runs_on = runs_on_type(joint, cuda_name)
    overwritten = _overwritten_inputs(builder)

    def computed(nodes: list[Any]) -> tuple[int, ...]:
        held = (v for n in nodes if isinstance(n, fx.Node) for v in flatten(builder.aliases.get(n)))
        return tuple(dict.fromkeys(v for v in held if builder.values[v].role is Role.COMPUTED))

    forward_outputs, backward_outputs = joint_graphs.joint_outputs(joint, num_fwd_outputs)
    last = {names(node)[0]: node for node in ordered if not backward[node]}  # by the model's call
    named = {node: names(node)[1] for call, node in last.items() if call}
    ops = []
    with one_graph():
        for node in ordered:
            with _naming(node):
                ops.append(_op(builder, node, backward[node], overwritten, pricer, runs_on, named.get(node, ())))
    graph = Graph(
        ops=tuple(ops),
        values=_values(builder, number, pricer.device.allocation_bytes),
        forward_outputs=computed(forward_outputs),
        backward_outputs=computed(backward_outputs),
        must_run=tuple(number[n] for n in ordered if not backward[n] and _pins(n)),
        machine=pricer.machine(fuses and runs_on == "cpu"),
    )
    nodes, unknown = tuple(builder.value_nodes), tuple(sorted(builder.unknown_workspaces))
    return Capture(
        joint, graph, tuple(ordered), nodes, builder.aliases, num_fwd_outputs, pricer.device, runs_on, pricer.pricing(), unknown
    )


def _values(builder: Builder, number: Mapping[fx.Node, int], unit: int) -> tuple[Value, ...]:
    """Returns the values, whose bytes are multiples of ``unit``. Ops have a ``number``."""
    return tuple(
        Value(v.name, -(-v.bytes // unit) * unit, number[builder.maker[i]] if i in builder.maker else None, v.role, v.module,
              v.source)
        for i, v in enumerate(builder.values)
    )  # fmt: skip
