"""Inserts the recomputation of a schedule into the joint graph, each clone just before its use.

Before, the joint graph contains every node once. Afterwards the forward nodes are unchanged. The backward's nodes follow in the
schedule's sequence, with clones of recomputed forward nodes between them. Every backward read uses the newest clone of its
operand. Helpers (views, tuple unpacking) between a clone and its reader are cloned too.

         mm ── relu ── mm_1 ── ... ── relu_backward(relu)
    becomes, if relu is recomputed,
         mm ── relu ── mm_1 ── ... ── relu_recompute(mm) ── relu_backward(relu_recompute)
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autoremat.basics.errors import PlanInvalid
from autoremat.capture.builder import Alias
from autoremat.capture.capture import Capture
from autoremat.ops import op_traits
from autoremat.passes.insert_transfers import Loads
from autoremat.planner.graph.op import COMMUNICATES
from autoremat.planner.memory.simulator import Timeline
from autoremat.torch_private.inductor_lowering import BUFFER

RECOMPUTED = "autoremat_recompute_of"
"""Key of ``node.meta`` for the name of the forward node that a clone recomputes."""


@dataclass
class _Inserter:
    """Walks the backward half of a schedule and tracks, for each value, the node that holds its newest live range."""

    capture: Capture
    loads: Loads
    newest: dict[int, fx.Node] = field(default_factory=dict)
    helpers: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)
    """Clones of helpers, by (helper in the forward, newest holder of the value that it views)."""
    cursor: fx.Node | None = None

    def __post_init__(self) -> None:
        self.graph, self.calls = self.capture.joint.graph, frozenset(self.capture.op_nodes)

    def resolve(self, node: fx.Node) -> fx.Node:
        """Returns the node to read in place of ``node``: ``node`` itself, unless what it holds or views was made anew."""
        alias: Alias = self.capture.aliases.get(node)
        if isinstance(alias, tuple) and node in self.calls:
            return node
        values = alias if isinstance(alias, tuple) else (alias,)  # a view may have several results, such as a split
        holder = next((self.newest[v] for v in values if isinstance(v, int) and v in self.newest), None)
        if holder is None:
            return node
        if isinstance(alias, int) and self.capture.value_nodes[alias] is node:
            return holder
        if (node, holder) not in self.helpers:
            self.helpers[node, holder] = self.clone(node)
        return self.helpers[node, holder]

    def clone(self, node: fx.Node, operand: Callable[[fx.Node], fx.Node] | None = None) -> fx.Node:
        """Clones ``node`` at the cursor for the backward. ``operand`` returns what to read, by default the newest holder."""
        assert self.cursor is not None
        with self.graph.inserting_before(self.cursor):
            copy = self.graph.node_copy(node, operand or self.resolve)
        copy.name = self.graph._graph_namespace.create_name(f"{node.name}_recompute", None)
        copy.meta = dict(node.meta)
        copy.meta[RECOMPUTED] = node.name
        copy.meta["partitioner_tag"] = "is_backward"
        copy.meta.pop("recompute", None)
        return copy

    def repeat(self, index: int) -> fx.Node:
        """Clones op ``index`` at the cursor, records its results as the newest holders, and returns the clone."""
        node, op = self.capture.op_nodes[index], self.capture.graph.ops[index]
        copies, made = {node: self.clone(node)}, op.outputs
        if op_traits.averages_of(node):
            op_traits.forget_averages(copies[node])
            made = made[: op_traits.BATCH_NORM_RESULTS]
        for value in made:
            holder = self.capture.value_nodes[value]
            if holder is not None:
                self.newest[value] = self.complete(holder, node, copies)
        if op.traits & COMMUNICATES:
            # A weaker tag would let the extraction move these nodes into the forward, because they are effects and read only
            # forward values.
            for copy in copies.values():
                copy.meta["partitioner_tag"] = "must_be_in_backward"
        return copies[node]

    def complete(self, holder: fx.Node, call: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Clones ``holder``, a (nested) unpacking of ``call`` or a wait for it, to read the clone of ``call``."""
        if holder not in copies:
            if holder.target is not operator.getitem and not op_traits.is_wait(holder):
                raise PlanInvalid(f"{holder.name} does not unpack {call.name}")
            for source in holder.all_input_nodes:
                self.complete(source, call, copies)
            copies[holder] = self.clone(holder, copies.__getitem__)
        return copies[holder]

    def run(self, timeline: Timeline) -> None:
        """Rewrites the backward half after a schedule, and marks the nodes whose results it materialises."""
        capture = self.capture
        num_forward = capture.graph.num_forward
        schedule, ranges = timeline.schedule, timeline.live_ranges
        materialized = frozenset(zip(ranges.values.tolist(), ranges.computed_at.tolist(), strict=True))
        output = self.graph.output_node()
        pending = iter([*capture.op_nodes[num_forward:], output])
        self.cursor = next(pending)
        for position, index in enumerate(schedule.backward, len(schedule.forward)):
            self.newest.update(self.loads.before(position, self.cursor))
            if index < num_forward:
                node = self.repeat(index)
            else:
                node = capture.op_nodes[index]
                node.args, node.kwargs = fx.map_arg(node.args, self.resolve), fx.map_arg(node.kwargs, self.resolve)
                self.cursor = next(pending)
            if any((value, position) in materialized for value in capture.graph.ops[index].outputs):
                node.meta[BUFFER] = True
        outputs: Any = output.args[0]
        kept = capture.num_fwd_outputs
        redirected = fx.map_arg(list(outputs[kept:]), self.resolve)
        output.args = ((*outputs[:kept], *redirected),)


def insert_recomputation(joint: fx.GraphModule, capture: Capture, timeline: Timeline) -> int:
    """Rewrites ``joint`` in place so that its backward half runs as ``timeline``, the simulation of a schedule, does.

    Returns the number of recomputed ops and loads. What is loaded has been stored by :func:`insert_stores`.
    ``capture`` is that of ``joint``.
    """
    assert capture.joint is joint
    schedule = timeline.schedule
    _Inserter(capture, Loads(capture, schedule)).run(timeline)
    return sum(op < capture.graph.num_forward for op in schedule.backward) + len(schedule.stays)
