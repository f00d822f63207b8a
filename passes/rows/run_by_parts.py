"""Replaces a region of row-by-row ops by the same ops on parts of the rows.

Results per row are concatenated; sums over rows are added up.

    y = f(x, w)               dx, dw = g(dy, x)
    becomes, with two parts,
    y_0 = f(x[:a], w)         dx_1, dw_1 = g(dy[a:], x[a:])
    y_1 = f(x[a:], w)         dx_0, dw_0 = g(dy[:a], x[:a])
    y = cat(y_0, y_1)         dx = cat(dx_0, dx_1); dw = dw_1 + dw_0

All are ordinary ops of the joint graph: the planner saves what a part computes, or recomputes it before its gradient. The
backward starts with the last part, whose values are the newest. Sums over parts round differently from sums over all rows. Sums
of 16-bit numbers stay in 32 bits until the last part.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import networkx
import torch
from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.ops import op_traits
from autoremat.passes.building import make
from autoremat.passes.rows.row_partition import Region, Rows, described, shape_of
from autoremat.planner.graph.op import SEQUENTIAL
from autoremat.torch_private import joint_graphs

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default

IN_BACKWARD = 1 << 20
"""Offset for the stages of backward nodes, which keeps every node of the forward before them."""

PART = "autoremat_part"
"""Key in the ``meta`` of nodes that compute a part of rows. No pass parts them again."""

HALF = (torch.float16, torch.bfloat16)


def run_by_parts(graph: fx.Graph, regions: Iterable[Region], parts: int) -> int:
    """Replaces each of ``regions`` by its ops on ``parts`` parts of its rows. Returns the largest number of parts, which is at
    most the number of rows."""
    most = 0
    joined: dict[fx.Node, fx.Node] = {}
    for region in regions:
        length = math.ceil(region.count / min(parts, region.count))
        bounds = [(start, min(start + length, region.count)) for start in range(0, region.count, length)]
        most = max(most, len(bounds))
        for node, step in region.steps.items():  # reads what earlier regions have joined in place of their nodes
            reads = {joined.get(operand, operand): read for operand, read in step.reads.items()}
            region.steps[node] = replace(step, reads=reads)
        rewriting = _Rewriting(graph, region, bounds)
        rewriting.run()
        joined |= rewriting.whole
    graph.eliminate_dead_code()
    return most


def stages_of(graph: fx.Graph, region: Region) -> dict[fx.Node, int]:
    """Returns the stage of each node of ``region``. Between two stages, something outside reads joined parts of the first.

    A node runs in the latest stage of its half in which its parts serve all readers, so that they need not wait for them.
    """
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        begins = joint_graphs.is_traced_in_backward(node) or (node.op == "placeholder" and joint_graphs.is_tangent(node))
        stage = IN_BACKWARD if begins else 0
        for operand in node.all_input_nodes:
            joined = operand in region.steps and not (node in region.steps and region.holds(operand))
            stage = max(stage, found[operand] + joined)
        found[node] = stage
    for node in reversed(graph.nodes):
        if region.holds(node) and node.users and all(user in region.steps for user in node.users):
            first = min(found[user] for user in node.users)
            if (first < IN_BACKWARD) == (found[node] < IN_BACKWARD):
                found[node] = max(found[node], first)
    return {node: found[node] for node in region.steps}


@dataclass
class _Rewriting:
    """Replaces the region by its chunks, stage by stage: whole results are read only from earlier stages."""

    graph: fx.Graph
    region: Region
    bounds: list[tuple[int, int]]
    made: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    """Chunk of each node of the region, by node and number of the chunk."""
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    terms: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Summands of each sum, where they are nodes of their own."""
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Whole result that replaces a node of the region for readers outside."""
    sliced: dict[tuple[fx.Node, Rows, int], fx.Node] = field(default_factory=dict)
    flat: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        order = {node: position for position, node in enumerate(self.graph.nodes)}
        stages, parts = stages_of(self.graph, self.region), range(len(self.bounds))
        for stage in sorted(set(stages.values())):
            nodes = sorted((node for node in stages if stages[node] == stage), key=order.__getitem__)
            self.sliced.clear()
            self.flat.clear()
            with self.graph.inserting_before(nodes[-1]):
                for part in reversed(parts) if stage >= IN_BACKWARD else parts:
                    for node in nodes:
                        self.run_part(node, part)
                for node in nodes:
                    self.join(node)
        for node in sorted(self.region.steps, key=lambda node: -order[node]):
            self.graph.erase_node(node)
        # A node that reads a later one moves behind it. Effects wait for the one before; others keep their sequence.
        order = {node: position for position, node in enumerate(self.graph.nodes)}
        arrows = networkx.DiGraph((operand, node) for node in order for operand in node.all_input_nodes)
        arrows.add_nodes_from(order)
        arrows.add_edges_from(itertools.pairwise(node for node in order if op_traits.traits_of(node) & SEQUENTIAL))
        for before, node in itertools.pairwise(list(networkx.lexicographical_topological_sort(arrows, order.__getitem__))):
            before.append(node)

    def run_part(self, node: fx.Node, part: int) -> None:
        """Adds one chunk of ``node``, or adds the chunk's summand to the sum that replaces ``node``."""
        step, (start, stop) = self.region.steps[node], self.bounds[part]

        def operand(n: fx.Node) -> fx.Node:
            return self.operand(n, step.reads.get(n), part, node)

        args, kwargs = fx.map_arg(node.args, operand), fx.map_arg(node.kwargs, operand)
        call = step.call(args, kwargs, stop - start)
        if step.by_part:
            made = cast("fx.Node", args[0]) if call is None else make(node, *call)
            if step.rows is not None and not step.several:
                whole, rows, value = node.meta["val"], stop - start, made.meta["val"]
                sizes = (whole.shape[0], rows) if step.rows.transposed else (rows, *whole.shape[step.rows.lead :])
                if value.shape != sizes or value.dtype != whole.dtype:
                    raise ChunkingUnsupported(f"{described(node)} makes {tuple(value.shape)} of {rows} rows, not {sizes}")
            made.meta[PART] = True
            self.made[node, part] = made
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
            return make(reader, aten.view.default, (whole, list(shape_of(whole)[read:])))
        key = (whole, read, part)
        if key not in self.sliced:
            if read.lead > 1 and self.copies(whole, read.lead):
                self.sliced[key] = self.between(whole, read.lead, *self.bounds[part], reader)
            else:
                if read.lead > 1:
                    flat, shape = (whole, read.lead), [self.region.count, *shape_of(whole)[read.lead :]]
                    if flat not in self.flat:  # all parts of a stage share it, as it may be a copy
                        self.flat[flat] = make(reader, aten.view.default, (whole, shape))
                    whole = self.flat[flat]
                self.sliced[key] = make(reader, aten.slice.Tensor, (whole, int(read.transposed), *self.bounds[part]))
        return self.sliced[key]

    @staticmethod
    def copies(whole: fx.Node, lead: int) -> bool:
        """Returns True if rows of several numbers have to be copied to come into one dimension."""
        value = whole.meta["val"]
        rows = list(zip(value.shape[:lead], value.stride()[:lead], strict=True))
        follows = all(stride == size * inner for (_, stride), (size, inner) in itertools.pairwise(rows))
        return math.prod(value.shape[lead:]) > 1 and not follows

    def between(self, whole: fx.Node, lead: int, start: int, stop: int, reader: fx.Node) -> fx.Node:
        """Returns the rows from ``start`` to ``stop`` of ``whole`` in one dimension, without a copy of others."""
        if lead == 1:
            return make(reader, aten.slice.Tensor, (whole, 0, start, stop))
        inner, shape = math.prod(shape_of(whole)[1:lead]), shape_of(whole)
        low, high, pieces = -(-start // inner), stop // inner, []  # the entries of the first dimension that all belong to it

        def piece(entry: int, first: int, last: int) -> None:
            if first < last:
                one = make(reader, aten.select.int, (whole, 0, entry))
                pieces.append(self.between(one, lead - 1, first, last, reader))

        piece(start // inner, start % inner, min(inner, stop - inner * (start // inner)) if start % inner else 0)
        if low < high:
            entries = make(reader, aten.slice.Tensor, (whole, 0, low, high))
            pieces.append(make(reader, aten.view.default, (entries, [(high - low) * inner, *shape[lead:]])))
        piece(high, 0, stop - inner * high if low <= high else 0)
        return pieces[0] if len(pieces) == 1 else make(reader, aten.cat.default, (pieces,))

    def add(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before, low = self.sums.get(node), node.meta["val"].dtype in HALF
        if target in (aten.mm.default, aten.addmm.default) and before is not None:
            if not low:
                self.sums[node] = make(node, aten.addmm.default, (before, *args[-2:]))
                return
            target, args = aten.mm.default, args[-2:]  # the sum already contains the bias
        term = make(node, target, args, kwargs)
        self.terms.setdefault(node, []).append(term)
        if low:
            term = make(node, convert, (term, torch.float32))
        if before is None:
            self.sums[node] = term
            return
        self.sums[node] = make(node, aten.add.Tensor, (before, term))
        # Else one late kernel adds the terms of many parts, all of them live.
        self.sums[node].meta[op_traits.MATERIALIZED] = True

    def join(self, node: fx.Node) -> None:
        """Replaces ``node`` by its joined chunks, or by their sum, for readers that need the whole result."""
        step = self.region.steps[node]
        if step.by_part:
            if all(user in self.region.steps and self.region.holds(node) for user in node.users) or step.rows is None:
                return
            parts = [self.made[node, part] for part in range(len(self.bounds))]
            result = make(node, aten.cat.default, (parts, int(step.rows.transposed)))
            if step.rows.lead > 1:
                result = make(node, aten.view.default, (result, list(shape_of(node))))
        else:
            result = self.sums[node]
            if step.finish is not None:
                result = step.finish(lambda target, *args: make(node, target, args), result, self.terms[node])
            if node.meta["val"].dtype in HALF:
                result = make(node, convert, (result, node.meta["val"].dtype))
        self.whole[node] = result
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in self.region.steps)
