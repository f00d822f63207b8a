"""The processes of a distributed job, and the key-value store that connects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

IN_ONE_PROCESS = ("fake", "threaded")
"""Backends of process groups whose ranks are not processes, as tests of torch use them."""


@dataclass(frozen=True, eq=False)
class Job:
    """A distributed job of several processes, as one of them sees it."""

    rank: int
    world_size: int
    store: Any
    """The store of the default process group, with a connection of its own. Nobody else waits behind our requests."""
    number: int = 1
    """Number of the job among those that this process has joined."""

    def another_connection(self) -> Any:
        """Returns the store with a further connection, for another thread."""
        return _cloned(self.store)


_present: tuple[Any, Job] | None = None
"""The default process group and its job."""


def job() -> Job | None:
    """Returns the job that this process belongs to; None if it works alone.

    A process group that is initialized anew is another job.
    """
    global _present
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.distributed_c10d._get_default_group()
    if _present is None or _present[0] is not group:
        if dist.get_world_size() == 1 or dist.get_backend() in IN_ONE_PROCESS:
            return None
        store = _cloned(dist.distributed_c10d._get_default_store())
        number = 1 if _present is None else _present[1].number + 1
        _present = group, Job(dist.get_rank(), dist.get_world_size(), store, number)
    return _present[1]


def _cloned(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # a store of the user's own; one connection works as well
        return store
