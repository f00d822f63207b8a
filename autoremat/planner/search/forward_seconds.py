"""Upper bounds on the seconds of the forward under any plan, without waits. They bound what stays store, for the lower bounds.

    seconds before an op  <=  ``before`` of the op  +  sum of ``of_saving`` over the saved values that are computed before it

This holds at the end of the forward, and at extern ops that surely run, because these divide fusion groups under every plan.

Where ops fuse, the kernels of a fusion group (:mod:`.cost.durations`) take at most

    launches of its passes  +  min(seconds of its ops alone, their arithmetic + seconds of the bytes that they read and write)

An op runs at most once in each pass of a group that it could be inlined into. A pass reads each tensor at most once, and none
that it makes. Some results are surely inlined unless they are saved. Only saving makes a pass write or read them, and
``of_saving`` counts that. Any other result counts as written where it is computed. In groups that could compute one of its
readers it counts as read, or what :mod:`.forward_inlining` bounds its expression by.

Of the arithmetic, only what exceeds the seconds of writing counts, if both overlap wholly: a kernel takes no longer than the
greater of the two and its reads. A kernel that writes a pointwise result takes no longer than the ops that it computes, alone.

Groups are those of the forward with all its ops. If an extern op does not run, the two groups beside it are one. That one
moves no more than both, because each of the two counts what the other makes.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from autoremat.planner.cost.durations import arithmetic_seconds
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind
from autoremat.planner.search.forward_inlining import ForwardInlining


class ForwardSeconds:
    """The bounds of one graph."""

    def __init__(self, graph: Graph) -> None:
        forward = graph.ops[: graph.num_forward]
        self.of_saving = [0.0] * len(graph.values)
        """For each value, an upper bound on the seconds by which saving it makes the forward longer."""
        extern = [op.seconds if not graph.fuses or op.kind is Kind.EXTERN else 0.0 for op in forward]
        self.before = list(accumulate(extern, initial=0.0))
        """For each op of the forward, and for its end, an upper bound on the seconds before it if nothing is saved."""
        if graph.fuses:
            for value in graph.forward_values:
                size, maker = graph.values[value].bytes, graph.values[value].producer
                if maker is not None and graph.ops[maker].kind is Kind.EXTERN and size <= graph.cached_bytes:
                    self.of_saving[value] = graph.traffic_seconds(0, size)
            groups = _Groups(graph)
            ended = list(accumulate(groups.seconds, initial=0.0))
            numbers = [*groups.inlining.group, len(groups.seconds)]
            self.before = [seconds + ended[number] for seconds, number in zip(self.before, numbers, strict=True)]
            for value in filter(groups.inlining.is_surely_absent, graph.forward_values):
                per_byte = graph.write_seconds_per_byte + groups.reads[value] * graph.read_seconds_per_byte
                self.of_saving[value] = graph.values[value].bytes * per_byte


class _Groups:
    """The fusion groups of a forward: stretches of fusible ops between two extern ops."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.inlining, self.passes = graph, ForwardInlining(graph), _passes_at_most(graph)
        self.read, self.write = graph.read_seconds_per_byte, graph.write_seconds_per_byte
        self.reads = Counter[int]()
        """For each value, the passes that could read it."""
        self.seconds = self._seconds()
        """For each group, an upper bound on the seconds of its kernels if nothing is saved."""

    def _seconds(self) -> list[float]:
        graph, inlining, passes, arithmetic = self.graph, self.inlining, self.passes, arithmetic_seconds(self.graph)
        alone, busy, written, wholly, excess = ([0.0] * len(passes) for _ in range(5))
        read, direct = ([set[int]() for _ in passes] for _ in range(2))
        members: list[list[int]] = [[] for _ in passes]
        fusible = [index for index, op in enumerate(graph.ops[: graph.num_forward]) if op.kind is not Kind.EXTERN]
        for index in fusible:
            op, own = graph.ops[index], inlining.group[index]
            for group in inlining.groups_of(index):
                members[group].append(index)
                alone[group] += passes[group] * op.seconds
                busy[group] += passes[group] * arithmetic[index]
                read[group].update(value for value in op.inputs if not self._is_made_in(value, group))
            direct[own].update(value for value in op.inputs if not self._is_made_in(value, own))
        for index in fusible:
            own = inlining.group[index]
            written[own] += self._seconds_of_writing(index)
            wholly[own] += self._seconds_beside_reads(index, members[own])
            excess[own] += self._seconds_beyond_writing(index, members[own])
        found = [0.0] * len(passes)
        for group in {inlining.group[index] for index in fusible}:
            self.reads.update(dict.fromkeys(read[group], passes[group]))
            present = (value for value in read[group] if not inlining.is_surely_absent(value))
            each = written[group] + passes[group] * self.read * sum(graph.values[value].bytes for value in present)
            through = wholly[group] + passes[group] * self.read * sum(map(inlining.bytes_read.__getitem__, direct[group]))
            found[group] = passes[group] * graph.launch_seconds + min(
                alone[group], min(busy[group], excess[group]) + min(each, through)
            )
        return found

    def _seconds_of_writing(self, index: int) -> float:
        """Returns the most seconds in which a kernel writes the results of an op, if nothing is saved."""
        present = (value for value in self.graph.ops[index].outputs if not self.inlining.is_surely_absent(value))
        return sum(self.graph.values[value].bytes for value in present) * self.write

    def _seconds_beyond_writing(self, index: int, members: list[int]) -> float:
        """Returns the most seconds by which the arithmetic of a kernel that writes the results of an op exceeds the writing.

        It is all of the arithmetic where both do not overlap wholly, or where results are written to caches.
        """
        op, arithmetic = self.graph.ops[index], arithmetic_seconds(self.graph)
        busy = sum(arithmetic[one] for one in members if self.inlining.contained[index] >> one & 1)
        are_written = op.kind is not Kind.POINTWISE or len(op.outputs) == 1  # by a kernel that is for this op
        written = sum(self.graph.values[value].bytes for value in op.outputs) if are_written else 0
        is_hidden = self.graph.overlaps_wholly and not self.graph.cached_bytes
        return max(0.0, busy - written * self.write) if is_hidden else busy

    def _seconds_beside_reads(self, index: int, members: list[int]) -> float:
        """Returns an upper bound on the seconds that writing the results of an op adds to those of the reads of its group.

        ``members`` are the ops that the group could run. The kernel that writes takes no longer than those of them that it
        computes, alone. If no other op of the group reads an input, no other kernel reads it then: that input counts already.
        """
        graph, inlining, op, own = self.graph, self.inlining, self.graph.ops[index], self.inlining.group[index]
        seconds = self._seconds_of_writing(index)
        if not seconds or op.kind is not Kind.POINTWISE or len(op.outputs) > 1 or self.passes[own] > 1:
            return seconds
        private = [value for value in op.inputs if not self._is_made_in(value, own)]
        private = [value for value in private if not any(one in members and one != index for one in graph.readers[value])]
        computed = sum(graph.ops[one].seconds for one in members if inlining.contained[index] >> one & 1)
        return max(0.0, min(seconds, computed - self.read * sum(map(inlining.bytes_read.__getitem__, private))))

    def _is_made_in(self, value: int, group: int) -> bool:
        """Returns True if the only pass of the group makes the value, unless another group inlines it."""
        producer = self.graph.values[value].producer
        if producer is None or self.inlining.kinds[producer] is Kind.EXTERN or self.passes[group] > 1:
            return False
        return self.inlining.group[producer] == group


def _passes_at_most(graph: Graph) -> list[int]:
    """Returns an upper bound on the passes of each fusion group of the forward under any plan (:mod:`.cost.durations`).

    Along the reads of ops, each one that ends a pass begins another behind it, and perhaps one for itself. Only an extern op
    that surely runs divides such a path.
    """
    passes, begin = [1], 0
    before = [(0, 0)] * len(graph.values)  # the group behind the last divide, and the number of the pass
    for index, op in enumerate(graph.ops[: graph.num_forward]):
        if op.kind is Kind.EXTERN:
            passes.append(1)
            begin = len(passes) - 1 if index in graph.required_forward else begin
            continue
        number = max((number for divide, number in map(before.__getitem__, op.inputs) if divide == begin), default=0)
        number += op.ends_pass
        passes[begin:] = [max(most, number + op.ends_pass + 1) for most in passes[begin:]]
        for value in op.outputs:
            before[value] = begin, number + op.ends_pass
    return passes
