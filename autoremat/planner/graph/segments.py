"""Cuts the forward into segments at narrow places, found in the graph alone, without module names.

A place lies between two forward ops. Its width is the bytes of the values that cross it. Values that live through a large part
of the forward are *long-range* (masks, rotary tables, encoder outputs, U-Net skips). They cross most places and do not count.

Saving only the values on the cuts is the strategy of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). Here
the cuts lie where they are cheapest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Segments
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.segmentation


@dataclass(frozen=True)
class Chain:
    """The facts about a forward that segmentation needs, computed once per graph.

    ``width[p]`` is the bytes that cross from forward op ``p`` to later ones. ``filled[p]`` is the bytes that the forward has
    allocated up to and including op ``p``. ``last_read[v]`` is the last forward op that reads value ``v``.
    """

    graph: Graph
    last_read: NDArray[np.int64]
    long_range: frozenset[int]
    width: NDArray[np.int64]
    filled: NDArray[np.int64]

    @classmethod
    def of(cls, graph: Graph) -> Chain:
        """Returns the analysis of the forward of ``graph``."""
        count = graph.num_forward
        last_read = np.zeros(len(graph.values), dtype=np.int64)
        change = np.zeros(count + 1, dtype=np.int64)
        made = np.zeros(count, dtype=np.int64)
        long_range = set()
        for value in graph.forward_values:
            start = graph.values[value].producer
            assert start is not None
            last = max((r for r in graph.readers[value] if r < count), default=start)
            last_read[value] = last
            made[start] += graph.values[value].bytes
            if last - start > max(settings.long_range_ops, settings.long_range_share * count):
                long_range.add(value)
                continue
            change[start] += graph.values[value].bytes
            change[last] -= graph.values[value].bytes
        return cls(graph, last_read, frozenset(long_range), np.cumsum(change)[:count], np.cumsum(made))

    def crossing(self, place: int) -> list[int]:
        """Returns the values that cross from op ``place`` to later ops, without long-range ones."""
        values, producers, last = self._short_lived
        crossing: list[int] = values[(producers <= place) & (place < last)].tolist()
        return crossing

    @cached_property
    def _short_lived(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The forward values that are not long-range, their producers, and their last readers in the forward."""
        values = np.array([v for v in self.graph.forward_values if v not in self.long_range], dtype=np.int64)
        producers = np.array([self.graph.values[v].producer for v in values], dtype=np.int64)
        return values, producers, self.last_read[values]

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

    def segments(self, count: int) -> tuple[Segments, tuple[tuple[int, ...], ...]]:
        """Returns about ``count`` segments and, for each cut, the values that cross it."""
        places = self.places(count)
        of_op = np.searchsorted(places, np.arange(self.graph.num_forward), side="left")
        crossing = tuple(tuple(self.crossing(p)) for p in places)
        kept = frozenset(v for values in crossing for v in values)
        return Segments(tuple(of_op.tolist()), kept, self.long_range), crossing
