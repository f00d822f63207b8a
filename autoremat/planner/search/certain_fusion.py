"""What fusion does with the results of a graph under every plan: those that it materialises, and those that it inlines.

Whether the result of a pointwise op of the forward is materialised depends on the plan. The backward's own ops run once, so
their readers are known. The rules are those of :mod:`autoremat.planner.memory.fusion`. Where an expression reads results of the
forward's pointwise ops, the number of buffers that it reads may depend on the plan; then nothing is certain.
"""

from __future__ import annotations

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind


class CertainFusion:
    """The values of a graph that are materialised, or inlined, under every plan. Without fusion, all are materialised."""

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
