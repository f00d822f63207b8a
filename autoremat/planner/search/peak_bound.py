"""A lower bound on the peak of any plan: the least bytes from which the rest of the step can still be computed.

Take one op of the backward. While it runs, some bytes are live under every plan: what it reads and computes, its workspace,
tangents, outputs of the forward and the gradients so far. Beside them, values must be live from which everything that later ops
read can be computed. Few ops can compute it again: those of the forward that are rematerializable, and pointwise ones of the
backward that fusion may inline where their results are read. The fewest such bytes are a minimum cut:

    source -> op            infinite, for every op that runs once
    op -> value             bytes of the value; 0 if it is live in any case; infinite if fusion inlines it
    value -> reading op     infinite, for every op that can run again or has not run
    op -> sink              infinite, for every op of the backward that has not run
    value -> sink           infinite, for every value that the caller gets

A result that is not materialised holds no bytes, but its inputs are live until its readers have run. The cut counts these.

Where an op reads a value of the forward, some op computed it last. If it ran again in the backward, its own operands were live
then, beside all that later ops need. From there on the value was live, too. The least peak over all such places is a bound.

Both bounds hold for all plans whose backward runs its own ops once and in sequence, with any recomputation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import max_flow

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind
from autoremat.planner.settings import settings

INFINITE = 1 << 60
"""Capacity of arcs that no cut contains: more than the bytes of any graph."""


def bound_on_peak(graph: Graph) -> int:
    """Returns the lower bound on the peak of one call."""
    return PeakBound(graph).peak_bytes()


class PeakBound:
    """The lower bound of one graph with a backward."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.count = graph, len(graph.ops)
        self.outputs = frozenset(graph.forward_outputs).intersection(graph.forward_values)
        self.gradients = frozenset(graph.backward_outputs).difference(graph.forward_values)
        self.bytes, self.producer = [value.least_bytes for value in graph.values], graph.makers
        self.held_bytes = self._held_bytes()
        self.last_read = [max(readers, default=-1) for readers in graph.readers]
        for value in graph.backward_outputs:
            self.last_read[value] = self.count
        self.fusion = CertainFusion(graph)
        self.materialised = self.fusion.materialised
        self.inlined = [self.fusion.is_inlined(value) for value in range(len(graph.values))]
        self.runs_once = [not self._can_run_again(index) for index in range(self.count)]
        self.cuts_left = max(settings.peak_cuts // (1 + self.count + len(graph.values)), settings.fewest_peak_cuts)
        self._build()
        self._most_held = self._most_bytes()

    @property
    def is_spent(self) -> bool:
        """True after the last cut that the graph's size allows."""
        return self.cuts_left <= 0

    def _can_run_again(self, index: int) -> bool:
        """Returns True if an op may run again in the backward, or where its result is read."""
        op = self.graph.ops[index]
        if not op.forward:
            return not all(map(self.materialised.__getitem__, op.outputs))
        return op.may_run_again

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
        self._arcs([(node[value], index) for index in again for value in graph.computed_inputs[index]])
        self._arcs([(node[value], self.sink) for value in graph.backward_outputs if value in node])
        self._arcs([(index, maker) for index, maker in behind if maker in own and self.runs_once[maker]])
        self.once = self._arcs([(self.source, index) for index in self.single])
        self.later = self._arcs([(index, self.sink) for index in own])
        self.hold = self._arcs([(self.producer[value], node[value]) for value in self.values])
        prices = (INFINITE if self.inlined[value] else self.bytes[value] for value in self.values)
        self.prices = np.array(list(prices), dtype=np.int64)

    def _arcs(self, pairs: list[tuple[int, int]]) -> NDArray[np.int32]:
        ends = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        capacities = np.full(len(ends), INFINITE, dtype=np.int64)
        arcs: NDArray[np.int32] = self.flow.add_arcs_with_capacity(ends[:, 0].copy(), ends[:, 1].copy(), capacities)
        return arcs

    def read(self, index: int) -> set[int]:
        """Returns the materialised values that an op reads under every plan, also through inlined results."""
        found, stack = set(), list(self.graph.computed_inputs[index])
        extern = self.graph.ops[index].kind is Kind.EXTERN
        while stack:
            value = stack.pop()
            if self.materialised[value] or extern:
                found.add(value)
            elif self.inlined[value]:
                stack += self.graph.computed_inputs[self.producer[value]]
        return found

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

    def bytes_at(self, index: int) -> int:
        """Returns the least bytes of one call that are live while op ``index`` of the backward runs."""
        return max(self.least(index, place, live) for place, live in self.live_sets(index))

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
        self.cuts_left -= 1
        bytes_ = sum(self.graph.values[value].bytes for value in certain)
        return self.graph.tangent_bytes + self.graph.ops[index].workspace_bytes + bytes_ + int(self.flow.optimal_flow())

    def _certain_bytes(self, index: int, place: int, live: set[int]) -> int:
        """Returns the bytes that are live beside the cut: tangents, workspace, the values
        ``live`` and those of the caller."""
        beside = sum(self.graph.values[value].bytes for value in live if not self.is_held(value, place))
        return self.graph.tangent_bytes + self.graph.ops[index].workspace_bytes + int(self.held_bytes[place]) + beside

    def is_held(self, value: int, place: int) -> bool:
        """Returns True if the caller holds a value while the backward is at ``place``."""
        return value in self.outputs or (value in self.gradients and self.producer[value] < place)

    def _held_bytes(self) -> NDArray[np.int64]:
        """Returns, for each op, the bytes of the values that the caller holds while the backward is there."""
        held = np.zeros(self.count + 1, dtype=np.int64)
        for value in self.gradients:
            held[self.producer[value] + 1] += self.graph.values[value].bytes
        return np.cumsum(held) + sum(self.graph.values[value].bytes for value in self.outputs)

    def most(self, index: int, place: int, live: set[int]) -> int:
        """Returns an upper bound on :meth:`least`, without a cut."""
        return self._certain_bytes(index, place, live) + int(self._most_held[place])

    def _most_bytes(self) -> NDArray[np.int64]:
        """Returns, for each op, an upper bound on the bytes of the cut: all that it or a later op reads is live."""
        most, change = [0] * len(self.bytes), np.zeros(self.count + 2, dtype=np.int64)
        for value in self.values:
            producer = self.producer[value]
            behind = sum(most[read] for read in self.graph.computed_inputs[producer])
            alternatives = [INFINITE if self.inlined[value] else self.bytes[value]]
            alternatives += [] if self.runs_once[producer] else [behind]
            most[value] = min(alternatives)
            change[producer + 1] += most[value]
            change[max(producer, self.last_read[value]) + 1] -= most[value]
        return np.cumsum(change)

    def peak_bytes(self) -> int:
        """Returns the lower bound on the peak of one call."""
        backward = range(self.graph.num_forward, self.count)
        most = {index: self.most(index, index, self.read(index) | self.made(index)) for index in backward}
        found = max((self._certain_bytes(index, *there) for index in backward for there in self.live_sets(index)), default=0)
        for index in sorted(backward, key=lambda index: (-most[index], index)):
            if self.is_spent:
                return found
            if most[index] <= found:
                break
            found = max(found, self.bytes_at(index))
        for index in sorted(backward, key=lambda index: (-most[index], index)):
            for value in sorted(self.read(index)):
                if self.can_be_repeated(value):
                    found = max(found, self.bytes_of_reading(value, index, found))
        return found

    def can_be_repeated(self, value: int) -> bool:
        """Returns True if the backward may run the op of ``value`` again, and then materialises what it reads and computes."""
        producer, graph = self.producer[value], self.graph
        if producer >= graph.num_forward or value in self.outputs or self.runs_once[producer] or graph.values[value].forms:
            return False
        return not graph.machine.fuses or (graph.ops[producer].kind is Kind.EXTERN and not self.fusion.may_overwrite(producer))

    def bytes_of_reading(self, value: int, index: int, known: int) -> int:
        """Returns the least peak of plans from the last computation of ``value`` to its read by op ``index`` of the backward.

        At most ``known`` counts as 0.
        """
        producer, first = self.producer[value], self.graph.num_forward
        operands = self.read(producer) | self.made(producer)
        found, holding = INFINITE, 0
        for place in range(index, first - 1, -1):
            if self.is_spent or max(holding, self.most(producer, place, operands)) <= known:
                return 0
            found = min(found, max(holding, self.least(producer, place, operands)))
            if found <= known:
                return 0
            if place > first:
                holding = max(holding, self.least(place - 1, place - 1, {value}))
            if holding >= found:
                break
        return min(found, holding)


class CertainFusion:
    """The values of a graph that are materialised, or inlined, under every plan. Without fusion, all are materialised.

    Whether the result of a pointwise op of the forward is materialised depends on the plan. The backward's own ops run once, so
    their readers are known. The rules are those of :mod:`autoremat.planner.memory.fusion`. Where an expression reads results of
    the forward's pointwise ops, the number of buffers that it reads may depend on the plan; then nothing is certain.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.gradients = frozenset(graph.backward_outputs)
        self._inlined: dict[int, bool] = {}  # values that are neither here nor materialised are uncertain
        self.materialised: list[bool] = [value.producer is not None for value in graph.values]
        """For each value, True if it is materialised wherever it is computed."""
        for index, op in enumerate(graph.ops if graph.machine.fuses else ()):
            for value in op.outputs:
                self.materialised[value] = op.kind is not Kind.POINTWISE or self._is_materialised(index, value)

    def is_inlined(self, value: int) -> bool:
        """Returns True if the value is never materialised: its readers compute it."""
        return self._inlined.get(value, False)

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
        certain = self._decides_inlining(index, readers)
        if certain is not None:
            self._inlined[value] = certain
        # A result that is not inlined can still be computed in the same loop as its readers, but not across an extern kernel,
        # and not before a reduction.
        between = (op.kind is Kind.EXTERN for op in graph.ops[index : max(readers, default=index)])
        return certain is False and (any(graph.ops[reader].kind is Kind.REDUCTION for reader in readers) or any(between))

    def _decides_inlining(self, index: int, readers: tuple[int, ...]) -> bool | None:
        """Returns whether the result of an op is inlined into its readers; None if that depends on the plan."""
        if self.graph.ops[index].inlining is Inlining.NEVER or not readers:
            return False
        return True if len(readers) == 1 else self._is_cheap(index)

    def _is_cheap(self, index: int) -> bool | None:
        """Returns whether the expression of an op is cheap and reads few buffers; None if that depends on the plan."""
        graph, stack = self.graph, [index]
        least: set[int] = set()
        most: set[tuple[int, int]] = set()
        seen, certain = set(stack), True
        while stack:
            current = stack.pop()
            if graph.ops[current].inlining is Inlining.ONCE:
                return False
            for value in graph.ops[current].inputs:
                producer = graph.values[value].producer
                if producer is not None and self.is_inlined(value):
                    stack += [] if producer in seen else [producer]
                    seen.add(producer)
                elif producer is None or self.materialised[value] or self._inlined.get(value) is False:
                    least.add(value)
                    most.add((value, current if producer is not None and producer < graph.num_forward else -1))
                else:
                    certain = False
        if len(least) > graph.machine.most_reads:
            return False
        return True if certain and len(most) <= graph.machine.most_reads else None
