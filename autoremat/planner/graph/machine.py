"""Defines what plans need of a device and its code generator, and of the calls that are open beside a step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What a fused kernel and the memory traffic of a step take, and what the code generator fuses."""

    fuses: bool = False
    """True if the code generator fuses pointwise chains (Inductor). False if it materialises every result (eager)."""
    saving_seconds_per_byte: float = 0.0
    """Seconds to write one byte in the forward and to read it in the backward."""
    write_share: float = 0.5
    """Share of ``saving_seconds_per_byte`` that the write takes. A CPU reads a line of memory before it writes the line."""
    overlaps_wholly: bool = True
    """True if the shorter of a fused kernel's arithmetic and traffic adds nothing to the longer one, as on cards."""
    launch_seconds: float = 0.0
    """Seconds of a fused kernel that does nothing. Those of extern kernels are part of their op's."""
    fusion_groups_hold_buffers: bool = False
    """True if the code generator emits one function per fusion group (on CPUs).

    The function's results are allocated before it begins, and its inputs are freed after it ends.
    """
    most_reads: int = 4
    """Largest number of buffers that an expression may read if it is inlined into several readers."""

    def traffic_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Returns the seconds in which a kernel reads and writes so many bytes."""
        read, write = (self.saving_seconds_per_byte * share for share in (1.0 - self.write_share, self.write_share))
        return read_bytes * read + written_bytes * write

    def fused_seconds(self, arithmetic: float, read_bytes: float, written_bytes: float) -> float:
        """Returns the seconds of a fused kernel from those of its arithmetic and the bytes that it reads and writes."""
        traffic = self.traffic_seconds(read_bytes, written_bytes)
        return max(arithmetic, traffic) if self.overlaps_wholly else math.hypot(arithmetic, traffic)


@dataclass(frozen=True)
class Calls:
    """The calls of a graph that are open at once, and what their caller holds beside them."""

    in_flight: int = 1
    """Number of open calls, the running one included. A pipeline opens several."""
    resident_bytes: int = 0
    """Bytes that are live beside all calls, whatever is planned: gradients of earlier micro-batches, and outputs of finished
    calls."""

    def __post_init__(self) -> None:
        if self.in_flight < 1 or self.resident_bytes < 0:
            raise ValueError(f"{self} is impossible: at least one call is open, beside at least 0 bytes")
