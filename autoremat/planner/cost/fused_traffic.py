"""Computes the seconds of saving a value and of recomputing an op where the code generator fuses.

A fused kernel reads its inputs and writes the results that others read; its arithmetic is nearly free.

- A *saved* value costs a write unless the forward materialises it anyway. It costs a read if a fused kernel of the backward
    reads it.
- A *recomputed* pointwise op that is fused into its readers costs its arithmetic. It also costs one read of each input that an
    extern kernel or reduction computes and no fused kernel of the backward reads anyway.
- These costs of recomputation occur once per fusion group that needs the result, because each group computes it again. A
    result that is never inlined, such as a random number, is computed once.
- A result may be wider than what is read for it, as a float32 copy of 16-bit numbers. It costs that read once: if it were
    saved, each further group would read more.
- If the result is broadcast to a larger one, such as a logarithm per row, its arithmetic runs for each larger element.
- A pointwise op whose result an extern kernel reads runs once. It also costs a launch and the write of the result.

Without fusion, every op is a kernel that writes its result and reads its inputs in any case, so saving costs no time.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.arrays import EXTERN, POINTWISE, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining

LARGEST_TYPE_RATIO = 8
"""Largest ratio between the bytes of elements of usual types. A tensor that is larger by more than this has more elements."""


class FusedTraffic:
    """The seconds of ``graph`` that depend on fusion."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kinds: list[int] = arrays_of(graph).kinds.tolist()

    @cached_property
    def saving_seconds(self) -> NDArray[np.float64]:
        """For each value, the seconds that saving it adds."""
        graph, values = self.graph, range(len(self.graph.values))
        times = [graph.machine.traffic_seconds(self._read(value), self._written(value)) for value in values]
        seconds: NDArray[np.float64] = arrays_of(graph).value_bytes * np.array(times, dtype=float)
        return seconds

    @cached_property
    def recompute_seconds(self) -> tuple[float, ...]:
        """For each op, the seconds that recomputing it adds."""
        ops = self.graph.ops
        return tuple(self._again(index) if op.memory_bound_seconds else op.seconds for index, op in enumerate(ops))

    def _written(self, value: int) -> bool:
        """Returns True if the forward writes the value only in case it is saved."""
        graph, maker = self.graph, self.graph.values[value].producer
        if maker is None or not graph.machine.fuses:
            return False
        early = {self.kinds[op] for op in graph.readers[value] if op < graph.num_forward}
        return self.kinds[maker] == POINTWISE and EXTERN not in early and value not in graph.forward_outputs

    def _read(self, value: int) -> bool:
        """Returns True if a fused kernel of the backward reads the value only in case it is saved.

        Extern kernels read a value in any case, saved or recomputed. A value that no backward op reads is saved for recomputed
        ops. That read counts here for pointwise results; for any other result :meth:`_again` charges it.
        """
        graph, maker = self.graph, self.graph.values[value].producer
        if maker is None or not graph.machine.fuses:
            return False
        late = {self.kinds[op] for op in graph.readers[value] if op >= graph.num_forward}
        return bool(late - {EXTERN}) or (not late and self.kinds[maker] == POINTWISE)

    def _again(self, index: int) -> float:
        """Returns the seconds that recomputing a pointwise op adds."""
        graph, op = self.graph, self.graph.ops[index]
        read = sum(graph.values[v].bytes for v in graph.computed_inputs[index] if self._only_read_by_repeats(v))
        arithmetic = (op.seconds - op.memory_bound_seconds) * self._times_spread(index)
        stored = sum(
            graph.values[value].bytes
            for value in op.outputs
            if any(self.kinds[reader] == EXTERN for reader in graph.readers[value])
        )
        groups = 1 if stored or op.inlining is Inlining.NEVER else max(self._runs_in_need[index].bit_count(), 1)
        reads = 1 if read < self._made_bytes(index) else groups
        launch = graph.machine.launch_seconds if stored else 0.0
        return launch + groups * arithmetic + graph.machine.traffic_seconds(reads * read, stored)

    def _only_read_by_repeats(self, value: int) -> bool:
        """Returns True if no fused kernel of the backward reads the value anyway, and an extern kernel or reduction computes
        it.
        """
        maker = self.graph.values[value].producer
        return maker is not None and self.kinds[maker] != POINTWISE and not self._read(value)

    def _times_spread(self, index: int) -> float:
        """Returns the factor by which broadcasting to larger readers repeats the arithmetic of a forward op."""
        made = self._made_bytes(index)
        spread = self._spread_bytes[index]
        return spread / made if made and self.graph.ops[index].inputs and spread > LARGEST_TYPE_RATIO * made else 1.0

    def _made_bytes(self, index: int) -> int:
        return sum(self.graph.values[v].bytes for v in self.graph.ops[index].outputs)

    @cached_property
    def _spread_bytes(self) -> list[int]:
        """For each forward op, the bytes of the largest tensor over which fused kernels of the backward compute it."""
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
        """For each forward op, the fusion groups of the backward that read its result, as a bit set."""
        graph = self.graph
        run = np.cumsum([kind == EXTERN for kind in self.kinds]).tolist()
        needs = [0] * len(graph.ops)
        for index in range(graph.num_forward - 1, -1, -1):
            for reader in (r for value in graph.ops[index].outputs for r in graph.readers[value]):
                if reader >= graph.num_forward:
                    needs[index] |= 1 << (run[reader] - run[graph.num_forward])
                elif self.kinds[reader] == POINTWISE:
                    needs[index] |= needs[reader]
        return needs


def traffic_of(graph: Graph) -> FusedTraffic:
    """Returns the traffic of ``graph``, computed once per graph."""
    return graph.derived(FusedTraffic)
