"""Finds the ranks that compile a graph together: its *members*.

A rank arrives under the name of the place in the user's code, and of its occurrence there. It waits for the others, except

- ranks of other pipeline stages, which the ranks of a stage name when they arrive;
- ranks that wait at another place, and therefore for this one;
- ranks that have compiled this place already and do not come within ``RECOMPILATION`` seconds: shapes may change on one rank.
  ``ALONE`` seconds are enough for a graph without communication, which each rank may plan as it likes;
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
"""Seconds to wait for a rank that has compiled this place before, if the graph communicates."""

ALONE = 5.0
"""Seconds to wait for such a rank if the graph does not communicate. Ranks that all recompile come within them."""

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
    is_needed: bool = True
    """False if a member may as well plan by itself: it compiles again what was agreed before, and nothing communicates."""


@dataclass
class Rendezvous:
    """The meetings of this process."""

    channel: Channel
    arrivals: Counter[str] = field(default_factory=Counter)
    """Number of arrivals of this process at each place, without those at which it need not meet anybody."""
    deserted: set[str] = field(default_factory=set)
    """Places at which recompilations of this process have waited in vain. They do not wait again."""
    apart: set[int] = field(default_factory=set)
    """Ranks that did not come to recompile a graph without communication, and have not come since. None waits for them."""
    abandoned: set[str] = field(default_factory=set)
    """Names of the meetings at which an error has ended the wait of this process. It does not come to them again."""
    lost: set[int] = field(default_factory=set)
    """Ranks that did not come in time, and have not come since."""

    def meet(self, place: str, ranks: Iterable[int], elsewhere: Collection[int] = (), communicates: bool = True) -> Meeting:
        """Returns the meeting of this process with those of ``ranks`` that compile the graph at ``place``.

        ``elsewhere`` are ranks that are known to compile other graphs. ``communicates`` says whether plans of the graph have to
        be alike. Raises ``AgreementError`` if a rank is interrupted meanwhile.
        """
        digest = hashlib.sha256(place.encode()).hexdigest()[:16]
        if self.arrivals[digest] and not communicates:
            return self.meet_again(place, digest, frozenset(ranks), elsewhere)
        occurrence, expected = self.arrivals[digest], set(ranks)
        self.arrivals[digest] += 1
        for generation in range(len(expected)):
            name = f"meet/{digest}/{occurrence}/{generation}"
            meeting = _Place(self, place, digest, name, occurrence, frozenset(expected)).meet(elsewhere)
            if self.channel.rank in meeting.members:
                self.lost = (self.lost | set(meeting.missing)) - set(meeting.members)
                self.apart.difference_update(meeting.members)
                return meeting
            expected -= set(meeting.members)
        raise AssertionError("the last generation has a single rank")

    def meet_again(self, place: str, digest: str, ranks: frozenset[int], elsewhere: Collection[int]) -> Meeting:
        """Returns the meeting with those that recompile the graph at ``place`` now, which does not communicate.

        Ranks may do so differently often. Each comes to the first meeting whose members are not settled.
        """
        key = f"again/{digest}"
        number = self.channel.count(key, 0)
        while True:
            name = f"{key}/{number}"
            if name in self.abandoned:
                number += 1
                continue
            meeting = _Place(self, place, digest, name, 1, ranks, communicates=False, recompilations=key).meet(elsewhere)
            if self.channel.rank in meeting.members:
                self.apart = (self.apart | set(meeting.missing)) - set(meeting.members)
                return meeting
            number += 1


@dataclass
class _Place:
    """The wait of this process at one place."""

    rendezvous: Rendezvous
    description: str
    digest: str
    name: str
    occurrence: int
    expected: frozenset[int]
    communicates: bool = True
    recompilations: str | None = None
    """The key that counts the settled recompilations of this place; None if this is not one."""
    arrived: dict[int, list[int]] = field(default_factory=dict)
    """The ranks that have arrived, each with the ranks that it knows to be elsewhere. Only the first rank reads them."""
    numbers_read: set[int] = field(default_factory=set)
    """The numbers of the arrivals that have been read. A rank that is interrupted may leave a number out."""

    @property
    def channel(self) -> Channel:
        return self.rendezvous.channel

    def meet(self, elsewhere: Collection[int]) -> Meeting:
        """Returns the meeting, once its members are known."""
        try:
            self.channel.write(f"{self.name}/came/{self.channel.rank}", True)
            self.channel.write(f"at/{self.channel.rank}", self.name)
            first = int(self.channel.write_first(f"{self.name}/first", self.channel.rank))
            self.arrive(elsewhere)
            if first == self.channel.rank:
                self.settle(self.gathered())
            found = self.channel.wait_for(f"{self.name}/members", first)
        except BaseException as error:
            with contextlib.suppress(AgreementError):
                self.abandon({"error": described(error), "rank": self.channel.rank})
            raise
        if "error" in found:
            raise restored(found["error"], first)
        return Meeting(self.name, tuple(found["members"]), tuple(found["missing"]), found["is_needed"])

    def arrive(self, elsewhere: Collection[int] = ()) -> None:
        """Tells the first rank that this one has come, and which ranks it knows to be elsewhere."""
        number = self.channel.count(f"{self.name}/count")
        self.channel.write(f"{self.name}/arrival/{number}", {"rank": self.channel.rank, "elsewhere": sorted(elsewhere)})

    def settle(self, outcome: Mapping[str, Any]) -> None:
        """Ends the wait of all ranks with the members or with an error. Later recompilations meet under another name."""
        if self.recompilations is not None:
            self.channel.count(self.recompilations)
        self.channel.write(f"{self.name}/members", outcome)

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
            self.settle(told)
        else:
            self.arrive()  # as a member whose error ends the first round

    def gathered(self) -> dict[str, Any]:
        """Returns the members, and the ranks that were expected and did not come in time."""
        begin, noticed = time.monotonic(), False
        for _ in pauses():
            numbers = set(range(1, 1 + self.channel.count(f"{self.name}/count", 0)))
            for number in sorted(numbers - self.numbers_read):
                if (found := self.channel.read(f"{self.name}/arrival/{number}")) is not None:
                    self.numbers_read.add(number)
                    self.arrived[int(found["rank"])] = found["elsewhere"]
            waited = time.monotonic() - begin
            absent = self.expected - self.arrived.keys() - {rank for others in self.arrived.values() for rank in others}
            awaited = {rank for rank in absent if self.may_come(rank, waited)}
            if not awaited:
                break
            if waited > NOTICE and not noticed:
                noticed = True
                log.warning("%s", _notice(self.channel.rank, awaited, self.description))
        missing = sorted(rank for rank in absent if not self.waits_elsewhere(rank))
        if missing and self.occurrence and self.communicates:
            self.rendezvous.deserted.add(self.digest)
        return {"members": sorted(self.arrived), "missing": missing, "is_needed": self.communicates}

    def may_come(self, rank: int, waited: float) -> bool:
        """Returns True if an absent rank may still come in time."""
        return waited < self.channel.within(self.patience(rank)) and not self.waits_elsewhere(rank)

    def patience(self, rank: int) -> float:
        """Returns the seconds to wait for an absent rank."""
        if not self.occurrence or not self.channel.has(f"meet/{self.digest}/0/0/came/{rank}"):
            return BRIEFLY if rank in self.rendezvous.lost else PATIENCE
        if not self.communicates:
            return 0.0 if rank in self.rendezvous.apart else ALONE
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
