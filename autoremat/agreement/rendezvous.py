"""Finds the ranks that compile a graph together: its *members*.

A rank arrives under the name of the place in the user's code, and of its occurrence there. It waits for the others, except

- ranks that wait at another place, and therefore for this one;
- ranks that have compiled this place already and do not come within ``RECOMPILATION`` seconds: shapes may change on one rank;
- ranks that do not come within ``PATIENCE`` seconds, or ``BRIEFLY`` if they did not come to an earlier place either.

No wait is longer than half of the process group's timeout. It ends with an error if a rank is interrupted.

The first rank that arrives waits for the others and writes the list of members. The others only wait for that list, so a large
job asks its store little. A rank that comes later is not on the list. It meets those that are left.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoremat.agreement.channel import Channel, pauses
from autoremat.basics.errors import AgreementError, BudgetInfeasible, Occupant, find_cause

log = logging.getLogger("autoremat")

PATIENCE = 300.0
"""Seconds to wait for a rank that has never compiled this place."""

RECOMPILATION = 60.0
"""Seconds to wait for a rank that has compiled this place before."""

BRIEFLY = 5.0
"""Seconds to wait for a rank that did not come to an earlier place."""

NOTICE = 10.0
"""Seconds after which a log line names the ranks that are missing."""


@dataclass(frozen=True)
class Meeting:
    """The members that compile a graph together, in ascending order. ``name`` is unique in the job."""

    name: str
    members: tuple[int, ...]
    missing: tuple[int, ...] = ()
    """Ranks that were expected and did not come in time."""


@dataclass
class Rendezvous:
    """The meetings of this process."""

    channel: Channel
    arrivals: Counter[str] = field(default_factory=Counter)
    """Number of arrivals of this process at each place."""
    deserted: set[str] = field(default_factory=set)
    """Places at which recompilations of this process have waited in vain. They do not wait again."""
    abandoned: set[str] = field(default_factory=set)
    """Names of the meetings at which an error has ended the wait of this process. It does not come to them again."""
    lost: set[int] = field(default_factory=set)
    """Ranks that did not come in time, and have not come since."""

    def meet(self, place: str, ranks: Iterable[int]) -> Meeting:
        """Returns the meeting of this process with those of ``ranks`` that compile the graph at ``place``.

        Raises ``AgreementError`` if a rank is interrupted meanwhile.
        """
        digest = hashlib.sha256(place.encode()).hexdigest()[:16]
        occurrence, expected = self.arrivals[digest], set(ranks)
        self.arrivals[digest] += 1
        for generation in range(len(expected)):
            name = f"meet/{digest}/{occurrence}/{generation}"
            meeting = _Place(self, place, digest, name, occurrence, frozenset(expected)).meet()
            if self.channel.rank in meeting.members:
                self.lost = (self.lost | set(meeting.missing)) - set(meeting.members)
                return meeting
            expected -= set(meeting.members)
        raise AssertionError("the last generation has a single rank")


@dataclass
class _Place:
    """The wait of this process at one place."""

    rendezvous: Rendezvous
    description: str
    digest: str
    name: str
    occurrence: int
    expected: frozenset[int]
    arrived: dict[int, int] = field(default_factory=dict)
    """The ranks that have arrived, by the numbers of their arrivals. An interrupted rank may leave a number out."""

    @property
    def channel(self) -> Channel:
        return self.rendezvous.channel

    def meet(self) -> Meeting:
        """Returns the meeting, once its members are known."""
        try:
            self.channel.write(f"{self.name}/came/{self.channel.rank}", True)
            self.channel.write(f"at/{self.channel.rank}", self.name)
            first = int(self.channel.write_first(f"{self.name}/first", self.channel.rank))
            self.arrive()
            if first == self.channel.rank:
                self.channel.write(f"{self.name}/members", self.gathered())
            found = self.channel.wait_for(f"{self.name}/members", first)
        except BaseException as error:
            with contextlib.suppress(AgreementError):
                self.abandon({"error": described(error), "rank": self.channel.rank})
            raise
        if "error" in found:
            raise restored(found["error"], first)
        return Meeting(self.name, tuple(found["members"]), tuple(found["missing"]))

    def arrive(self) -> None:
        """Tells the first rank that this one has come."""
        number = self.channel.count(f"{self.name}/count")
        self.channel.write(f"{self.name}/arrival/{number}", self.channel.rank)

    def abandon(self, told: Mapping[str, Any]) -> None:
        """Tells the other ranks that this one does not wait any longer because of an error."""
        self.rendezvous.abandoned.add(self.name)
        self.channel.write(f"at/{self.channel.rank}", None)
        # The members read these in the first round of their session, if this rank is one of them.
        self.channel.write(f"{self.name}/1/{self.channel.rank}", told)
        self.channel.write(f"{self.name}/1/result/{self.channel.rank}", told)
        if self.channel.has(f"{self.name}/members"):
            return
        if self.channel.read(f"{self.name}/first") == self.channel.rank:
            self.channel.write(f"{self.name}/members", told)
        else:
            self.arrive()  # as a member whose error ends the first round

    def gathered(self) -> dict[str, Any]:
        """Returns the members, and the ranks that were expected and did not come in time."""
        begin, noticed = time.monotonic(), False
        for _ in pauses():
            for number in range(1, 1 + self.channel.count(f"{self.name}/count", 0)):
                if number not in self.arrived and (rank := self.channel.read(f"{self.name}/arrival/{number}")) is not None:
                    self.arrived[number] = int(rank)
            waited = time.monotonic() - begin
            absent = self.expected - set(self.arrived.values())
            awaited = {rank for rank in absent if self.may_come(rank, waited)}
            if not awaited:
                break
            if waited > NOTICE and not noticed:
                noticed = True
                log.warning("%s", _notice(self.channel.rank, awaited, self.description))
        missing = sorted(rank for rank in absent if not self.waits_elsewhere(rank))
        if missing and self.occurrence:
            self.rendezvous.deserted.add(self.digest)
        return {"members": sorted({*self.arrived.values()}), "missing": missing}

    def may_come(self, rank: int, waited: float) -> bool:
        """Returns True if an absent rank may still come in time."""
        return waited < self.channel.within(self.patience(rank)) and not self.waits_elsewhere(rank)

    def patience(self, rank: int) -> float:
        """Returns the seconds to wait for an absent rank."""
        if not self.occurrence or not self.channel.has(f"meet/{self.digest}/0/0/came/{rank}"):
            return BRIEFLY if rank in self.rendezvous.lost else PATIENCE
        return 0.0 if self.digest in self.rendezvous.deserted else RECOMPILATION

    def waits_elsewhere(self, rank: int) -> bool:
        """Returns True if the rank waits at another place, so that it cannot come before this one is settled."""
        name = self.channel.read(f"at/{rank}")
        if name is None or name == self.name or name in self.rendezvous.abandoned:  # an error ends that wait, too
            return False
        return not self.channel.has(f"{name}/members")


def _notice(rank: int, absent: Collection[int], place: str) -> str:
    ranks = ", ".join(map(str, sorted(absent)))
    return (
        f"rank {rank} waits for rank{'s' if len(absent) > 1 else ''} {ranks} to compile {place}, so that all plan it alike. If "
        'other ranks do not compile it, pass the option agreement="off", or the list of the ranks that do'
    )


def described(error: BaseException) -> dict[str, Any]:
    """Returns an error as JSON data, in which it travels between ranks. Errors are never pickled."""
    infeasible = find_cause(error, BudgetInfeasible)
    if infeasible is not None:
        return {"infeasible": infeasible.figures()}
    lost = find_cause(error, AgreementError)
    if lost is not None:
        return {"lost": lost.rank, "text": str(lost)}
    return {"text": f"{type(error).__name__}: {error}".removesuffix(": ")}


def restored(told: Mapping[str, Any], rank: int) -> AgreementError | BudgetInfeasible:
    """Returns the error that rank ``rank`` has described, as another rank raises it."""
    if "infeasible" in told:
        figures = dict(told["infeasible"])
        figures["occupants"] = [Occupant(**one) for one in figures["occupants"]]
        return BudgetInfeasible(**{"rank": rank} | {name: value for name, value in figures.items() if value is not None})
    if "lost" in told:
        return AgreementError(told["text"], told["lost"])
    return AgreementError(f"compiling a graph failed on rank {rank}, so all ranks that share it stop: {told['text']}", rank)
