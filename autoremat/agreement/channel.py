"""Messages between the ranks of a job, in the store that ``init_process_group`` made.

A store needs no process group of its own. Ranks that never compile therefore cannot be missed when a group is made, and no
message can meet a collective of the training step.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autoremat.basics.errors import AgreementError
from autoremat.torch_private.processes import Job

BEAT = 1.0
"""Seconds between two heartbeats of a rank that compiles."""

SILENCE = 10.0
"""Seconds without a heartbeat after which a rank counts as lost."""

SHORTEST, LONGEST = 0.002, 0.1
"""Seconds between two looks at the store: at first, and at most."""


def pauses() -> Iterator[None]:
    """Sleeps before each next item, longer each time. A loop over it looks for something that another rank will write."""
    seconds = SHORTEST
    while True:
        yield
        time.sleep(seconds)
        seconds = min(seconds * 1.5, LONGEST)


@dataclass(frozen=True)
class Channel:
    """Reads and writes JSON data under keys of the job's store."""

    job: Job

    @property
    def prefix(self) -> str:
        """The beginning of all keys. A store can outlive the process group, so each group of this process has its own."""
        return f"autoremat/{self.job.number}/"

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self.job.rank

    def write(self, key: str, data: Any) -> None:
        """Writes ``data`` for all ranks to read."""
        with _connected(key):
            self.job.store.set(self.prefix + key, json.dumps(data))

    def write_first(self, key: str, data: Any) -> Any:
        """Writes ``data`` unless another rank has written there already. Returns the data that are there now."""
        with _connected(key):
            return json.loads(self.job.store.compare_set(self.prefix + key, "", json.dumps(data)))

    def count(self, key: str) -> int:
        """Returns the number of calls for this key on all ranks, the present one included."""
        with _connected(key):
            return int(self.job.store.add(self.prefix + key, 1))

    def has(self, *keys: str) -> bool:
        """Returns True if all ``keys`` have been written."""
        with _connected(keys[0]):
            return bool(self.job.store.check([self.prefix + key for key in keys]))

    def read(self, key: str) -> Any:
        """Returns the data at ``key``, or None if nobody has written there."""
        if not self.has(key):
            return None
        with _connected(key):
            return json.loads(self.job.store.get(self.prefix + key))

    def wait(self, key: str, writer: int) -> Any:
        """Returns the data at ``key`` once rank ``writer``, which sends heartbeats, has written them.

        Raises ``AgreementError`` if that rank falls silent.
        """
        pulse = Pulse(self, writer)
        for _ in pauses():
            found = self.read(key)
            if found is not None:
                return found
            pulse.check()
        raise AssertionError("pauses never end")

    def wait_for_late(self, key: str, seconds: float, writer: int | None = None) -> Any:
        """Returns the data at ``key`` once they are written, by rank ``writer`` if it is known.

        Raises ``AgreementError`` after ``seconds``.
        """
        deadline = time.monotonic() + seconds
        for _ in pauses():
            found = self.read(key)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                who = "another rank" if writer is None else f"rank {writer}"
                raise AgreementError(f"{who} has not come within {seconds:g} s; all ranks have to make this call", writer)
        raise AssertionError("pauses never end")

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes ``keys`` where the store can."""
        with contextlib.suppress(RuntimeError, NotImplementedError):
            for key in keys:
                self.job.store.delete_key(self.prefix + key)

    def beats(self, rank: int) -> int:
        """Returns the number of heartbeats that a rank has sent."""
        with _connected("beat"):
            return int(self.job.store.add(f"{self.prefix}beat/{rank}", 0))

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Sends heartbeats while the body runs. They end with the process, and other ranks notice that."""
        store, end, key = self.job.another_connection(), threading.Event(), f"{self.prefix}beat/{self.rank}"

        def beat() -> None:
            with contextlib.suppress(RuntimeError):  # the store has gone, and with it the ranks that would look
                while not end.wait(BEAT):
                    store.add(key, 1)

        thread = threading.Thread(target=beat, name="autoremat-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()


@dataclass
class Pulse:
    """The heartbeat of another rank, as seen from this one."""

    channel: Channel
    rank: int
    clock: Callable[[], float] = time.monotonic
    beats: int = -1
    """Heartbeats at the last look."""
    seen: float = 0.0
    """Time at which their number had grown."""
    looked: float = float("-inf")
    """Time of the last look."""

    def check(self) -> None:
        """Raises ``AgreementError`` if the rank has been silent for too long. Looks at most once per heartbeat."""
        now = self.clock()
        if now - self.looked < BEAT:
            return
        self.looked = now
        beats = self.channel.beats(self.rank)
        if beats != self.beats:
            self.beats, self.seen = beats, now
        elif now - self.seen > SILENCE:
            raise AgreementError(
                f"rank {self.rank} has not answered for {SILENCE:g} s while this graph was compiled: its process has ended or "
                "hangs. See that rank's own output for the reason",
                self.rank,
            )


@contextlib.contextmanager
def _connected(key: str) -> Iterator[None]:
    """Turns errors of the store into ``AgreementError``."""
    try:
        yield
    except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
        raise AgreementError(
            f"the job's store does not answer ({key}): {error}. The process that keeps it, usually rank 0 or the launcher, "
            "has ended"
        ) from error
