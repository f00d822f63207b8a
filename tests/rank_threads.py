"""Ranks that are threads of this process, with a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from autoremat.agreement import rendezvous as meetings
from autoremat.agreement.channel import Channel
from autoremat.torch_private.processes import Job

LONG = 60.0
"""Seconds after which a rank that has not come back hangs."""


@pytest.fixture
def quick(monkeypatch):
    """Ranks lose patience within tenths of a second."""
    monkeypatch.setattr(meetings, "RECOMPILATION", 0.3)
    monkeypatch.setattr(meetings, "NOTICE", 0.1)


def together(body: Callable[[Channel], Any], ranks: int) -> list[Any]:
    """The result, or the error, of ``body`` on each rank."""
    store, found = HashStore(), [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = body(Channel(Job(rank, ranks, store)))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found
