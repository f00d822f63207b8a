"""The processes of a distributed job, and the key-value store that connects them."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
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
    timeout: float = 1800.0
    """Seconds after which a collective of the default process group fails."""
    arrivals: Counter[str] = field(default_factory=Counter)
    """Number of times that this process has come to each meeting of ranks."""
    groups: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict)
    """Of the ranks that are expected at a place, those that came the last time."""


_present: tuple[Any, Job] | None = None
"""The default process group and its job."""

_number = count()


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
        store: Any = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
            store = store.clone()  # a store of the user's own may not have it, and one connection works as well
        # A store can outlive the process group, so each group of this process has its own keys.
        store = dist.distributed_c10d.PrefixStore(f"autoremat/{next(_number)}", store)
        _present = group, Job(dist.get_rank(), dist.get_world_size(), store, _timeout_of(group))
    return _present[1]


def _timeout_of(group: Any) -> float:
    backends = (group._get_backend(torch.device(kind)) for kind in group._device_types)
    options = (getattr(backend, "options", None) for backend in backends)
    found = (getattr(one, "_timeout", None) for one in options)
    default = dist.distributed_c10d._get_default_timeout(dist.get_backend(group))
    return min((one.total_seconds() for one in found if one is not None), default=default.total_seconds())
