"""Interrupts at random requests to the store: no rank waits for the interrupted one, and all compile together afterwards."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
from rank_threads import LONG, quick, together  # noqa: F401

from autoremat.agreement import rendezvous as meetings
from autoremat.agreement.channel import Channel
from autoremat.agreement.rendezvous import Rendezvous
from autoremat.agreement.session import Session
from autoremat.basics.errors import AgreementError

pytestmark = pytest.mark.usefixtures("quick")

ROUNDS = ("options", "graph", "end")


@dataclass
class Interrupts:
    """Interrupts a rank once, before or after one of its requests to the store."""

    request: int
    comes_before: bool
    thread: int | None = None
    """The identity of the rank's thread, from which on its requests count."""
    requests: int = 0

    def ask(self, request: Any) -> Any:
        if threading.get_ident() != self.thread:
            return request()
        self.requests += 1
        if self.requests == self.request and self.comes_before:
            raise KeyboardInterrupt
        answer = request()
        if self.requests == self.request:
            raise KeyboardInterrupt
        return answer


def compile_together(channel: Channel, rendezvous: Rendezvous) -> list[Any]:
    meeting = rendezvous.meet("here", range(channel.job.world_size))
    session = Session(channel, meeting)
    return [session.round(topic, channel.rank, lambda parts: sorted(parts)) for topic in ROUNDS if len(meeting.members) > 1]


@pytest.mark.parametrize("seed", range(64))
def test_an_interrupt_at_any_request_reaches_all_who_wait(seed, monkeypatch):
    draw = random.Random(seed)
    ranks = draw.randint(2, 3)
    interrupted, again = draw.randrange(ranks), draw.random() < 0.4
    delays = [draw.choice([0.0, 0.0, 0.02, 0.1]) for _ in range(ranks)]
    interrupts = Interrupts(draw.randint(1, 24), draw.random() < 0.5)
    true = Channel._ask
    monkeypatch.setattr(Channel, "_ask", lambda channel, *request: interrupts.ask(lambda: true(channel, *request)))
    monkeypatch.setattr(meetings, "RECOMPILATION", LONG)  # a rank that is told of an interrupt may linger
    through = threading.Barrier(ranks)
    at_once = draw.random() < 0.5

    def body(channel):
        rendezvous = Rendezvous(channel)
        if again:
            assert compile_together(channel, rendezvous) == [list(range(ranks))] * len(ROUNDS)
        if channel.rank == interrupted:
            interrupts.thread = threading.get_ident()
        time.sleep(delays[channel.rank])
        try:
            found = compile_together(channel, rendezvous)
        except (KeyboardInterrupt, AgreementError) as error:
            found = error
        interrupts.thread = None
        if not at_once:
            through.wait(LONG / 2)
        return found, compile_together(channel, rendezvous)

    for rank, (first, second) in enumerate(together(body, ranks)):
        if rank == interrupted and interrupts.requests >= interrupts.request:
            assert isinstance(first, KeyboardInterrupt)
        else:
            assert isinstance(first, AgreementError | list)
        assert second == [list(range(ranks))] * len(ROUNDS)
