"""Inserts the recomputation of a schedule into the joint graph, each clone just before its use.

Before, the joint graph contains every node once. Afterwards the forward nodes are unchanged. The backward's nodes follow in the
schedule's sequence, with clones of recomputed forward nodes between them. Every backward read uses the newest clone of its
operand. Helpers (views, tuple unpacking) between a clone and its reader are cloned too.

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
"""Key of ``node.meta`` for the name of the forward node that a clone recomputes."""


@dataclass
class _Inserter:
    """Walks the backward half of a schedule and tracks, for each value, the node that holds its newest live range."""

    capture: Capture
    newest: dict[int, fx.Node] = field(default_factory=dict)
    helpers: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)
    """Clones of helpers, by (helper in the forward, newest holder of the value that it views)."""
    cursor: fx.Node | None = None

    @property
    def graph(self) -> fx.Graph:
        return self.capture.joint.graph

    def base(self, node: fx.Node) -> int | None:
        """Returns the computed value that ``node`` holds or is a helper of; None if there are none or several."""
        alias: Alias = self.capture.aliases.get(node)
        if isinstance(alias, int) and self.capture.graph.values[alias].role is Role.COMPUTED:
            return alias
        return None

    def resolve(self, node: fx.Node) -> fx.Node:
        """Returns the node to read in place of ``node``: ``node`` itself, unless its value has been recomputed."""
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
        """Returns the node to read in place of a view with several results, such as a split.

        The view is cloned if its base has been recomputed.
        """
        alias = self.capture.aliases.get(node)
        if not isinstance(alias, tuple) or node in self.calls:
            return node
        copies = [self.newest[v] for v in alias if isinstance(v, int) and v in self.newest]
        return self.clone_helper(node, copies[0]) if copies else node

    def clone_helper(self, node: fx.Node, holder: fx.Node) -> fx.Node:
        """Returns the clone of helper ``node`` on ``holder``, which is created once."""
        key = (node, holder)
        if key not in self.helpers:
            self.helpers[key] = self.clone(node)
        return self.helpers[key]

    def clone(self, node: fx.Node) -> fx.Node:
        """Clones ``node`` at the cursor, tags the clone as backward and returns it."""
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
        """Clones op ``index`` at the cursor and records its results as the newest holders."""
        node, op = self.capture.op_nodes[index], self.capture.graph.ops[index]
        copy = self.clone(node)
        if Trait.COLLECTIVE in op.traits:
            # A weaker tag would let the extraction move this op into the forward, because it is an effect and reads only
            # forward values.
            copy.meta["partitioner_tag"] = "must_be_in_backward"
        for value in op.outputs:
            holder = self.capture.value_nodes[value]
            if holder is node:
                self.newest[value] = copy
            elif holder is not None:
                self.newest[value] = self.unpack(holder, node, copy)

    def unpack(self, holder: fx.Node, call: fx.Node, copy: fx.Node) -> fx.Node:
        """Clones ``holder``, a (nested) unpacking of ``call``, so that it reads the clone ``copy``.

        Raises ``PlanInvalid`` if ``holder`` does not unpack ``call``.
        """
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
        """Redirects the reads of ``node`` to the newest clones."""
        node.args = fx.map_arg(node.args, self.resolve)
        node.kwargs = fx.map_arg(node.kwargs, self.resolve)

    def run(self, schedule: Schedule) -> None:
        """Rewrites the backward half after ``schedule``. Raises ``PlanInvalid`` if the schedule does not fit the graph."""
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
    """Rewrites ``capture.joint`` in place so that its backward half runs ``schedule.backward``, and returns it.

    Raises ``PlanInvalid`` if the schedule does not fit the graph.
    """
    _Inserter(capture).run(schedule)
    capture.joint.graph.lint()
    capture.joint.recompile()
    return capture.joint
