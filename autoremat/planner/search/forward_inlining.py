"""What fusion could inline in the forward, under any plan (:mod:`.memory.fusion`), for bounds on the seconds of its kernels.

Whether a pointwise result is materialised depends on what is saved and on what else is. Two facts limit the choices:

- With several readers that surely run, it is inlined only if its expression reads at most ``graph.most_reads`` buffers.
- With one reader, or with an expression that surely reads so few, it is materialised only if it is saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import accumulate
from operator import or_

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind


class ForwardInlining:
    """The groups and the results of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, border = graph, graph.num_forward
        self.kinds = [op.kind for op in graph.ops[:border]]
        self.group = list(accumulate(int(kind is Kind.EXTERN) for kind in self.kinds))
        """The number of extern kernels up to each op. Ops of one group under some plan may have different numbers, which only
        raises the bound."""
        self.readers = [
            sorted({reader for value in op.outputs for reader in graph.readers[value] if reader < border})
            for op in graph.ops[:border]
        ]

    def groups_of(self, index: int) -> set[int]:
        """Returns the groups that the op could run in.

        Follows the readers into which its result could be inlined. ``read`` is a lower bound on the buffers that the expression
        reads then, and ``behind`` are the values that it is computed from.
        """
        found, seen = set[int](), set[tuple[int, int, int]]()
        stack = [(index, 0, 0)]
        while stack:
            current, read, behind = stack.pop()
            found.add(self.group[current])
            if self.kinds[current] is not Kind.POINTWISE:
                continue
            for value in self.graph.ops[current].inputs:
                read += bool(self.behind[value]) and not self.behind[value] & behind
                behind |= self.behind[value]
            if (current, read, behind) not in seen and self._may_be_inlined(current, read):
                seen.add((current, read, behind))
                behind |= sum(1 << value for value in self.graph.ops[current].outputs)
                stack.extend(
                    (reader, read, behind) for reader in self.readers[current] if self.kinds[reader] is not Kind.EXTERN
                )
        return found

    @cached_property
    def behind(self) -> list[int]:
        """For each value, the values that its expression could read or contain, as a bit set; empty for constants.

        Two inputs whose sets are disjoint are two buffers, or expressions that read different ones.
        """
        values, found = self.graph.values, [1 << value for value in range(len(self.graph.values))]
        for value in self.graph.forward_values:
            producer = values[value].producer
            op = self.graph.ops[producer or 0]
            if op.kind is Kind.POINTWISE and op.inlining is not Inlining.NEVER:
                read = reduce(or_, (found[source] for source in op.inputs), 0)
                found[value] = found[value] | read if read else 0
        return found

    def _may_be_inlined(self, index: int, read: int) -> bool:
        """Returns True if a result could be inlined into its readers, where its expression reads at least ``read`` buffers."""
        inlining = self.graph.ops[index].inlining
        certain = self.graph.required_forward.intersection(self.readers[index])
        if len(self.graph.ops[index].outputs) == 1 and any(self.kinds[reader] is Kind.EXTERN for reader in certain):
            return False
        cheap = inlining is Inlining.CHEAP and read <= self.graph.most_reads
        return inlining is not Inlining.NEVER and (cheap or len(certain) <= 1)

    @cached_property
    def most_read(self) -> list[float]:
        """For each value, the most buffers that its expression could read; infinite if it could contain an op that is inlined
        only once.
        """
        found, inlined = [1.0] * len(self.graph.values), [1.0] * len(self.graph.values)
        for value in filter(self._is_inlinable, self.graph.forward_values):
            (producer,) = self.graph.producers((value,))
            op = self.graph.ops[producer]
            found[value] = math.inf if op.inlining is Inlining.ONCE else sum(inlined[source] for source in op.inputs)
            if op.inlining is not Inlining.NEVER:
                inlined[value] = max(1.0, min(found[value], self._most_if_inlined(value)))
        return found

    def _most_if_inlined(self, value: int) -> float:
        """Returns the most buffers that the expression of a value may read if it is inlined."""
        readers = self.graph.required_forward.intersection(self.graph.readers[value])
        return self.graph.most_reads if len(readers) > 1 else math.inf

    def _is_inlinable(self, value: int) -> bool:
        producer = self.graph.values[value].producer
        return producer is not None and self.kinds[producer] is Kind.POINTWISE and value not in self._held

    @cached_property
    def contained(self) -> list[int]:
        """For each op of the forward, the ops that a kernel could compute with it, as a bit set."""
        found = list[int]()
        for index, op in enumerate(self.graph.ops[: self.graph.num_forward]):
            behind = self.graph.producers(filter(self._is_inlinable, op.inputs))
            found.append(reduce(or_, (found[one] for one in behind), 1 << index))
        return found

    @cached_property
    def bytes_read(self) -> list[float]:
        """For each value, the most bytes that a pass reads for it if another pass makes or inlines it, and nothing is saved."""
        found, most = [float(value.bytes) for value in self.graph.values], self.graph.most_reads
        # For each value, the most bytes of an expression of at most 0, 1, 2, ... buffers; minus infinity if it reads more.
        limited = [[-math.inf] + [size] * most for size in found]
        for value in filter(self._is_inlinable, self.graph.forward_values):
            (producer,) = self.graph.producers((value,))
            op, size = self.graph.ops[producer], 0.0 if self.is_surely_absent(value) else found[value]
            if op.inlining is Inlining.NEVER:
                continue
            behind, expression = sum(found[source] for source in op.inputs), self._limited_bytes(op.inputs, limited)
            limited[value] = [expression[0], *(max(size, one) for one in expression[1:])]
            found[value] = max(size, behind if self._most_if_inlined(value) == math.inf else min(behind, expression[most]))
        return found

    def _limited_bytes(self, inputs: Sequence[int], limited: list[list[float]]) -> list[float]:
        """Returns the most bytes of an expression of ``inputs`` that reads at most 0, 1, 2, ... buffers."""
        counts, union = range(self.graph.most_reads + 1), 0
        found = [0.0 for _ in counts]
        for source in inputs:
            if self.behind[source] & union:  # the inputs may read one buffer, which counts once
                break
            union |= self.behind[source]
            found = [max(found[k] + limited[source][n - k] for k in range(n + 1)) for n in counts]
        else:
            return found
        behind = reduce(or_, map(self.behind.__getitem__, inputs))
        sizes = sorted((v.bytes for number, v in enumerate(self.graph.values) if behind >> number & 1), reverse=True)
        return [float(sum(sizes[:n])) for n in counts]

    @cached_property
    def _held(self) -> frozenset[int]:
        return frozenset((*self.graph.forward_outputs, *self.graph.backward_outputs))

    def is_surely_absent(self, value: int) -> bool:
        """Returns True if the forward materialises the value only in case it is saved, under every plan."""
        return self._surely_absent[value]

    @cached_property
    def _surely_absent(self) -> list[bool]:
        return [self._is_absent_unless_saved(value) for value in range(len(self.graph.values))]

    def _is_absent_unless_saved(self, value: int) -> bool:
        producer, required = self.graph.values[value].producer, self.graph.required_forward
        if producer is None or producer not in required or not self._is_inlinable(value):
            return False
        op, readers = self.graph.ops[producer], self.readers[producer]
        if len(op.outputs) > 1 or not required.intersection(readers):
            return False
        if any(self.kinds[reader] is Kind.EXTERN for reader in readers):
            return False
        if op.inlining is Inlining.NEVER:
            return False
        return len(readers) == 1 or self.most_read[value] <= self.graph.most_reads
