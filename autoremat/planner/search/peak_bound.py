"""A lower bound on the peak of any plan: the least bytes from which the rest of the step can still be computed.

Take one op of the backward. While it runs, some bytes are live under every plan: what it reads and computes, its workspace,
tangents, outputs of the forward and the gradients so far. Beside them, values must be live from which everything that later ops
read can be computed. The fewest such bytes are a minimum cut:

    source -> op            infinite, for every op that runs once
    op -> value             bytes of the value; 0 if it is live in any case
    value -> reading op     infinite, for every op that can run again or has not run
    op -> sink              infinite, for every op of the backward that has not run
    value -> sink           infinite, for every value that the caller gets

A result that is not materialised holds no bytes, but its inputs are live until its readers have run. The cut counts these.

The bound holds for all plans whose backward runs its own ops once and in sequence, with any recomputation.
"""

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind
from autoremat.planner.search.min_cut import INFINITE, infinite_arcs
from autoremat.planner.settings import settings


class PeakBound:
    """The lower bound of one graph with a backward."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.count = graph, len(graph.ops)
        self.outputs = frozenset(graph.forward_outputs).intersection(graph.forward_values)
        self.gradients = frozenset(graph.backward_outputs).difference(graph.forward_values)
        self.bytes, self.producer = [value.least_bytes for value in graph.values], graph.makers
        self.last_read = [max(readers, default=-1) for readers in graph.readers]
        for value in graph.backward_outputs:
            self.last_read[value] = self.count
        self.fusion = CertainFusion(graph)
        self.materialised = self.fusion.materialised
        self.runs_once = [
            not op.may_run_again if op.forward else all(self.materialised[value] for value in op.outputs) for op in graph.ops
        ]
        """For each op, False if it may run again in the backward, or where its result is read."""
        self._build()
        self._find_held()

    def _build(self) -> None:
        """Builds the network. Its capacities depend on the place in the backward."""
        graph, count = self.graph, self.count
        self.values = [v for v, producer in enumerate(self.producer) if producer >= 0]
        node = {value: count + number for number, value in enumerate(self.values)}
        self.source, self.sink = count + len(self.values), count + len(self.values) + 1
        own = range(graph.num_forward, count)
        self.single = [index for index in range(count) if self.runs_once[index]]
        again = [index for index in range(count) if not (self.runs_once[index] and graph.ops[index].forward)]
        behind = [(i, self.producer[v]) for i in own for v in graph.computed_inputs[i]]
        self.flow = max_flow.SimpleMaxFlow()
        infinite_arcs(self.flow, [(node[value], index) for index in again for value in graph.computed_inputs[index]])
        infinite_arcs(self.flow, [(node[value], self.sink) for value in graph.backward_outputs if value in node])
        infinite_arcs(self.flow, [(index, maker) for index, maker in behind if maker in own and self.runs_once[maker]])
        self.once = infinite_arcs(self.flow, [(self.source, index) for index in self.single])
        self.later = infinite_arcs(self.flow, [(index, self.sink) for index in own])
        self.hold = infinite_arcs(self.flow, [(self.producer[value], node[value]) for value in self.values])
        self.prices = np.array([self.bytes[value] for value in self.values], dtype=np.int64)

    def read(self, index: int) -> set[int]:
        """Returns the materialised values that an op reads under every plan."""
        extern = self.graph.ops[index].kind is Kind.EXTERN
        return {value for value in self.graph.computed_inputs[index] if self.materialised[value] or extern}

    def made(self, index: int) -> set[int]:
        """Returns the results of an op that every plan materialises."""
        return {value for value in self.graph.made[index] if self.materialised[value]}

    def live_sets(self, index: int) -> list[tuple[int, set[int]]]:
        """Returns places, each with the values that are live there under every plan while op ``index`` of the backward runs."""
        read, made = self.read(index), self.made(index)
        if not (self.graph.machine.fuses and self.fusion.may_overwrite(index)):
            return [(index, read | made)]
        sizes = {self.graph.values[value].bytes for value in self.graph.made[index]}
        return [(index, read), (index + 1, made | {value for value in read if self.graph.values[value].bytes not in sizes})]

    def least(self, index: int, place: int, live: set[int]) -> int:
        """Returns the least bytes while op ``index`` runs and the backward's own ops from ``place`` on are left.

        The values ``live`` are live beside those of the caller.
        """
        ran = np.arange(self.count) < place
        certain = self.outputs | live.union(value for value in self.gradients if ran[self.producer[value]])
        self.flow.set_arcs_capacity(self.once, np.where(ran[self.single], INFINITE, 0))
        self.flow.set_arcs_capacity(self.later, np.where(ran[self.graph.num_forward :], 0, INFINITE))
        self.flow.set_arcs_capacity(self.hold, np.where(np.isin(self.values, list(certain)), 0, self.prices))
        self.flow.solve(self.source, self.sink)
        return self.certain_bytes(index, place, live) + int(self.flow.optimal_flow())

    def certain_bytes(self, index: int, place: int, live: set[int]) -> int:
        """Returns the bytes that are live beside the cut: tangents, workspace, ``live`` and what the caller holds."""
        graph, beside = self.graph, live - self.outputs
        beside -= {value for value in beside & self.gradients if self.producer[value] < place}
        bytes_ = sum(graph.values[value].bytes for value in beside) + int(self.held_bytes[place])
        return graph.tangent_bytes + graph.ops[index].workspace_bytes + bytes_

    def _find_held(self) -> None:
        """Finds, for each op, the bytes that the caller holds there, and an upper bound on those of the cut."""
        held, most, change = np.zeros(self.count + 1, np.int64), [0] * len(self.bytes), np.zeros(self.count + 2, np.int64)
        for value in self.gradients:
            held[self.producer[value] + 1] += self.graph.values[value].bytes
        self.held_bytes: NDArray[np.int64] = np.cumsum(held) + sum(self.graph.values[value].bytes for value in self.outputs)
        for value in self.values:
            producer = self.producer[value]
            behind = sum(most[read] for read in self.graph.computed_inputs[producer])
            most[value] = self.bytes[value] if self.runs_once[producer] else min(self.bytes[value], behind)
            change[producer + 1] += most[value]
            change[max(producer, self.last_read[value]) + 1] -= most[value]
        self.most_bytes: NDArray[np.int64] = np.cumsum(change)


def bound_on_peak(graph: Graph) -> int:
    """Returns the lower bound on the peak of one call. Ops come first at which the most bytes are live under every plan."""
    bound, failures = PeakBound(graph), 0
    places = {index: bound.live_sets(index) for index in range(graph.num_forward, len(graph.ops))}
    certain = {index: max(bound.certain_bytes(index, *place) for place in found) for index, found in places.items()}
    found = max(certain.values(), default=0)
    for index in sorted(places, key=lambda index: (-certain[index], index)):
        most = bound.certain_bytes(index, index, bound.read(index) | bound.made(index)) + int(bound.most_bytes[index])
        if most <= found:
            continue
        least = max(bound.least(index, *place) for place in places[index])
        found, failures = max(found, least), 0 if least > found else failures + 1
        if failures == settings.levels:
            break
    return found


class CertainFusion:
    """The values of a graph that are materialised under every plan. Without fusion, all are.

    Whether the result of a pointwise op of the forward is materialised depends on the plan. The backward's own ops run once, so
    their readers are known. The rules are those of :mod:`autoremat.planner.memory.fusion`. A plan may materialise what they
    inline.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.gradients = frozenset(graph.backward_outputs)
        self.materialised: list[bool] = [value.producer is not None for value in graph.values]
        """For each value, True if it is materialised wherever it is computed."""
        for index, op in enumerate(graph.ops if graph.machine.fuses else ()):
            for value in op.outputs:
                self.materialised[value] = op.kind is not Kind.POINTWISE or self._is_materialised(index, value)

    def may_overwrite(self, index: int) -> bool:
        """Returns True if the result of an op may take over a buffer of its size that the op reads, also through inlined
        results."""
        graph, stack, seen = self.graph, [index], set[int]()
        sizes = {graph.values[value].bytes for value in graph.ops[index].outputs}
        while stack:
            for value in set(graph.ops[stack.pop()].in_place) - seen:
                if graph.values[value].bytes in sizes:
                    return True
                seen.add(value)
                producer = graph.values[value].producer
                stack += [] if producer is None or self.materialised[value] else [producer]
        return False

    def _is_materialised(self, index: int, value: int) -> bool:
        graph = self.graph
        if index < graph.num_forward:
            return False
        readers = graph.readers[value]
        if value in self.gradients or any(graph.ops[reader].kind is Kind.EXTERN for reader in readers):
            return True
        op = graph.ops[index]
        read = {v for v in op.inputs if graph.values[v].producer is None or self.materialised[v]}
        is_cheap = op.inlining is Inlining.CHEAP and len(read) <= graph.machine.most_reads
        if op.inlining is not Inlining.NEVER and (len(readers) == 1 or (readers and is_cheap)):
            return False
        # A result that is not inlined can still be computed in the same loop as its readers, but not across an extern kernel,
        # and not before a reduction.
        between = (op.kind is Kind.EXTERN for op in graph.ops[index : max(readers, default=index)])
        return any(graph.ops[reader].kind is Kind.REDUCTION for reader in readers) or any(between)
