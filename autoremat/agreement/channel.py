"""Messages between the ranks of a job, in the store that ``init_process_group`` made.

A store needs no process group of its own. Ranks that never compile therefore cannot be missed when a group is made, and no
message can meet a collective of the training step. A launcher such as torchrun ends all ranks if one ends.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autoremat.basics.errors import AgreementError
from autoremat.torch_private.processes import Job

PATIENCE = 900.0
"""Seconds to wait for a rank that compiles the same graph. Its planning or its measurements may take minutes."""

SHORTEST, LONGEST = 0.002, 0.1
"""Seconds between two looks at the store: at first, and at most."""


def pauses() -> Iterator[None]:
    """Sleeps before each next item, longer each time. A loop over it looks for something that another rank will write."""
    seconds = SHORTEST
    while True:
        yield
        time.sleep(seconds)
        seconds = min(seconds * 1.5, LONGEST)


@dataclass(frozen=True, eq=False)
class Channel:
    """Reads and writes JSON data under keys of the job's store. Raises ``AgreementError`` if the store does not answer."""

    job: Job

    @property
    def prefix(self) -> str:
        """The beginning of all keys. A store can outlive the process group, so each group of this process has its own."""
        return f"autoremat/{self.job.number}/"

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return self.job.rank

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

    def has(self, key: str) -> bool:
        """Returns True if ``key`` has been written."""
        return bool(self._ask(key, lambda: self.job.store.check([self.prefix + key])))

    def read(self, key: str) -> Any:
        """Returns the data at ``key``, or None if nobody has written there."""
        return json.loads(self._ask(key, lambda: self.job.store.get(self.prefix + key))) if self.has(key) else None

    def wait_for(self, key: str, writer: int, seconds: float = PATIENCE, share: float = 1.0) -> Any:
        """Returns the data at ``key`` once rank ``writer`` has written them.

        Raises ``AgreementError`` after ``share`` of ``seconds``.
        """
        limit, begin = share * self.within(seconds), time.monotonic()
        for _ in pauses():
            found = self.read(key)
            if found is not None:
                return found
            if time.monotonic() - begin > limit:
                raise AgreementError(
                    f"rank {writer} has not answered for {limit:g} s: it has ended, hangs, or does not make this call. See "
                    "that rank's own output for the reason",
                    writer,
                )
        raise AssertionError("pauses never end")

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes ``keys`` where the store can."""
        with contextlib.suppress(AgreementError, NotImplementedError):
            for key in keys:
                self._ask(key, lambda key=key: self.job.store.delete_key(self.prefix + key))  # type: ignore[misc]

    def _ask(self, key: str, request: Callable[[], Any]) -> Any:
        """Returns the answer of the store, and turns its errors into ``AgreementError``."""
        try:
            return request()
        except RuntimeError as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
            keeper = self.job.keeper
            who = "a process, usually the launcher" if keeper is None else f"rank {keeper}"
            raise AgreementError(
                f"the job's store, kept by {who}, does not answer ({key}: {str(error).strip()}). {who[0].upper()}{who[1:]} has "
                "ended or cannot be reached: see its own output for the reason",
                keeper,
            ) from error
