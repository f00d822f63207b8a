"""Whether the processes of a job live. Each one says so in the store from its first compilation on.

A process registers, sends heartbeats from a thread, and writes its *end* when the interpreter exits. A rank that waits for
another one looks at all three. On the same machine it also sees whether the other process exists.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoremat.agreement.channel import Channel, pauses
from autoremat.agreement.local_process import LocalProcess, State
from autoremat.basics.errors import AgreementError, BudgetInfeasible, find_cause

log = logging.getLogger("autoremat")

BEAT = 2.0
"""Seconds between two heartbeats of a rank."""

LOOK = 1.0
"""Seconds between two looks at the life of a rank that is waited for."""

LINGER = 3.0
"""Seconds for which a process that keeps the store and fails waits until the others have read the reason."""


class Presence:
    """The life of this process, for the other ranks to see, and its ear for their failures."""

    def __init__(self, channel: Channel) -> None:
        """Registers this process and starts its heartbeats. They end with the process, and other ranks notice that."""
        self._channel, self._pid, self._over = channel, os.getpid(), threading.Event()
        self._own = Channel(replace(channel.job, store=channel.job.another_connection()))
        with contextlib.suppress(AgreementError):
            channel.write(f"process/{channel.rank}", asdict(LocalProcess.of(self._pid)))
        self._thread = threading.Thread(target=self._beat, name="autoremat-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the heartbeats."""
        self._over.set()
        self._thread.join(LINGER)

    def end(self, error: BaseException | None) -> None:
        """Tells the other ranks that this process ends, because of ``error`` if there is one."""
        if os.getpid() != self._pid:  # a fork, which has no thread
            return
        self.stop()
        with contextlib.suppress(AgreementError):
            self._channel.write(f"end/{self._channel.rank}", {"error": None if error is None else in_words(error)})
            if error is not None:
                self.tell("has ended", error)

    def tell(self, what: str, error: BaseException) -> None:
        """Has the other ranks log and note that this rank did ``what`` because of ``error``, unless another one is the reason.

        They may be in a collective, where no error can reach them.
        """
        rank, lost, infeasible = self._channel.rank, find_cause(error, AgreementError), find_cause(error, BudgetInfeasible)
        if (lost is not None and lost.rank != rank) or (infeasible is not None and infeasible.rank not in (None, rank)):
            return
        number = self._channel.count("news")
        self._channel.write(f"news/{number}", {"rank": rank, "text": f"rank {rank} {what}: {in_words(error)}"})
        # The end of this process fails the collectives of others, which may then end before they have read the reason.
        self._channel.linger(f"news/{number}/heard", self._channel.job.world_size - 1, LINGER, always=True)

    def _beat(self) -> None:
        """Sends heartbeats, notes pauses of this process, and logs and notes the failures of others."""
        rank, news = self._channel.rank, 1
        with contextlib.suppress(AgreementError):  # the store has gone, and with it the ranks that would look
            while True:
                begin = time.monotonic()
                if self._over.wait(BEAT):
                    return
                self._channel.paused = max(self._channel.paused, time.monotonic() - begin - BEAT)
                self._own.count(f"beat/{rank}")
                while (found := self._own.read(f"news/{news}")) is not None:
                    if found["rank"] != rank:
                        self._channel.failures[found["rank"]] = found["text"]
                        log.error("%s", found["text"])
                        self._own.count(f"news/{news}/heard")
                    news += 1


@dataclass
class Pulse:
    """The life of another rank, as seen from this one."""

    channel: Channel
    rank: int
    clock: Callable[[], float] = time.monotonic
    process: LocalProcess | None = None
    """The other process; None until it has registered."""
    has_left: bool = False
    """True if the process has ended without an error."""
    beats: int = -1
    """Heartbeats at the last look."""
    silent: float = 0.0
    """Seconds since their number has grown. A pause of this process counts as one look."""
    looked: float = float("-inf")
    """Time of the last look."""
    loss: str | None = None
    """The reason why the rank will not answer, at the last look."""

    def check(self) -> None:
        """Raises ``AgreementError`` if the rank will not answer. Looks at most once per second."""
        loss = self.look()
        if loss is not None:
            raise AgreementError(loss, self.rank)

    def look(self) -> str | None:
        """Returns the reason why the rank will not answer, or None. A rank that has not registered may still come."""
        now = self.clock()
        if now - self.looked >= LOOK:
            if self.looked > 0:
                self.silent += min(now - self.looked, 2 * LOOK)
            self.looked, self.loss = now, self._loss()
        return self.loss

    def _loss(self) -> str | None:
        if self.process is None:
            registered = self.channel.read(f"process/{self.rank}")
            if registered is None:
                return None
            self.process = LocalProcess(**registered)
        end = self.channel.read(f"end/{self.rank}")
        if end is not None:
            self.has_left = end["error"] is None
            return f"rank {self.rank} has ended" + ("" if self.has_left else f" with {end['error']}")
        state, failure = self.process.state(), self.channel.failures.get(self.rank)
        known = "" if failure is None else f". Before that, {failure}"
        if state is State.ENDED:
            return (
                f"rank {self.rank} is lost: its process {self.process.pid} has ended without a word, as after a signal. See "
                f"that rank's own output, and the system's log for a lack of memory{known}"
            )
        beats = self.channel.count(f"beat/{self.rank}", 0)
        if beats != self.beats:
            self.beats, self.silent = beats, 0.0
        return self._silence(state) + known if self.silent > self.channel.silence else None

    def _silence(self, state: State) -> str:
        limit, own, assumed = self.channel.silence, "", "its process or its machine has ended, is stopped or hangs"
        if state is State.STOPPED and self.process is not None:
            assumed = f"its process {self.process.pid} is stopped, as by a debugger or a signal"
        if self.channel.paused > limit:
            own = f". This process itself stood still for {self.channel.paused:.0f} s, longer than others wait"
        return f"rank {self.rank} has not answered for {limit:g} s: {assumed}. See that rank's own output for the reason{own}"


def wait_for(channel: Channel, key: str, writer: int, seconds: float | None = None) -> Any:
    """Returns the data at ``key`` once rank ``writer`` has written them.

    Raises ``AgreementError`` if that rank is lost, or after ``seconds`` (None: no limit, because the rank lives and works).
    """
    pulse, deadline = Pulse(channel, writer), None if seconds is None else time.monotonic() + seconds
    for _ in pauses():
        found = channel.read(key)
        if found is not None:
            return found
        try:
            pulse.check()
        except AgreementError:
            if (found := channel.read(key)) is not None:  # written just before the end
                return found
            raise
        if deadline is not None and time.monotonic() > deadline:
            known = "" if pulse.process is not None else ", and has not used autoremat in this job"
            raise AgreementError(f"rank {writer} has not come within {seconds:g} s{known}; all ranks make this call", writer)
    raise AssertionError("pauses never end")


def in_words(error: BaseException) -> str:
    """Returns the type and the text of an error."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
