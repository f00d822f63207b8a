"""Messages between the ranks of a job, in the store that ``init_process_group`` made.

A store needs no process group of its own. Ranks that never compile therefore cannot be missed when a group is made, and no
message can meet a collective of the training step.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autoremat.agreement.line import Line
from autoremat.basics.errors import AgreementError
from autoremat.torch_private.processes import Job

SILENCE = 30.0
"""Seconds without a heartbeat, or without an answer of the store, after which a rank counts as lost."""

SHORTEST, LONGEST = 0.002, 0.1
"""Seconds between two looks at the store: at first, and at most."""


def pauses() -> Iterator[None]:
    """Sleeps before each next item, longer each time. A loop over it looks for something that another rank will write."""
    seconds = SHORTEST
    while True:
        yield
        time.sleep(seconds)
        seconds = min(seconds * 1.5, LONGEST)


@dataclass(eq=False)
class Channel:
    """Reads and writes JSON data under keys of the job's store. Raises ``AgreementError`` if the store does not answer."""

    job: Job
    paused: float = 0.0
    """Seconds of the longest pause of this whole process so far: a debugger, a signal, a machine that slept."""
    failures: dict[int, str] = field(default_factory=dict)
    """The last failure that each other rank has told of, since it last compiled together with this one."""
    _line: Line = field(default_factory=Line, init=False, repr=False)

    @property
    def prefix(self) -> str:
        """The beginning of all keys. A store can outlive the process group, so each group of this process has its own."""
        return f"autoremat/{self.job.number}/"

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self.job.rank

    @property
    def silence(self) -> float:
        """Seconds of silence after which a rank counts as lost."""
        return self.within(SILENCE)

    def within(self, seconds: float) -> float:
        """Returns ``seconds``, but at most half of the process group's timeout.

        Ranks that already wait in a collective then learn of a failure before the collective does.
        """
        return min(seconds, self.job.timeout / 2)

    def write(self, key: str, data: Any) -> None:
        """Writes ``data`` for all ranks to read."""
        self._ask(key, lambda: self.job.store.set(self.prefix + key, json.dumps(data)))

    def write_first(self, key: str, data: Any) -> Any:
        """Writes ``data`` unless another rank has written there already. Returns the data that are there now."""
        return json.loads(self._ask(key, lambda: self.job.store.compare_set(self.prefix + key, "", json.dumps(data))))

    def count(self, key: str, step: int = 1) -> int:
        """Returns the number at ``key``, after ``step`` has been added to it."""
        return int(self._ask(key, lambda: self.job.store.add(self.prefix + key, step)))

    def has(self, *keys: str) -> bool:
        """Returns True if all ``keys`` have been written."""
        return bool(self._ask(keys[0], lambda: self.job.store.check([self.prefix + key for key in keys])))

    def read(self, key: str) -> Any:
        """Returns the data at ``key``, or None if nobody has written there."""
        return json.loads(self._ask(key, lambda: self.job.store.get(self.prefix + key))) if self.has(key) else None

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes ``keys`` where the store can."""
        with contextlib.suppress(AgreementError, NotImplementedError):
            for key in keys:
                self._ask(key, lambda key=key: self.job.store.delete_key(self.prefix + key))  # type: ignore[misc]

    def linger(self, key: str, number: int, seconds: float, always: bool = False) -> None:
        """Waits up to ``seconds`` until ``key`` has been counted ``number`` times, if this process keeps the store.

        The others can then read the last message before the store ends with this process. ``always`` waits in any case.
        """
        deadline = time.monotonic() + seconds
        if always or self.job.keeper == self.rank:
            with contextlib.suppress(AgreementError):
                for _ in pauses():
                    if self.count(key, 0) >= number or time.monotonic() > deadline:
                        return

    def _ask(self, key: str, request: Callable[[], Any]) -> Any:
        """Returns the answer of the store, and turns its errors into ``AgreementError``."""
        try:
            return self._line.ask(request, self.silence)
        except (RuntimeError, TimeoutError) as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
            keeper = self.job.keeper
            who = "a process, usually the launcher," if keeper is None else f"rank {keeper}"
            reason = "; ".join(self.failures.values()) or f"{who} has ended, is stopped or cannot be reached"
            raise AgreementError(
                f"{reason}. The job's store, kept by {who.rstrip(',')}, does not answer ({key}: {str(error).strip()})",
                next(iter(self.failures), keeper),
            ) from error
