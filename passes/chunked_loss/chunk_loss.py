"""Chunks the projection onto a large vocabulary, the loss and their gradients.

The logits of all tokens are then never live together.

Before, one matrix product computes the logits of all rows (tokens), and the loss and the gradients follow from them. Afterwards
the same ops run on each chunk of rows (``passes/rows/run_by_parts.py``).

    logits = mm(x, w); loss = f(logits)         d = g(logits); dx = mm(d, v); dw = mm(d', x)
    becomes, with two chunks,
    logits_0 = mm(x[:a], w); loss_0 = ...       logits_1, d_1 = g(logits_1), dx_1 = mm(d_1, v), dw_1 = mm(d_1', x[a:])
    logits_1 = mm(x[a:], w); loss_1 = ...       logits_0, d_0 = g(logits_0), dx_0 = mm(d_0, v), dw = addmm(dw_1, d_0', x[:a])
    loss = cat(loss_0, loss_1)                  dx = cat(dx_0, dx_1)
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.ops import op_traits
from autoremat.passes.chunked_loss.hoist_selection import select_before_projecting
from autoremat.passes.rows.row_partition import WIDENS, Region, Rows, described, has_dynamic_sizes, shape_of, size_hints, widens
from autoremat.passes.rows.row_rules import SWAPS, VIEWS, step_of
from autoremat.passes.rows.run_by_parts import PART, run_by_parts
from autoremat.torch_private import joint_graphs

aten = torch.ops.aten
prims = torch.ops.prims

INPUT_VIEWS = (*VIEWS, *SWAPS, aten.slice, aten.detach, aten.alias, aten.unsqueeze, aten.squeeze, aten.select)
"""Ops whose result shares the memory of their operand; a view may copy it, as ``run_by_parts`` avoids."""

FACTOR_VIEWS = (*VIEWS, *SWAPS, aten.slice, aten.detach, aten.alias, aten.clone, aten._to_copy, prims.convert_element_type)
"""Ops between a weight, or rows, and a product that reads them."""

SOFTMAXES = (aten._log_softmax, aten._softmax, aten.logsumexp, aten.amax)
"""Ops with which a softmax over a vocabulary begins, which distinguish a loss from any other wide layer. An exponential does
not: the sigmoid in an MLP has one, too."""


def chunk_loss(joint: fx.GraphModule, chunks: int) -> int:
    """Rewrites ``joint`` in place so that its largest projections and the loss are computed in ``chunks`` chunks.

    Returns the number of chunks, which is at most the number of rows. Raises ``ChunkingUnsupported`` if the graph cannot be
    chunked; ``joint`` is then unusable.
    """
    projections = _projections(joint.graph)
    is_loss = _feeds(projections[0])
    if has_dynamic_sizes(projections[0]) and not is_loss:  # no advice on sizes where static ones change nothing
        raise ChunkingUnsupported(f"what {described(projections[0])} makes goes into no softmax")
    try:
        return run_by_parts(joint.graph, _regions(joint.graph, projections), chunks)
    except ChunkingUnsupported as reason:
        if reason.remedy or not is_loss:
            raise
        raise ChunkingUnsupported(
            str(reason), f"compute the loss token by token, so that it can be chunked: {reason}"
        ) from reason


def _regions(graph: fx.Graph, projections: list[fx.Node]) -> list[Region]:
    select_before_projecting(graph, [shape_of(one)[1] for one in projections])
    found: list[Region] = []
    for projection in _projections(graph):
        taken = {node for region in found for node in region.steps}
        if projection in taken:
            continue
        is_needed = not found or _is_trained(projection)
        try:
            region = _Finder(graph, projection, shape_of(projection)[1], taken).region()
            if region.count < 2:
                raise ChunkingUnsupported("it has a single row")
            if not any(op_traits.packet(node) in SOFTMAXES for node in region.steps):
                raise ChunkingUnsupported(f"what {described(projection)} makes goes into no softmax")
        except ChunkingUnsupported:
            if is_needed:
                raise
        else:
            found.append(region)
    return found


def vocabulary_projection(graph: fx.Graph) -> fx.Node | None:
    """Returns the product that makes the logits of a loss; None if there is none."""
    try:
        projection = _projections(graph)[0]
    except ChunkingUnsupported:
        return None
    return projection if _feeds(projection) else None


def _projections(graph: fx.Graph) -> list[fx.Node]:
    """Returns the products that make logits, trained and large ones first; else the largest one that makes wide rows."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if widens(node) and PART not in node.meta and (size := math.prod(size_hints(node))):
            found[node] = size
    if not found:
        raise ChunkingUnsupported(f"it has no matrix product whose result is {WIDENS} times as wide as what it reads")
    largest = max(found, key=lambda node: found[node])
    logits = [node for node in found if 2 * found[node] >= found[largest] and _feeds(node)]
    return sorted(logits, key=lambda node: (-_is_trained(node), -found[node])) or [largest]


def _is_trained(projection: fx.Node) -> bool:
    factors = {_behind(factor, FACTOR_VIEWS) for factor in projection.args[-2:]}
    return any(
        node.target in (aten.mm.default, aten.addmm.default)
        and joint_graphs.is_traced_in_backward(node)
        and not factors.isdisjoint(_behind(factor, FACTOR_VIEWS) for factor in node.args[-2:])
        for node in projection.graph.nodes
    )


def _behind(node: Any, views: Collection[Any]) -> Any:
    while isinstance(node, fx.Node) and op_traits.packet(node) in views:
        node = node.args[0]
    return node


def _feeds(projection: fx.Node) -> bool:
    """Returns True if a softmax reads rows of the projection, or tensors as wide that follow from them."""
    width, wide = size_hints(projection)[-1], {projection}
    for node in projection.graph.nodes:
        if node.op == "call_function" and not wide.isdisjoint(node.all_input_nodes):
            if op_traits.packet(node) in SOFTMAXES:
                return True
            if 2 * (size_hints(node) or (1,))[-1] > width or op_traits.packet(node) in SWAPS:
                wide.add(node)
    return False


@dataclass
class _Finder:
    """Finds the region that runs chunk by chunk: tensors as wide as the logits, and their row-by-row results up to sums."""

    graph: fx.Graph
    projection: fx.Node
    width: int
    taken: set[fx.Node]
    """Nodes of other regions."""

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
        """Returns the region downstream of the projection and of ``wanted``: wide nodes with their number of row dimensions."""
        region = Region(shape_of(self.projection)[0])
        region.steps[self.projection] = step_of(self.projection, region, 1)
        for node in self.graph.nodes:
            held = [n for n in node.all_input_nodes if region.holds(n)]
            if node in wanted:
                region.steps[node] = step_of(node, region, wanted[node])
            elif held and node is not self.projection:
                wide = [n for n in held if region.steps[n].several or self.is_wide(n, region.steps[n].rows)]
                if node.op == "output":
                    if wide:
                        what = f"the caller is handed {described(wide[0])} whole"
                        remedy = f"return the loss alone: {what}, so the loss cannot be chunked (chunk_loss)"
                        raise ChunkingUnsupported(f"{what}; return the loss alone", remedy)
                    continue
                try:
                    if node in self.taken:
                        raise ChunkingUnsupported(f"{described(node)} reads logits of different rows")
                    region.steps[node] = step_of(node, region)
                except ChunkingUnsupported:
                    if wide and node.target is aten.slice.Tensor:
                        raise ChunkingUnsupported(f"{described(node)} takes other tokens than the rest of the loss") from None
                    if wide:
                        raise
                    continue
                product = op_traits.packet(node) in (aten.mm, aten.addmm)
                if product and not self.is_wide(node, region.steps[node].rows):
                    region.ends.add(node)  # the gradient of the projected rows; its readers are as narrow as elsewhere
        return region

    def is_wide(self, node: fx.Node, rows: Rows | None) -> bool:
        """Returns True if a row of the node's result is about as wide as the logits."""
        if rows is None:
            return False
        shape = shape_of(node)
        inner = shape[0] if rows.transposed else math.prod(shape[rows.lead :])
        return 2 * inner > self.width  # padding of the vocabulary may be cut off

    def wide_operands(self, region: Region) -> Iterator[tuple[fx.Node, int]]:
        """Yields wide operands outside the region that chunks read by rows, each with its number of row dimensions."""
        for step in region.steps.values():
            for operand, read in step.reads.items():
                is_given = _behind(operand, INPUT_VIEWS).op == "placeholder"  # chunks do not save its memory
                if isinstance(read, Rows) and operand not in region.steps and not is_given and self.is_wide(operand, read):
                    yield operand, read.lead
