"""Collects the ops and values of a joint FX graph: which storage each node holds, and what each call reads and makes."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import CaptureError
from autoremat.capture import call_cost, communication
from autoremat.capture.source_info import origin
from autoremat.ops import op_traits
from autoremat.planner.graph.op import Role, Trait, Value
from autoremat.torch_private import higher_order, joint_graphs
from autoremat.torch_private.tensors import storage_bytes, storage_key

Alias = int | None | tuple["Alias", ...] | dict[str, "Alias"]
"""The memory that a node holds: a value number, None for no memory, or several of these by position or by name."""


SEVERAL_STREAMS = (
    "runs on a stream of its own, and what is recomputed there would need to be waited for. Keep code that switches streams "
    "out of compiled graphs: put it into a function under torch.compiler.disable"
)


@dataclass
class Builder:
    """Collects nodes in joint order. Ops are numbered afterwards, forward first."""

    joint: fx.GraphModule
    num_fwd_outputs: int
    device_type: str
    fuses: bool = False
    values: list[Value] = field(default_factory=list)
    value_nodes: list[fx.Node | None] = field(default_factory=list)
    aliases: dict[fx.Node, Alias] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    calls: list[fx.Node] = field(default_factory=list)
    reads: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    makes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    maker: dict[int, fx.Node] = field(default_factory=dict)
    unknown_workspaces: frozenset[str] = frozenset()
    may_repeat_collectives: bool = False

    def new_value(self, node: fx.Node, name: str, tensor: torch.Tensor, role: Role) -> int:
        module, source = origin(node)
        self.values.append(Value(name, storage_bytes(tensor, self.device_type), None, role, module, source))
        self.value_nodes.append(node if role is not Role.COMPUTED else None)
        number = len(self.values) - 1
        self.storages[storage_key(tensor)] = number
        if role is Role.COMPUTED:
            self.maker[number] = node
        return number

    def visit(self, node: fx.Node) -> None:
        """Adds the next node of the joint graph."""
        if node.op == "call_function":
            self.call(node)
        elif node.op in ("placeholder", "get_attr"):
            tensor: Any = node.meta.get("val")
            is_constant = node.op == "get_attr"
            if is_constant and not isinstance(tensor, torch.Tensor):
                tensor = getattr(self.joint, str(node.target), None)
            role = Role.TANGENT if not is_constant and joint_graphs.is_tangent(node) else Role.INPUT
            is_held = isinstance(tensor, torch.Tensor)
            self.aliases[node] = self.new_value(node, node.name, tensor, role) if is_held else None
        elif node.op != "output":
            raise CaptureError("a joint graph should hold only function calls")

    def call(self, node: fx.Node) -> None:
        if joint_graphs.orders_streams(node):
            raise CaptureError(SEVERAL_STREAMS)
        if node.target is operator.getitem:
            self.unpack(node)
        elif communication.awaited_call(node) is not None:
            self.complete(node)
        elif op_traits.is_view(node):
            base = next((a for a in map(self.aliases.get, node.all_input_nodes) if a is not None), None)
            result = node.meta.get("val")
            self.aliases[node] = tuple(base for _ in result) if isinstance(result, (tuple, list)) else base
        elif joint_graphs.is_sym_node(node) and not any(self.aliases.get(n) is not None for n in node.all_input_nodes):
            self.aliases[node] = None
        else:
            self.compute(node)

    def complete(self, wait: fx.Node) -> None:
        """Makes ``wait`` the holder of the results that it completes."""
        held = tuple(self.aliases.get(n) for n in wait.all_input_nodes)
        self.aliases[wait] = held if isinstance(wait.meta.get("val"), (tuple, list)) else held[0]
        for value in flatten(held):
            # The unpackings of a wait for several results become the holders later.
            self.value_nodes[value] = wait if self.aliases[wait] == value else None

    def unpack(self, node: fx.Node) -> None:
        source, index = node.args
        held = self.aliases.get(source) if isinstance(source, fx.Node) else None
        alias: Alias = held
        if isinstance(held, (tuple, dict)):
            alias = held[index]  # type: ignore[index]
        self.aliases[node] = alias
        call = communication.unpacked(node)
        call = communication.awaited_call(call) or call
        if isinstance(alias, int) and self.value_nodes[alias] is None and self.maker.get(alias) is call:
            self.value_nodes[alias] = node

    def compute(self, node: fx.Node) -> None:
        read = tuple(dict.fromkeys(v for n in node.all_input_nodes for v in flatten(self.aliases.get(n))))
        made: list[int] = []
        # A higher-order op returns no alias of an operand, although calls of one region may share the fake tensors of results.
        # A collective's result is a new value: its content differs from the operand's, or is ready only later.
        may_alias = set() if higher_order.name_of(node) or call_cost.traits_of(node) == Trait.COLLECTIVE else set(read)

        def hold(tensor: Any, name: str) -> Alias:
            if isinstance(tensor, (tuple, list)):
                return tuple(hold(t, f"{name}[{i}]") for i, t in enumerate(tensor))
            if isinstance(tensor, dict):  # results of Triton kernels, by argument name
                return {str(key): hold(t, f"{name}[{key!r}]") for key, t in tensor.items()}
            if not isinstance(tensor, torch.Tensor):
                return None
            known = self.storages.get(storage_key(tensor))
            if known is not None and known in may_alias:
                return known
            made.append(self.new_value(node, name, tensor, Role.COMPUTED))
            return made[-1]

        alias = hold(node.meta.get("val"), node.name)
        self.aliases[node] = alias
        if not made and alias is not None and call_cost.traits_of(node) == Trait.NONE:
            return  # `_unsafe_view`, `unsafe_split`: an alias that the schema does not declare
        if isinstance(alias, int) and alias in made:
            self.value_nodes[alias] = node
        self.calls.append(node)
        self.reads[node], self.makes[node] = read, tuple(made)


def written_values(calls: Iterable[fx.Node], aliases: Mapping[fx.Node, Alias]) -> set[int]:
    """Returns the values that ``calls`` write to, by their schemas."""
    found: set[int] = set()
    for node in calls:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
                found.update(flatten(aliases.get(value)))
    return found


def flatten(alias: Alias) -> Iterable[int]:
    """Yields the numbers of all values in ``alias``."""
    if isinstance(alias, (tuple, dict)):
        for part in alias.values() if isinstance(alias, dict) else alias:
            yield from flatten(part)
    elif alias is not None:
        yield alias
