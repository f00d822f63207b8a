"""What saving a value and running an op again move through memory, and so take, where the code generator fuses.

A kernel reads what it is given and writes what others read; arithmetic in between is nearly free. So a *saved* value is
written, unless the forward has it made anyway, and read, if a fused kernel of the backward reads it. A pointwise op that *runs
again* within the kernel that reads its result adds its arithmetic, and a read of what only kernels of their own make: once in
each run of fused ops that needs the result, for each computes it anew. What a kernel of its own reads is made in full. Where
the result is spread over a larger one, as a logarithm of each row over the columns, its arithmetic is done for every element of
the larger one.

Where nothing is fused, every op is a kernel, which writes its result and reads its inputs however these came to be: saving
takes no time.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.arrays import EXTERN, POINTWISE, arrays_of
from autoremat.planner.graph.graph import Graph

LARGEST_TYPE_RATIO = 8
"""Between the bytes of elements of usual types: what is larger by more than this has more elements."""


class FusedTraffic:
    """The seconds of ``graph`` that depend on what is fused."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kinds: list[int] = arrays_of(graph).kinds.tolist()
        self.seconds_per_byte = graph.saving_seconds_per_byte / 2
        """To write or to read."""

    @cached_property
    def saving_seconds(self) -> NDArray[np.float64]:
        """For each value, what saving it takes beside its memory."""
        times = [self._written(value) + self._read(value) for value in range(len(self.graph.values))]
        seconds: NDArray[np.float64] = arrays_of(self.graph).value_bytes * (
            np.array(times, dtype=float) * self.seconds_per_byte
        )
        return seconds

    @cached_property
    def recompute_seconds(self) -> tuple[float, ...]:
        """For each op, what running it again takes."""
        ops = self.graph.ops
        return tuple(self._again(index) if op.memory_bound_seconds else op.seconds for index, op in enumerate(ops))

    def _written(self, value: int) -> bool:
        """Whether the forward writes the value only if it is saved."""
        graph, maker = self.graph, self.graph.values[value].producer
        if maker is None or not graph.fuses:
            return False
        early = {self.kinds[op] for op in graph.readers[value] if op < graph.num_forward}
        return self.kinds[maker] == POINTWISE and EXTERN not in early and value not in graph.forward_outputs

    def _read(self, value: int) -> bool:
        """Whether the backward reads the value only if it is saved: kernels of their own read it however they come by it.

        What no op of the backward reads is saved for ops that run again: a read, which :meth:`_again` charges where the value
        is made by a kernel of its own.
        """
        graph, maker = self.graph, self.graph.values[value].producer
        if maker is None or not graph.fuses:
            return False
        late = {self.kinds[op] for op in graph.readers[value] if op >= graph.num_forward}
        return bool(late - {EXTERN}) or (not late and self.kinds[maker] == POINTWISE)

    def _again(self, index: int) -> float:
        graph, op = self.graph, self.graph.ops[index]
        if any(self.kinds[reader] == EXTERN for value in op.outputs for reader in graph.readers[value]):
            return op.seconds
        read = sum(graph.values[v].bytes for v in graph.computed_inputs[index] if self._only_read_by_repeats(v))
        arithmetic = (op.seconds - op.memory_bound_seconds) * self._times_spread(index)
        return max(self._runs_in_need[index].bit_count(), 1) * (arithmetic + read * self.seconds_per_byte)

    def _only_read_by_repeats(self, value: int) -> bool:
        """Whether the value is made by a kernel of its own, and no fused kernel of the backward reads it anyway."""
        maker = self.graph.values[value].producer
        return maker is not None and self.kinds[maker] != POINTWISE and not self._read(value)

    def _times_spread(self, index: int) -> float:
        """How often the arithmetic of a forward op is done where its readers are larger than its result; once if it is a
        constant, which reads nothing."""
        made = self._made_bytes(index)
        spread = self._spread_bytes[index]
        return spread / made if made and self.graph.ops[index].inputs and spread > LARGEST_TYPE_RATIO * made else 1.0

    def _made_bytes(self, index: int) -> int:
        return sum(self.graph.values[v].bytes for v in self.graph.ops[index].outputs)

    @cached_property
    def _spread_bytes(self) -> list[int]:
        """For each forward op, the bytes of the largest result in which fused kernels of the backward compute it anew, directly
        or through pointwise ops that run again."""
        graph, found = self.graph, [0] * len(self.graph.ops)
        for index in range(len(graph.ops) - 1, -1, -1):
            op = graph.ops[index]
            if self.kinds[index] == EXTERN:
                continue
            found[index] = self._made_bytes(index)
            if index >= graph.num_forward:
                read = (graph.values[v].bytes for v in op.inputs)
                found[index] = max([found[index], *read]) if self.kinds[index] != POINTWISE else found[index]
                continue
            for reader in (r for value in op.outputs for r in graph.readers[value]):
                if reader >= graph.num_forward or (self.kinds[reader] == POINTWISE and self._runs_in_need[reader]):
                    found[index] = max(found[index], found[reader])
        return found

    @cached_property
    def _runs_in_need(self) -> list[int]:
        """For each forward op, in which runs of fused ops of the backward its result is read, directly or through pointwise
        ops that run again: a bit for each."""
        graph = self.graph
        run = np.cumsum(np.array(self.kinds) == EXTERN).tolist()
        needs = [0] * len(graph.ops)
        for index in range(graph.num_forward - 1, -1, -1):
            for reader in (r for value in graph.ops[index].outputs for r in graph.readers[value]):
                if reader >= graph.num_forward:
                    needs[index] |= 1 << (run[reader] - run[graph.num_forward])
                elif self.kinds[reader] == POINTWISE:
                    needs[index] |= needs[reader]
        return needs


def traffic_of(graph: Graph) -> FusedTraffic:
    """Returns the traffic of ``graph``, worked out once."""
    return graph.derived(FusedTraffic)
