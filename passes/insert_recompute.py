"""Inserts the recomputation that a schedule asks for into the joint graph, each clone just before its need.

Before: the joint graph, every node once. After: forward nodes as they were; then, in schedule order, the backward's nodes
with clones of recomputed forward nodes between them, every backward read redirected to the newest copy of what it reads.
Helpers (views, tuple unpacking) between a copy and its reader are cloned with it.

         mm ── relu ── mm_1 ── ... ── relu_backward(relu)
    becomes, if relu is recomputed,
         mm ── relu ── mm_1 ── ... ── relu_recompute(mm) ── relu_backward(relu_recompute)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.capture.capture import Alias, Capture
from autoremat.planner.graph.graph import Role, Trait
from autoremat.planner.graph.schedule import Schedule

RECOMPUTED = "autoremat_recompute_of"
"""``node.meta`` key: the name of the forward node that a clone repeats."""


@dataclass
class _Inserter:
    """Walks the backward half of a schedule and keeps, for each value, the node that holds its newest copy."""

    capture: Capture
    newest: dict[int, fx.Node] = field(default_factory=dict)
    helpers: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)
    """(helper in the forward, newest copy of what it looks at) -> its clone."""
    unpacked: dict[int, fx.Node] = field(default_factory=dict)
    """value -> the clone of the multi-output call that makes it, until something reads it."""
    cursor: fx.Node | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.capture.joint.graph

    def base(self, node: fx.Node) -> int | None:
        """The computed value of which ``node`` is a helper or the holder, if it is one and not several."""
        alias: Alias = self.capture.aliases.get(node)
        if isinstance(alias, int) and self.capture.graph.values[alias].role is Role.COMPUTED:
            return alias
        return None

    def resolve(self, node: fx.Node) -> fx.Node:
        """The node to read in place of ``node``: itself, unless what it holds has been recomputed."""
        value = self.base(node)
        if value is None:
            return self.resolve_several(node)
        holder = self.newest.get(value)
        if holder is None:
            return node
        if self.capture.value_nodes[value] is node:
            return holder
        return self.clone_helper(node, holder)

    def resolve_several(self, node: fx.Node) -> fx.Node:
        """A view with several results, such as a split: cloned if what it looks at has been recomputed."""
        alias = self.capture.aliases.get(node)
        if not isinstance(alias, tuple) or node in self.calls:
            return node
        copies = [self.newest[v] for v in alias if isinstance(v, int) and v in self.newest]
        return self.clone_helper(node, copies[0]) if copies else node

    def clone_helper(self, node: fx.Node, holder: fx.Node) -> fx.Node:
        key = (node, holder)
        if key not in self.helpers:
            self.helpers[key] = self.clone(node)
        return self.helpers[key]

    def clone(self, node: fx.Node) -> fx.Node:
        assert self.cursor is not None
        with self.graph.inserting_before(self.cursor):
            copy = self.graph.node_copy(node, self.resolve)
        copy.name = self.graph._graph_namespace.create_name(f"{node.name}_recompute", None)
        copy.meta = dict(node.meta)
        copy.meta[RECOMPUTED] = node.name
        copy.meta["partitioner_tag"] = "is_backward"
        copy.meta.pop("recompute", None)
        return copy

    def __post_init__(self) -> None:
        self.calls = frozenset(self.capture.op_nodes)

    def repeat(self, index: int) -> None:
        """Clone op ``index`` here and make its results the newest copies."""
        node, op = self.capture.op_nodes[index], self.capture.graph.ops[index]
        copy = self.clone(node)
        if Trait.COLLECTIVE in op.traits:
            # Else the extraction takes an effect, which is no dead code to it, along to the forward, whose inputs it reads.
            copy.meta["partitioner_tag"] = "must_be_in_backward"
        for value in op.outputs:
            holder = self.capture.value_nodes[value]
            if holder is node:
                self.newest[value] = copy
            elif holder is not None:
                self.newest[value] = self.unpack(holder, node, copy)

    def unpack(self, holder: fx.Node, call: fx.Node, copy: fx.Node) -> fx.Node:
        """Clone the (nested) unpacking of ``call`` that ``holder`` is, on its clone ``copy``."""
        source = holder.args[0]
        if holder.target is not operator.getitem or not isinstance(source, fx.Node):
            raise PlanInvalid(f"{holder.name} does not unpack {call.name}")
        inner = copy if source is call else self.unpack(source, call, copy)
        assert self.cursor is not None
        with self.graph.inserting_before(self.cursor):
            clone = self.graph.call_function(operator.getitem, (inner, holder.args[1]))
        clone.meta = dict(holder.meta)
        clone.meta[RECOMPUTED] = holder.name
        clone.meta["partitioner_tag"] = "is_backward"
        clone.meta.pop("recompute", None)
        return clone

    def redirect(self, node: fx.Node) -> None:
        """Make ``node`` read the newest copies."""
        node.args = fx.map_arg(node.args, self.resolve)
        node.kwargs = fx.map_arg(node.kwargs, self.resolve)

    def run(self, schedule: Schedule) -> None:
        capture = self.capture
        num_forward = capture.graph.num_forward
        backward_nodes = [n for n in capture.op_nodes[num_forward:]]
        (output,) = self.graph.find_nodes(op="output")
        pending = iter([*backward_nodes, output])
        self.cursor = next(pending)
        for index in schedule.backward:
            if index < num_forward:
                self.repeat(index)
                continue
            node = capture.op_nodes[index]
            if node is not self.cursor:
                raise PlanInvalid(f"the schedule runs {node.name} out of order")
            self.redirect(node)
            self.cursor = next(pending)
        outputs: Any = output.args[0]
        kept = capture.num_fwd_outputs
        redirected = fx.map_arg(list(outputs[kept:]), self.resolve)
        output.args = ((*outputs[:kept], *redirected),)


def insert_recomputation(capture: Capture, schedule: Schedule) -> fx.GraphModule:
    """Rewrite ``capture.joint`` in place so that its backward half runs as ``schedule.backward`` says.

    Raises ``PlanInvalid`` if the schedule does not fit the graph.
    """
    _Inserter(capture).run(schedule)
    capture.joint.graph.lint()
    capture.joint.recompile()
    return capture.joint
