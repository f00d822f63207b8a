"""Tells which tensors of a schedule are in the caches of a CPU when a kernel reads or writes them.

A result of at most ``graph.cached_bytes`` stays in the caches until kernels have read it, unless it is saved. Other tensors
take the place of a saved one before the backward. So the forward writes it to memory, and the backward reads it from there.
What the caller holds, such as a gradient, has a place of its own too. Cards have no such caches: their kernels read memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoremat.planner.graph.arrays import Flags
from autoremat.planner.graph.graph import Graph
from autoremat.planner.memory.live_ranges import Buffers


@dataclass(frozen=True)
class Cached:
    """For each live range, whether accesses to it are in the caches."""

    saved: Flags
    """True if the forward computes it and the backward reads it."""
    early_reads: Flags
    """Reads in the forward."""
    late_reads: Flags
    """Reads in the backward."""
    writes: Flags

    @classmethod
    def of(cls, graph: Graph, buffers: Buffers) -> Cached:
        """Returns the accesses of a schedule."""
        saved = np.zeros(len(buffers.bytes), dtype=bool)
        read = buffers.source[buffers.reader >= buffers.num_forward]
        saved[read[buffers.start[read] < buffers.num_forward]] = True
        fits = buffers.bytes <= graph.cached_bytes
        held = np.isin(buffers.value, [*graph.forward_outputs, *graph.backward_outputs])
        return cls(saved, fits, fits & ~saved, fits & ~saved & ~held)
