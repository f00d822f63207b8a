"""What the ranks that compile a graph together tell each other, as JSON data in the store that ``init_process_group`` made.

A store needs no process group of its own. Ranks that never compile therefore cannot be missed when a group is made, and no
message can meet a collective of the training step.
"""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat.basics.errors import AgreementError, BudgetInfeasible, Occupant, OptionWarning, find_cause
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.torch_private.process_groups import Job, job

log = logging.getLogger("autoremat")

TIMEOUT = 300.0
"""Seconds to wait for other ranks, at most half of the process group's timeout: collectives wait meanwhile."""

NOTICE = 10.0
"""Seconds of a wait after which a log line names the rank that is missing."""


@dataclass(eq=False)
class Session:
    """The exchanges of the ranks ``members``, which all of them make in the same sequence. Their keys begin with ``name``."""

    job: Job
    name: str = ""
    members: tuple[int, ...] = ()
    number: int = 0
    failed: bool = False
    """True once an error has ended it."""

    def exchange(self, topic: str, terms: Any) -> dict[int, Any]:
        """Returns the terms of all members by ascending rank, once each has given its own.

        Raises the error of a member that fails, and ``AgreementError`` for members that do not come in time.
        """
        if self.failed:
            raise AgreementError("an error has ended this compilation on all ranks that share it", self.job.rank)
        self.number += 1
        key = f"{topic} {self.number}"
        try:
            with _answering():
                self._write(f"{key}/{self.job.rank}", terms)
                if missing := self._missing(key, self.members):
                    raise AgreementError(
                        f"{_listed(missing)} has not answered for {self._patience():g} s ({topic}): it has ended, hangs or "
                        "does not make this call. See that rank's own output for the reason",
                        missing[0],
                    )
                return {rank: self._read(f"{key}/{rank}") for rank in self.members}
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Ends the session on all members with ``error``, unless an error has ended it already."""
        if not self.failed:
            self.failed = True
            with contextlib.suppress(AgreementError), _answering():  # the store may have gone
                self._write(f"error/{self.job.rank}", _described(error, self.job.rank))

    def meet(self, place: str, ranks: tuple[int, ...]) -> None:
        """Finds the members: those of ``ranks`` that come to ``place``, as often as this one, within the time-out.

        Who has seen all or waited long enough first writes the list. Ranks that come later meet those that are left. None of
        them waits for the others here again.
        """
        known = self.job.groups.get((place, ranks), ranks)
        while self.job.rank not in self.members:
            expected = tuple(one for one in known if one not in self.members)
            group = hashlib.sha256(f"{place} {expected}".encode()).hexdigest()[:16]
            self.name = f"{group}/{self.job.arrivals[group]}"
            self.job.arrivals[group] += 1
            with _answering():
                self._write(f"came/{self.job.rank}", True)
                missing = self._missing("came", expected, until="members")
                present = json.dumps([one for one in expected if one not in missing])
                self.members = tuple(json.loads(self.job.store.compare_set(f"{self.name}/members", "", present)))
            known = expected
        self.job.groups[place, ranks] = self.members

    def _missing(self, key: str, ranks: Iterable[int], until: str = "") -> list[int]:
        """Returns the ranks that have not written under ``key`` in time. The wait ends early once ``until`` is written."""
        begin, pause, noticed = time.monotonic(), 0.002, False
        missing: list[int] = []
        for rank in ranks:
            while not self._has(f"{key}/{rank}"):
                if self._has(f"error/{rank}"):
                    told = self._read(f"error/{rank}")
                    if "text" in told:
                        raise AgreementError(told["text"], told["rank"])
                    raise BudgetInfeasible(
                        **{"rank": rank, **told, "occupants": [Occupant(**one) for one in told["occupants"]]}
                    )
                if until and self._has(until):
                    return []
                waited = time.monotonic() - begin
                if waited > self._patience():
                    missing.append(rank)
                    break
                now(f"waiting for rank {rank}")
                if waited > NOTICE and not noticed:
                    noticed = True
                    log.warning("rank %d waits for rank %d, up to %g s", self.job.rank, rank, self._patience())
                time.sleep(pause)
                pause = min(1.5 * pause, 0.1)
        return missing

    def _patience(self) -> float:
        return min(TIMEOUT, self.job.timeout / 2)

    def _has(self, key: str) -> bool:
        return bool(self.job.store.check([f"{self.name}/{key}"]))

    def _read(self, key: str) -> Any:
        return json.loads(self.job.store.get(f"{self.name}/{key}"))

    def _write(self, key: str, data: Any) -> None:
        self.job.store.set(f"{self.name}/{key}", json.dumps(data))


@contextlib.contextmanager
def session_at(place: str, agreement: str | tuple[int, ...]) -> Iterator[Session | None]:
    """Yields the session of all ranks that come to ``place``; None if this process is the only one.

    ``agreement`` is the option. An error of the body, an interrupt included, ends the session on all members. Warns with
    ``OptionWarning`` of ranks that do not come.
    """
    present = job()
    if present is None or agreement == "off":
        yield None
        return
    ranks = tuple(range(present.world_size)) if isinstance(agreement, str) else agreement
    if present.rank not in ranks:
        yield None
        return
    session = Session(present)
    try:
        expected = present.groups.get((place, ranks), ranks)
        session.meet(place, ranks)
        if absent := [rank for rank in expected if rank not in session.members]:
            warn_user(
                f"{_listed(absent)} did not come to compile {place}, so the others planned it without them. Their plans may "
                'differ, and nothing that communicates is repeated. Pass agreement="off", or the list of the ranks that '
                "compile it",
                OptionWarning,
            )
        yield session if len(session.members) > 1 else None
    except BaseException as error:
        session.fail(error)
        raise


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Turns errors of the store into ``AgreementError``."""
    try:
        yield
    except AgreementError:
        raise
    except RuntimeError as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
        raise AgreementError(
            f"the job's store does not answer ({str(error).strip()}). The process that keeps it, usually rank 0 or the "
            "launcher, has ended or cannot be reached: see its own output for the reason"
        ) from error


def _described(error: BaseException, rank: int) -> dict[str, Any]:
    """Returns an error of ``rank`` as JSON data, in which it travels between ranks. Errors are never pickled."""
    infeasible = find_cause(error, BudgetInfeasible)
    if infeasible is not None:
        return {name: value for name, value in infeasible.figures().items() if value is not None}
    lost = find_cause(error, AgreementError)
    if lost is not None:
        return {"text": str(lost), "rank": lost.rank}
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return {"text": f"compiling a graph failed on rank {rank}, so all ranks that share it stop: {text}", "rank": rank}


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
