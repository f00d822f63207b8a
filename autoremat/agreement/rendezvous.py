"""Finds the ranks that compile a graph together: its *members*.

A rank arrives under the name of the place in the user's code, and of its occurrence there. It waits for the others, except

- ranks of other pipeline stages, which the ranks of a stage name when they arrive;
- ranks that wait at another place, and therefore for this one;
- ranks that have compiled this place already and do not come within ``RECOMPILATION`` seconds: shapes may change on one rank;
- ranks that do not come within ``PATIENCE`` seconds, or ``BRIEFLY`` if they did not come to an earlier place either.

The first rank that arrives waits for the others and writes the list of members. The others only wait for that list, so a large
job asks its store little. A rank that comes later is not on the list. It meets those that are left.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from autoremat.agreement.channel import SILENCE, Channel, pauses

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
    lost: set[int] = field(default_factory=set)
    """Ranks that did not come in time, and have not come since."""

    def meet(self, place: str, ranks: Iterable[int], elsewhere: Collection[int] = ()) -> Meeting:
        """Returns the meeting of this process with those of ``ranks`` that compile the graph at ``place``.

        ``elsewhere`` are ranks that are known to compile other graphs. Raises ``AgreementError`` if a rank is lost meanwhile.
        """
        digest = hashlib.sha256(place.encode()).hexdigest()[:16]
        occurrence, expected = self.arrivals[digest], set(ranks)
        self.arrivals[digest] += 1
        for generation in range(len(expected)):
            name = f"meet/{digest}/{occurrence}/{generation}"
            meeting = _Place(self, place, digest, name, occurrence, frozenset(expected)).meet(elsewhere)
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
    arrived: dict[int, list[int]] = field(default_factory=dict)
    """The ranks that have arrived, each with the ranks that it knows to be elsewhere. Only the first rank reads them."""

    @property
    def channel(self) -> Channel:
        return self.rendezvous.channel

    def meet(self, elsewhere: Collection[int]) -> Meeting:
        """Returns the meeting, once its members are known."""
        self.channel.write(f"{self.name}/came/{self.channel.rank}", True)
        self.channel.write(f"at/{self.channel.rank}", self.name)
        number = self.channel.count(f"{self.name}/count")
        self.channel.write(f"{self.name}/arrival/{number}", {"rank": self.channel.rank, "elsewhere": sorted(elsewhere)})
        if number == 1:
            self.channel.write_first(f"{self.name}/members", self.gathered())
            first = self.channel.rank
        else:
            first = int(self.channel.wait_for_late(f"{self.name}/arrival/1", SILENCE)["rank"])
        found = self.channel.wait(f"{self.name}/members", first)
        return Meeting(self.name, tuple(found["members"]), tuple(found["missing"]))

    def gathered(self) -> dict[str, list[int]]:
        """Returns the members, and the ranks that were expected and did not come in time."""
        begin, noticed = time.monotonic(), False
        for _ in pauses():
            self.note_arrivals()
            waited = time.monotonic() - begin
            absent = self.expected - self.arrived.keys() - {rank for others in self.arrived.values() for rank in others}
            awaited = {rank for rank in absent if self.may_come(rank, waited)}
            if not awaited:
                break
            if waited > NOTICE and not noticed:
                noticed = True
                log.warning("%s", _notice(self.channel.rank, awaited, self.description))
        missing = sorted(rank for rank in absent if not self.waits_elsewhere(rank))
        if missing and self.occurrence:
            self.rendezvous.deserted.add(self.digest)
        return {"members": sorted(self.arrived), "missing": missing}

    def note_arrivals(self) -> None:
        """Adds the ranks that have arrived since the last look."""
        while (found := self.channel.read(f"{self.name}/arrival/{len(self.arrived) + 1}")) is not None:
            self.arrived[int(found["rank"])] = found["elsewhere"]

    def may_come(self, rank: int, waited: float) -> bool:
        """Returns True if an absent rank may still come in time."""
        if self.occurrence and self.channel.has(f"meet/{self.digest}/0/0/came/{rank}"):
            patience = 0.0 if self.digest in self.rendezvous.deserted else RECOMPILATION
        else:
            patience = BRIEFLY if rank in self.rendezvous.lost else PATIENCE
        return waited < patience and not self.waits_elsewhere(rank)

    def waits_elsewhere(self, rank: int) -> bool:
        """Returns True if the rank waits at another place, so that it cannot come before this one is settled."""
        name = self.channel.read(f"at/{rank}")
        return name is not None and name != self.name and not self.channel.has(f"{name}/members")


def _notice(rank: int, absent: Collection[int], place: str) -> str:
    ranks = ", ".join(map(str, sorted(absent)))
    return (
        f"rank {rank} waits for rank{'s' if len(absent) > 1 else ''} {ranks} to compile {place}, so that all plan it alike. If "
        'other ranks do not compile it, pass the option agreement="off", or the list of the ranks that do'
    )
