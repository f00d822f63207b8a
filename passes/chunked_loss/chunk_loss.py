"""Chunks the projection onto a large vocabulary, the loss and their gradients.

The logits of all tokens are then never live together.

Before, one matrix product computes the logits of all rows (tokens), and the loss and the gradients follow from them. Afterwards
the same ops run on each chunk of rows. Results per row are concatenated; sums over rows are added up.

    logits = mm(x, w); loss = f(logits)         d = g(logits); dx = mm(d, v); dw = mm(d', x)
    becomes, with two chunks,
    logits_0 = mm(x[:a], w); loss_0 = ...       logits_1, d_1 = g(logits_1), dx_1 = mm(d_1, v), dw_1 = mm(d_1', x[a:])
    logits_1 = mm(x[a:], w); loss_1 = ...       logits_0, d_0 = g(logits_0), dx_0 = mm(d_0, v), dw = addmm(dw_1, d_0', x[:a])
    loss = cat(loss_0, loss_1)                  dx = cat(dx_0, dx_1)

All are ordinary ops of the joint graph: the planner saves the logits of a chunk, or recomputes them before their gradient. The
backward starts with the last chunk, whose logits are the newest. Sums over chunks round differently from sums over all rows.
Sums of 16-bit numbers stay in 32 bits until the last chunk.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.ops import op_traits
from autoremat.passes.building import Builder
from autoremat.passes.chunked_loss.hoist_selection import select_before_projecting
from autoremat.passes.chunked_loss.row_partition import Region, Rows, Step, described, has_dynamic_sizes, shape_of, size_hints
from autoremat.passes.chunked_loss.row_rules import projection_step, step_of
from autoremat.planner.graph.op import SEQUENTIAL
from autoremat.torch_private import joint_graphs

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

WIDENS = 2
"""Minimum ratio of the projection's width to the width of the rows that it reads."""

EXPONENTIALS = (aten._log_softmax, aten._softmax, aten.logsumexp, aten.exp)
"""Ops that distinguish a loss over a vocabulary from any other wide layer: a loss contains one of them."""

IN_BACKWARD = 1 << 20
"""Offset for the stages of backward nodes, which keeps every node of the forward before them."""

HALF = (torch.float16, torch.bfloat16)


def chunk_loss(joint: fx.GraphModule, chunks: int) -> int:
    """Rewrites ``joint`` in place so that its largest projection and the loss are computed in ``chunks`` chunks.

    Returns the number of chunks, which is at most the number of rows. Raises ``ChunkingUnsupported`` if the graph cannot be
    chunked; ``joint`` is then unusable.
    """
    projection = _projection(joint.graph)
    if has_dynamic_sizes(projection) and not _feeds_softmax(projection):  # no advice on sizes where static ones change nothing
        raise ChunkingUnsupported(f"what {described(projection)} makes goes into no softmax")
    while (narrower := select_before_projecting(projection)) is not projection:
        projection = narrower
    rows, width = shape_of(projection)
    if rows < 2:
        raise ChunkingUnsupported("it has a single row")
    region = _Finder(joint.graph, projection, width).region()
    if not any(op_traits.packet(node) in EXPONENTIALS for node in region.steps):
        raise ChunkingUnsupported(f"what {described(projection)} makes goes into no softmax")
    length = math.ceil(rows / min(chunks, rows))
    bounds = [(start, min(start + length, rows)) for start in range(0, rows, length)]
    _Rewriting(joint.graph, region, bounds, Builder.beside(projection)).run()
    joint.graph.eliminate_dead_code()
    return len(bounds)


def _projection(graph: fx.Graph) -> fx.Node:
    """Returns the forward's matrix product with the largest result among those whose result is much wider than their operand.

    Raises ``ChunkingUnsupported`` if there is none.
    """
    found: list[tuple[int, fx.Node]] = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default):
            continue
        if joint_graphs.is_traced_in_backward(node) or node.kwargs:
            continue
        (rows, width), (_, inner) = size_hints(node), size_hints(node.args[-2])
        found.append((rows * width if width >= WIDENS * inner else 0, node))
    size, largest = max(found, key=lambda pair: pair[0], default=(0, None))
    if largest is None or not size:
        raise ChunkingUnsupported(f"it has no matrix product whose result is {WIDENS} times as wide as what it reads")
    return largest


def _feeds_softmax(projection: fx.Node) -> bool:
    """Returns True if a softmax, or a part of one, reads rows of the projection or tensors as wide that follow from them."""
    width, wide = size_hints(projection)[-1], {projection}
    for node in projection.graph.nodes:
        if node.op == "call_function" and not wide.isdisjoint(node.all_input_nodes):
            if op_traits.packet(node) in EXPONENTIALS:
                return True
            if 2 * (size_hints(node) or (1,))[-1] > width:
                wide.add(node)
    return False


@dataclass
class _Finder:
    """Finds the region that runs chunk by chunk: tensors as wide as the logits, and their row-by-row results up to sums."""

    graph: fx.Graph
    projection: fx.Node
    width: int

    def region(self) -> Region:
        """Returns the region that runs chunk by chunk, extended by wide operands until it needs no further ones."""
        wanted: dict[fx.Node, int] = {}
        while True:
            region = self.explore(wanted)
            further = {n: lead for n, lead in self.wide_operands(region) if n not in wanted}
            if not further:
                return region
            wanted |= further

    def explore(self, wanted: dict[fx.Node, int]) -> Region:
        """Returns the region that can run chunk by chunk downstream of the projection and of ``wanted``.

        ``wanted`` maps wide nodes outside that region to their number of row dimensions.
        """
        region = Region(shape_of(self.projection)[0], {self.projection: projection_step(self.projection)})
        for node in self.graph.nodes:
            held = [n for n in node.all_input_nodes if region.holds(n)]
            if node in wanted:
                region.steps[node] = step_of(node, region, wanted[node])
            elif held and node is not self.projection:
                wide = [n for n in held if self.is_wide(n, region.steps[n])]
                if node.op == "output":
                    if wide:
                        what = f"the caller is handed {described(wide[0])} whole"
                        remedy = f"return the loss alone: {what}, so the loss cannot be chunked (chunk_loss)"
                        raise ChunkingUnsupported(f"{what}; return the loss alone", remedy)
                    continue
                try:
                    region.steps[node] = step_of(node, region)
                except ChunkingUnsupported:
                    if wide:
                        raise
                    continue
                product = op_traits.packet(node) in (aten.mm, aten.addmm)
                if product and not self.is_wide(node, region.steps[node]):
                    region.ends.add(node)  # the gradient of the projected rows; its readers are as narrow as elsewhere
        return region

    def is_wide(self, node: fx.Node, step: Step) -> bool:
        """Returns True if a row of the node's result is about as wide as the logits."""
        if step.rows is None:
            return step.several
        shape = shape_of(node)
        inner = shape[0] if step.rows.transposed else math.prod(shape[step.rows.lead :])
        return 2 * inner > self.width  # padding of the vocabulary may be cut off

    def wide_operands(self, region: Region) -> Iterator[tuple[fx.Node, int]]:
        """Yields wide operands outside the region that chunks read by rows, each with its number of row dimensions."""
        for step in region.steps.values():
            for operand, read in step.reads.items():
                if isinstance(read, Rows) and operand not in region.steps and self.is_wide(operand, Step({}, _never, read)):
                    yield operand, read.lead


def _never(*_: Any) -> None:
    raise AssertionError("only its rows were asked for")


@dataclass
class _Rewriting:
    """Replaces the region by its chunks, stage by stage: whole results are read only from earlier stages."""

    graph: fx.Graph
    region: Region
    bounds: list[tuple[int, int]]
    build: Builder
    made: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    """Chunk of each node of the region, by node and number of the chunk."""
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    terms: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Summands of each sum, where they are nodes of their own."""
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Whole result that replaces a node of the region for readers outside."""
    sliced: dict[tuple[fx.Node, Rows, int], fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        """Rewrites the graph: adds the chunks of all stages, erases the region and sorts the nodes."""
        order = {node: position for position, node in enumerate(self.graph.nodes)}
        stages: dict[int, list[fx.Node]] = {}
        for node, stage in self.stages().items():
            stages.setdefault(stage, []).append(node)
        for stage, nodes in sorted(stages.items()):
            nodes.sort(key=lambda node: order[node])
            with self.graph.inserting_before(nodes[-1]):
                self.run_stage(nodes, stage >= IN_BACKWARD)
        for node in sorted(self.region.steps, key=lambda node: -order[node]):
            self.graph.erase_node(node)
        _sort(self.graph)

    def stages(self) -> dict[fx.Node, int]:
        """Returns the stage of each node of the region."""
        found: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            begins = joint_graphs.is_traced_in_backward(node) or (node.op == "placeholder" and joint_graphs.is_tangent(node))
            stage = IN_BACKWARD if begins else 0
            for operand in node.all_input_nodes:
                joined = operand in self.region.steps and not (node in self.region.steps and self.region.holds(operand))
                stage = max(stage, found[operand] + joined)
            found[node] = stage
        return {node: found[node] for node in self.region.steps}

    def run_stage(self, nodes: list[fx.Node], backwards: bool) -> None:
        """Adds the chunks of one stage and joins them. Backward stages start with the last chunk."""
        parts = range(len(self.bounds))
        self.sliced.clear()
        for part in reversed(parts) if backwards else parts:
            for node in nodes:
                self.run_part(node, part)
        for node in nodes:
            self.join(node)

    def run_part(self, node: fx.Node, part: int) -> None:
        """Adds one chunk of ``node``, or adds the chunk's summand to the sum that replaces ``node``."""
        step, (start, stop) = self.region.steps[node], self.bounds[part]

        def operand(n: fx.Node) -> fx.Node:
            return self.operand(n, step.reads.get(n), part, node)

        args, kwargs = fx.map_arg(node.args, operand), fx.map_arg(node.kwargs, operand)
        call = step.call(args, kwargs, stop - start)
        if step.by_part:
            self.made[node, part] = cast("fx.Node", args[0]) if call is None else self.build.make(node, *call)
        else:
            assert call is not None
            self.add(node, *call)

    def operand(self, node: fx.Node, read: Rows | int | None, part: int, reader: fx.Node) -> fx.Node:
        """Returns the node that chunk ``part`` of ``reader`` reads in place of ``node``."""
        if self.region.holds(node):
            return self.made[node, part]
        whole = self.whole.get(node, node)
        if not read:
            return whole
        if isinstance(read, int):
            return self.build.make(reader, aten.view.default, (whole, list(shape_of(whole)[read:])))
        key = (whole, read, part)
        if key not in self.sliced:
            if read.lead > 1:
                whole = self.build.make(reader, aten.view.default, (whole, [self.region.count, *shape_of(whole)[read.lead :]]))
            place = (whole, int(read.transposed), *self.bounds[part])
            self.sliced[key] = self.build.make(reader, aten.slice.Tensor, place)
        return self.sliced[key]

    def add(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds the summand of one chunk to the sum that replaces ``node``."""
        before, low = self.sums.get(node), node.meta["val"].dtype in HALF
        if target in (aten.mm.default, aten.addmm.default) and before is not None:
            if not low:
                self.sums[node] = self.build.make(node, aten.addmm.default, (before, *args[-2:]))
                return
            target, args = aten.mm.default, args[-2:]  # the sum already contains the bias
        term = self.build.make(node, target, args, kwargs)
        self.terms.setdefault(node, []).append(term)
        if low:
            term = self.build.make(node, convert, (term, torch.float32))
        self.sums[node] = term if before is None else self.build.make(node, aten.add.Tensor, (before, term))

    def join(self, node: fx.Node) -> None:
        """Replaces ``node`` by its joined chunks, or by their sum, for readers that need the whole result."""
        step = self.region.steps[node]
        if step.by_part:
            if all(user in self.region.steps and self.region.holds(node) for user in node.users) or step.rows is None:
                return
            parts = [self.made[node, part] for part in range(len(self.bounds))]
            result = self.build.make(node, aten.cat.default, (parts, int(step.rows.transposed)))
            if step.rows.lead > 1:
                result = self.build.make(node, aten.view.default, (result, list(shape_of(node))))
        else:
            result = self.sums[node]
            if step.finish is not None:
                result = step.finish(lambda target, *args: self.build.make(node, target, args), result, self.terms[node])
            if node.meta["val"].dtype in HALF:
                result = self.build.make(node, convert, (result, node.meta["val"].dtype))
        self.whole[node] = result
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in self.region.steps)


def _sort(graph: fx.Graph) -> None:
    """Moves each node that reads a later node behind that node, and keeps the sequence of all other nodes.

    Random draws and other effects also wait for the one before: their sequence is part of what the graph does.
    """
    nodes = list(graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    effects = [node for node in nodes if op_traits.traits_of(node) & SEQUENTIAL]
    followers = {node: list(node.users) for node in nodes}
    waits = {node: len(node.all_input_nodes) for node in nodes}
    for effect, following in itertools.pairwise(effects):
        followers[effect].append(following)
        waits[following] += 1
    ready = [order[node] for node in nodes if not waits[node]]
    heapq.heapify(ready)
    last: fx.Node | None = None
    while ready:
        node = nodes[heapq.heappop(ready)]
        if last is not None:
            last.append(node)
        last = node
        for follower in followers[node]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, order[follower])
