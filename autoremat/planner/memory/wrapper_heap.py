"""An abstract heap for the replay of generated code: storages, the names that refer to them, and the peaks of their bytes."""

from __future__ import annotations

from collections.abc import Callable

from autoremat.planner.memory.allocations import FREED, Event

WORKSPACE = "(workspace)"
"""Name of the workspace of the call that runs."""


class Heap:
    """Storages and the names that refer to them. A storage without names is freed.

    ``is_recorded(name)`` returns True for the variables whose storages lie in the pool of CUDA graphs.
    """

    def __init__(self, round_to: int, is_recorded: Callable[[str], bool]) -> None:
        self.names: dict[str, set[int]] = {}
        self.holders: dict[int, set[str]] = {}
        self.sizes: dict[int, int] = {}
        self.pooled: set[int] = set()
        """Storages in the pool. CUDA graphs read them where they are."""
        self.live = {False: 0, True: 0}
        """Live bytes outside of the pool (False) and in it (True)."""
        self.peak = {False: 0, True: 0}
        self.is_recorded = is_recorded
        self.planar: set[str] = set()
        """Names of images whose channels are not innermost."""
        self.events: list[Event] = []
        self.round_to = round_to

    @property
    def live_bytes(self) -> int:
        """Live bytes in the pool and outside."""
        return sum(self.live.values())

    def use_workspace(self, size: int, in_pool: bool) -> None:
        """Allocates and frees a workspace of ``size`` bytes."""
        if size:
            self.allocate(size, WORKSPACE, in_pool=in_pool, round_to=1)
            self.release(WORKSPACE)

    def allocate(self, size: int, *names: str, in_pool: bool | None = None, round_to: int | None = None) -> None:
        """Allocates a storage of ``size`` bytes, rounded up, that ``names`` refer to.

        It lies in the pool if the first name is that of a recorded variable, unless ``in_pool`` says otherwise.
        """
        storage = len(self.sizes)
        in_pool = self.is_recorded(names[0]) if in_pool is None else in_pool
        round_to = round_to or self.round_to
        self.sizes[storage] = -(-size // round_to) * round_to
        if size:
            self.events.append((storage, self.sizes[storage]))
        self.holders[storage] = set(names)
        for name in names:
            self.names.setdefault(name, set()).add(storage)
        if in_pool:
            self.pooled.add(storage)
        self.live[in_pool] += self.sizes[storage]
        self.peak[in_pool] = max(self.peak[in_pool], self.live[in_pool])

    def release(self, name: str) -> None:
        """Removes ``name`` and frees the storages that no other name refers to, the last first, as Python frees a tuple."""
        for storage in sorted(self.names.pop(name, set()), reverse=True):
            self.holders[storage].discard(name)
            if not self.holders[storage]:
                self.live[storage in self.pooled] -= self.sizes[storage]
                if self.sizes[storage]:
                    self.events.append((storage, FREED))

    def copy(self, target: str, name: str, size: int) -> None:
        """Binds ``target`` to a copy of ``name``, or to its storages if all are in the pool.

        ``size`` is the size of an input that does not count as live.
        """
        known = self.names.get(name, set())
        if known <= self.pooled and (known or not size):
            self.alias(target, name)
        else:
            self.allocate(self.bytes_of(name) or size, target)

    def bytes_of(self, name: str) -> int:
        """Returns the bytes of the storages that ``name`` refers to."""
        return sum(self.sizes[storage] for storage in self.names.get(name, ()))

    def alias(self, name: str, other: str) -> None:
        """Makes ``name`` refer to the storages of ``other``."""
        if name == other:
            return
        storages = set(self.names.get(other, set()))
        self.release(name)  # no storage is freed here that `other` refers to
        self.names[name] = storages
        for storage in storages:
            self.holders[storage].add(name)
