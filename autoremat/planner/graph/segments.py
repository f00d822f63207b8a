"""Cuts the forward into segments at narrow places, found in the graph alone, without module names.

A place lies between two forward ops. Its width is the bytes of the values that cross it. Values that live through a large part
of the forward are *long-range* (masks, rotary tables, encoder outputs, U-Net skips). They cross most places and do not count.

The cuts lie where they are cheapest (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, has equal ones).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Segments
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.segmentation


@dataclass(frozen=True)
class Chain:
    """The facts about a forward that segmentation needs.

    ``width[p]`` is the bytes that cross from forward op ``p`` to later ones. ``filled[p]`` is the bytes that the forward has
    allocated up to and including op ``p``.
    """

    long_range: frozenset[int]
    width: NDArray[np.int64]
    filled: NDArray[np.int64]

    @classmethod
    def of(cls, graph: Graph) -> Chain:
        """Returns the analysis of the forward of ``graph``."""
        count = graph.num_forward
        change = np.zeros(count + 1, dtype=np.int64)
        made = np.zeros(count, dtype=np.int64)
        long_range = set()
        for value in graph.forward_values:
            start = graph.values[value].producer
            assert start is not None
            last = max((r for r in graph.readers[value] if r < count), default=start)
            made[start] += graph.values[value].bytes
            if last - start > max(settings.long_range_ops, settings.long_range_share * count):
                long_range.add(value)
                continue
            change[start] += graph.values[value].bytes
            change[last] -= graph.values[value].bytes
        return cls(frozenset(long_range), np.cumsum(change)[:count], np.cumsum(made))

    def places(self, count: int) -> list[int]:
        """Returns at most ``count - 1`` narrow places in ascending order. They divide the forward's bytes about equally."""
        total = int(self.filled[-1]) if len(self.filled) else 0
        chosen: list[int] = []
        for part in range(1, count):
            low, high = np.searchsorted(self.filled, [total * (part - 0.5) / count, total * (part + 0.5) / count])
            low = max(low, chosen[-1] + 1 if chosen else 0)
            high = min(high, len(self.filled) - 1)
            if low < high:
                narrowest = np.flatnonzero(self.width[low:high] == self.width[low:high].min()) + low
                distance = np.abs(self.filled[narrowest] - total * part / count)
                chosen.append(int(narrowest[distance.argmin()]))
        return chosen

    def segments(self, count: int) -> Segments:
        """Returns about ``count`` segments."""
        of_op = np.searchsorted(self.places(count), np.arange(len(self.filled)), side="left")
        return Segments(tuple(of_op.tolist()), self.long_range)
