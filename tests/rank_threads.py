"""Ranks that are threads of this process, with a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from autoremat.agreement import channel as channels
from autoremat.agreement import presence as presences
from autoremat.agreement import rendezvous as meetings
from autoremat.agreement.channel import Channel
from autoremat.agreement.presence import Presence
from autoremat.torch_private.processes import Job

LONG = 60.0
"""Seconds after which a rank that has not come back hangs."""


@pytest.fixture
def quick(monkeypatch):
    """Ranks beat, look and lose patience within tenths of a second."""
    monkeypatch.setattr(presences, "BEAT", 0.05)
    monkeypatch.setattr(presences, "LOOK", 0.05)
    monkeypatch.setattr(meetings, "RECOMPILATION", 0.3)
    monkeypatch.setattr(meetings, "ALONE", 0.3)
    monkeypatch.setattr(meetings, "NOTICE", 0.1)


@pytest.fixture
def impatient(monkeypatch):
    """A rank counts as silent after a second. A busy machine may stop a thread for as long, so only tests of silence use it."""
    monkeypatch.setattr(channels, "SILENCE", 1.0)


def together(body: Callable[[Channel], Any], ranks: int) -> list[Any]:
    """The result, or the error, of ``body`` on each rank."""
    store, found = HashStore(), [None] * ranks

    def run(rank: int) -> None:
        channel = Channel(Job(rank, ranks, store))
        presence = Presence(channel)
        try:
            found[rank] = body(channel)
        except BaseException as error:
            found[rank] = error
        finally:
            presence.stop()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found
