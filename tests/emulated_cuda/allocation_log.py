"""The card's own allocations in sequence, which is that of a real card."""

import ctypes

from autoremat.planner.memory.allocations import Allocations

POOL_MEMORY = 1
"""The pool of CUDA graphs: `Memory` in `device.cpp`."""


class Log:
    """The allocations and frees of the card in sequence."""

    def __init__(self, device: ctypes.CDLL) -> None:
        self.device = device
        device.emulated_events.restype = ctypes.c_int64

    def __len__(self) -> int:
        return int(self.device.emulated_events())

    def since(self, begin: int) -> list[tuple[int, int, bool, int]]:
        """Returns the events from `begin` on: numbers, bytes or `FREED`, True in the pool of CUDA graphs, and streams."""
        end = len(self)
        numbers = (ctypes.c_int64 * (4 * (end - begin)))()
        self.device.emulated_copy_events(ctypes.c_int64(begin), ctypes.c_int64(end), numbers)
        rows = zip(*[iter(numbers)] * 4, strict=True)
        return [(number, size, memory == POOL_MEMORY, stream) for number, size, memory, stream in rows]

    def step_since(self, begin: int) -> Allocations:
        """Returns the events from `begin` on as the allocations of a step."""
        events = [event for event in self.since(begin) if event[0] >= begin]  # others free what was there before
        pooled = frozenset(number for number, _, in_pool, _ in events if in_pool)
        return Allocations(tuple((number, size) for number, size, _, _ in events), pooled)


present: list[Log] = []
"""The card's log, once installed."""
