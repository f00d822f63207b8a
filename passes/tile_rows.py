"""Computes stretches of row-by-row ops, such as an MLP, tile by tile, forward and backward.

The wide hidden values of all rows (tokens) are then never live together.

    h = mm(x, w); a = silu(h); y = mm(a, v)     da = mm(dy, v'); dv = mm(a', dy); dh = ...; dx = mm(dh, w'); dw = mm(x', dh)
    becomes, with two tiles,
    h_0 = mm(x[:a], w); y_0 = ...               da_1 = mm(dy[a:], v'); dv_1 = mm(a_1', dy[a:]); dx_1 = ...; dw_1 = ...
    h_1 = mm(x[a:], w); y_1 = ...               da_0 = mm(dy[:a], v'); dv = addmm(dv_1, a_0', dy[:a]); dx_0 = ...; dw = ...
    y = cat(y_0, y_1)                           dx = cat(dx_0, dx_1)

The planner recomputes h_0 and a_0 just before their gradients (``passes/rows/run_by_parts.py``).

A stretch is a set of ops that compute row by row, of the forward and the backward together. Values that are made and read
inside exist tile by tile; values at its border exist whole. So the best stretches have the least bytes at their borders. They
are a minimum cut: one side holds the products that widen rows, the other side holds all that does not compute row by row.

    x ── norm ── mm ── silu ── mul ── mm ── add ── y        source: the wide products; sink: what makes x and reads y
     └────────── mm ───────────┘            │
     └──────────────────────────────────────┘
"""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import networkx
import numpy as np
import torch
from ortools.graph.python import max_flow
from torch import fx

from autoremat.basics.errors import ChunkingUnsupported
from autoremat.ops.op_traits import COMPARED
from autoremat.passes.chunked_loss.chunk_loss import vocabulary_projection
from autoremat.passes.rows.row_partition import Region, Rows, has_dynamic_sizes, row_dimensions, shape_of, widens
from autoremat.passes.rows.row_rules import step_of
from autoremat.passes.rows.run_by_parts import IN_BACKWARD, run_by_parts, stages_of

aten = torch.ops.aten

UNCUTTABLE = 1 << 50
"""Capacity of arcs that no minimum cut contains, in bytes."""


def tile_rows(joint: fx.GraphModule, tiles: int) -> int:
    """Rewrites ``joint`` in place so that its stretches of row-by-row ops run in ``tiles`` tiles.

    The projection of a loss belongs to ``chunk_loss``. Returns the number of stretches; after 0 the graph is as before.
    """
    stretches = _stretches(joint.graph, vocabulary_projection(joint.graph))
    if stretches:
        run_by_parts(joint.graph, stretches, tiles)
    return len(stretches)


def _stretches(graph: fx.Graph, left_out: fx.Node | None) -> list[Region]:
    """Returns the stretches of ``graph``, each as a region. None of them holds the node ``left_out`` or what it makes wide."""
    wide = [node for node in graph.nodes if widens(node) and node is not left_out]
    widening = [node for node in wide if not has_dynamic_sizes(node) and not has_dynamic_sizes(node.args[-2])]
    found: list[Region] = []
    for count in sorted({shape_of(node)[0] for node in widening}, reverse=True):
        taken = {node for region in found for node in region.steps}
        seeds = [node for node in widening if shape_of(node)[0] == count and node not in taken]
        free = (node for node in graph.nodes if node.op == "call_function" and node not in taken and node is not left_out)
        by_rows = _region_of((node for node in free if COMPARED not in node.meta), count)  # a tile would run those again
        seeds = [node for node in seeds if node in by_rows.steps]
        found += _Cutting(by_rows, stages_of(graph, by_rows)).stretches(seeds) if seeds and count > 1 else []
    return found


def _region_of(nodes: Iterable[fx.Node], count: int) -> Region:
    """Returns the region of those of ``nodes`` that compute ``count`` rows one by one."""
    region = Region(count)
    for node in nodes:
        value = node.meta.get("val")
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        rows = None
        if isinstance(value, torch.Tensor) and all(type(size) is int for size in value.shape):
            rows = row_dimensions(value.shape, count)
        with contextlib.suppress(ChunkingUnsupported):
            region.steps[node] = step_of(node, region, None if rows is None else rows.lead)
    return region


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride]
    return int(value.itemsize * math.prod(sizes))


@dataclass(frozen=True)
class _Cutting:
    by_rows: Region
    stages: dict[fx.Node, int]

    def stretches(self, seeds: list[fx.Node]) -> list[Region]:
        """Returns the stretches around those of ``seeds`` whose results stay inside."""
        while seeds:
            inside = self.inside(seeds)
            border = {value for value in self.readers if self.is_cut(value, inside)}
            if not border & set(seeds):
                return [region for nodes in self.parts(inside, seeds) if (region := self.region(nodes)) is not None]
            seeds = [seed for seed in seeds if seed not in border]
        return []

    @cached_property
    def readers(self) -> dict[fx.Node, list[fx.Node]]:
        """The nodes that read parts of each value, by value. A later stage of the same half reads it whole."""
        steps = self.by_rows.steps
        found: dict[fx.Node, list[fx.Node]] = {node: [] for node, step in steps.items() if step.by_part}
        for node, step in steps.items():
            for value in node.all_input_nodes:
                if value in found or isinstance(step.reads.get(value), Rows):
                    readers, making, reading = found.setdefault(value, []), self.stages.get(value), self.stages[node]
                    if making is None or making == reading or making < IN_BACKWARD <= reading:
                        readers.append(node)
        return found

    def is_cut(self, value: fx.Node, inside: set[fx.Node]) -> bool:
        """Returns True if ``value`` must exist whole: something inside makes or reads it, and something outside too."""
        readers = self.readers[value]
        ends = [value in inside, *(n in inside for n in readers), *([False] * (len(readers) < len(value.users)))]
        return any(ends) and not all(ends)

    def inside(self, seeds: list[fx.Node]) -> set[fx.Node]:
        """Returns the largest set of nodes with the seeds that has the fewest bytes at its border."""
        number = {node: index for index, node in enumerate(self.by_rows.steps)}
        arcs: list[tuple[int, int, int]] = []
        source, sink = len(number), len(number) + 1
        size = sink + 1
        for value, readers in self.readers.items():
            is_whole = value not in number or len(readers) < len(value.users)
            members = [number[n] for n in (value, *readers) if n in number] + [sink] * is_whole
            several = value in number and self.by_rows.steps[value].several
            arcs.append((size, size + 1, UNCUTTABLE if several else _bytes(value)))
            arcs += [arc for one in members for arc in ((one, size, UNCUTTABLE), (size + 1, one, UNCUTTABLE))]
            size += 2
        arcs += [(source, number[seed], UNCUTTABLE) for seed in seeds]
        flow = max_flow.SimpleMaxFlow()
        tails, heads, capacities = np.array(arcs, dtype=np.int64).T
        flow.add_arcs_with_capacity(tails.astype(np.int32), heads.astype(np.int32), capacities)
        if flow.solve(source, sink) != flow.OPTIMAL:
            return set()
        outside = set(flow.get_sink_side_min_cut())
        return {node for node, index in number.items() if index not in outside}

    def parts(self, inside: set[fx.Node], seeds: Iterable[fx.Node]) -> list[list[fx.Node]]:
        """Returns the parts of ``inside`` that uncut values connect and that hold a seed, each in the sequence of the graph."""
        joined = networkx.Graph()
        joined.add_nodes_from(inside)
        for value in inside:
            if self.by_rows.holds(value) and not self.is_cut(value, inside):
                joined.add_edges_from((value, reader) for reader in self.readers[value] if reader in inside)
        parts = dict.fromkeys(frozenset(networkx.node_connected_component(joined, seed)) for seed in seeds)
        return [[node for node in self.by_rows.steps if node in part] for part in parts]

    def region(self, nodes: list[fx.Node]) -> Region | None:
        """Returns the region of ``nodes``; None if it would make more bytes whole than it keeps in parts."""
        region = _region_of(nodes, self.by_rows.count)
        inside = set(region.steps)
        values = [value for value, readers in self.readers.items() if value in inside or not inside.isdisjoint(readers)]
        cut = {value for value in values if self.is_cut(value, inside)}
        if any(value in inside and self.by_rows.steps[value].several for value in cut):
            return None
        made_whole = [value for value in cut if value in inside]
        if any(not value.meta["val"].is_contiguous() for value in made_whole):
            return None  # joined parts are contiguous, and readers may need the layout
        kept = sum(
            _bytes(value)
            for value in values
            if value not in cut and not (value in inside and self.by_rows.steps[value].several)
        )
        return region if kept > sum(map(_bytes, cut)) else None
