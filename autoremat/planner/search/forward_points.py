"""Program points of the forward and its end, for the lower bounds of plans with stays.

While an extern op of the forward runs that every plan runs, some bytes are live under every plan: what it reads and computes,
its workspace, outputs of the forward so far, and materialised results that a later op of the forward reads. Beside them are the
saved values that were computed before, each on the device or stored. So, with the seconds of :mod:`.forward_seconds`,

    sum of bytes(v) over the saved values v before  <=  room  +  rate · (before  +  sum of of_saving(v)  +  seconds of waits)

With ``of_saving`` on the left, a saved value weighs ``bytes(v) - rate · of_saving(v)``. Where that is below 0, the value weighs
its bytes, and ``before`` contains its ``of_saving``. The minimum cut of these weights for all that the backward reads gives a
bound on the cost, as in :mod:`.lower_bounds`. Values that are computed later or live in any case weigh nothing.
"""

from __future__ import annotations

import copy
import math

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.arrays import arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind
from autoremat.planner.search.forward_seconds import ForwardSeconds
from autoremat.planner.search.min_cut import MinCut
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.bound


class ForwardPoints:
    """The points of one graph. Engines beside the compute stream store ``rate`` bytes per second together."""

    def __init__(self, graph: Graph, mincut: MinCut, rate: float) -> None:
        self.graph, self.mincut = graph, mincut
        bounds = ForwardSeconds(graph)
        per_value = np.array(bounds.of_saving)[list(mincut.values)]
        lighter = mincut.bytes - (rate * per_value if math.isfinite(rate) else np.inf)
        is_light = lighter >= 0.0
        self.weights = np.where(is_light, lighter, mincut.bytes)
        """For each value of the cuts, the bytes by which saving it weighs."""
        self.before = np.array(bounds.before) + float(per_value[~is_light].sum())
        """For each op of the forward, and for its end, the seconds before it that do not depend on what is saved."""
        self.certain = self._certain()
        """The results that every plan materialises, each with the last op of the forward that surely needs it."""
        self.fixed = self._fixed_bytes()
        """For each op of the forward, and for its end, the bytes that are live under every plan."""
        self.usable = [i for i in sorted(graph.required_forward) if not graph.fuses or self._is_divide(i)]
        """The ops that could be program points."""
        self.points = self._choose()

    def _certain(self) -> dict[int, int]:
        graph, required, end = self.graph, self.graph.required_forward, self.graph.num_forward
        found = {}
        for value in graph.forward_values:
            producer = graph.values[value].producer
            assert producer is not None, "ops of the forward compute these values"
            if producer not in required:
                continue
            readers = required.intersection(graph.readers[value])
            by_extern = any(graph.ops[reader].kind is Kind.EXTERN for reader in readers)
            if value in graph.forward_outputs:
                found[value] = end
            elif not graph.fuses or graph.ops[producer].kind is not Kind.POINTWISE or by_extern:
                found[value] = max(readers, default=producer)
        return found

    def _fixed_bytes(self) -> NDArray[np.int64]:
        change, end = np.zeros(self.graph.num_forward + 2, dtype=np.int64), self.graph.num_forward
        for value, last in self.certain.items():
            change[self.graph.values[value].producer] += self.graph.values[value].bytes
            change[last + 1] -= self.graph.values[value].bytes
        found = np.cumsum(change)[: end + 1]
        found[:end] += arrays_of(self.graph).workspace_bytes[:end]
        found[end] += self.graph.tangent_bytes
        return found

    def _choose(self) -> list[int]:
        """Returns the ops of the forward that are program points: in each stretch the one with the most fixed bytes."""
        chosen = set[int]()
        for stretch in np.array_split(np.array(self.usable, dtype=np.int64), settings.forward_stretches):
            if len(stretch):
                chosen.add(int(stretch[np.argmax(self.fixed[stretch])]))
        return sorted(chosen)

    def _is_divide(self, index: int) -> bool:
        """Returns True if the op divides fusion groups, and its result takes no buffer over."""
        return self.graph.ops[index].kind is Kind.EXTERN and not self.graph.ops[index].in_place

    def cuts(self, point: int) -> MinCut:
        """Returns the cuts of what is saved before a point, whose values on the device have the bytes of :attr:`weights`."""
        found, producers = copy.copy(self.mincut), self.mincut.producers
        there = np.array([self.certain.get(v, -1) >= point for v in self.mincut.values], dtype=np.bool_)
        found.bytes = np.where((producers < point) & ~there, self.weights, 0.0)
        return found
