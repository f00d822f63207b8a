"""Bounds the bytes that the stays of any plan free, for the lower bounds.

A value frees its memory once its store has ended. Until then, the engines store for the seconds that the step has run, and for
those that it has waited, converted or recomputed. So a plan that has added ``E`` seconds up to a moment has freed at most

    min(rate · (seconds of the step up to the moment + E), bytes that all forms and the host have room for)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from operator import or_

from autoremat.planner.graph.forms import Engine
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind


@dataclass(frozen=True)
class Relief:
    """Upper bounds on the bytes that the stays of one call free. Without forms, they free none."""

    running: float = 0.0
    """Bytes that are freed per second while the step runs."""
    rate: float = 0.0
    """Bytes that are freed per second of waiting or converting."""
    most: float = 0.0
    """Bytes that are freed at all."""
    wanted: float = 0.0
    """Bytes that all forms together free, on a host without bound."""

    @classmethod
    def of(cls, graph: Graph, host_bytes: int | None) -> Relief:
        """Returns the bounds of a graph. ``host_bytes`` bounds the bytes on the host of all open calls; None: no bound."""
        rates: dict[Engine, float] = {}
        on_host, elsewhere, most = 0.0, 0.0, 0.0
        for value in (graph.values[v] for v in graph.forward_values):
            for form in value.forms:
                relief, store = value.bytes - form.device_bytes, form.store
                seconds = store.seconds
                if store.engine is Engine.COMPUTE and form.load.engine is Engine.COMPUTE:
                    seconds += form.load.seconds
                rate = relief / seconds if seconds else math.inf if relief else 0.0
                rates[store.engine] = max(rates.get(store.engine, 0.0), rate)
            on_device = [value.bytes - form.device_bytes for form in value.forms if not form.host_bytes]
            elsewhere += max(on_device, default=0)
            on_host = max([on_host, *((value.bytes - f.device_bytes) / f.host_bytes for f in value.forms if f.host_bytes)])
            most += max((value.bytes - form.device_bytes for form in value.forms), default=0)
        wanted = most
        if host_bytes is not None:
            most = min(most, elsewhere + on_host * host_bytes / graph.in_flight)
        running = sum(rate for engine, rate in rates.items() if engine is not Engine.COMPUTE)
        return cls(running, sum(rates.values()), most, wanted)

    def carried(self, seconds: float) -> float:
        """Returns the most bytes that are freed in a step that has run for ``seconds``, without waiting."""
        return min(self.running * seconds, self.most) if 0.0 < self.running < math.inf else min(self.running, self.most)


def forward_seconds_at_most(graph: Graph) -> float:
    """Returns an upper bound on the seconds of the forward under any plan, without waits.

    An op that fuses runs at most once in each pass of a fusion group that it is inlined into, and each pass is launched.
    """
    forward = graph.ops[: graph.num_forward]
    if not graph.fuses:
        return sum(op.seconds for op in forward)
    inlining, passes = _Inlining(graph), _passes_at_most(graph)
    fusible = {group for group, op in zip(inlining.group, forward, strict=True) if op.kind is not Kind.EXTERN}
    launched = graph.launch_seconds * sum(passes[group] for group in fusible)
    return launched + sum(op.seconds * sum(map(passes.__getitem__, inlining.groups_of(i))) for i, op in enumerate(forward))


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


class _Inlining:
    """The fusion groups of the forward that an op could be inlined into, under any plan (:mod:`.memory.fusion`)."""

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
        certain = len(self.graph.required_forward.intersection(self.readers[index]))
        cheap = inlining is Inlining.CHEAP and read <= self.graph.most_reads
        return inlining is not Inlining.NEVER and (cheap or certain <= 1)
