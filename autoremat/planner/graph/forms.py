"""Defines forms: ways to keep a saved tensor between the forward and the backward, beside "as it is, on the device".

A form is a fact about a value. The decision to use one is a stay (:class:`autoremat.planner.graph.schedule.Stay`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Engine(enum.Enum):
    """What carries out a transfer. Each engine is a serial queue, which serves transfers in the sequence of their issue."""

    COMPUTE = "compute"
    """The compute stream itself: the step waits for the whole transfer."""
    TO_HOST = "to host"
    """The copies from the device to the host."""
    FROM_HOST = "from host"
    """The copies from the host to the device."""
    NETWORK = "network"
    """The collectives of the value's group of ranks."""


DEVICE, HOST, BITS, SHARDS = "device", "host", "bits", "shards"
"""The names of forms: as it is on the device, in pinned host memory, a bool tensor as one bit per element, and an equal part
on each rank of a group of a value that is the same on all of them."""


@dataclass(frozen=True)
class Transfer:
    """One conversion between a value and its form: the engine, and its seconds by the cost model at the planned rate."""

    engine: Engine
    seconds: float
    temporary_bytes: int = 0
    """Bytes on the device beside source and result, from the issue until the end."""
    both_ways: float = 1.0
    """The share of the rate that a copy has while others run in the other direction."""


@dataclass(frozen=True)
class Form:
    """A way to keep a value between the store in the forward and the load in the backward."""

    name: str
    """Unique among the forms of a value, such as ``"host"`` or ``"bits"``. Stays name forms, in plan files too."""
    store: Transfer
    load: Transfer
    device_bytes: int = 0
    """Bytes on the device while the value is stored."""
    host_bytes: int = 0
    """Bytes on the host while the value is stored."""
    ranks: tuple[int, ...] = ()
    """The ranks that load together and so follow one plan; empty if a rank loads alone."""
