"""Finds the ranks that compile a graph together: its *members*.

A rank arrives under the name of the place in the user's code, and of its occurrence there. It waits for the others, except

- ranks of other pipeline stages, which the ranks of a stage name when they arrive;
- ranks that wait at another place, and therefore for this one;
- ranks that have compiled this place already and do not come within ``RECOMPILATION`` seconds: shapes may change on one rank;
- ranks that do not come within ``PATIENCE`` seconds.

The lowest rank that has arrived writes the list of members. A rank that comes later is not on it; it meets those that are left.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from autoremat.agreement.channel import Channel, Pulse, pauses

log = logging.getLogger("autoremat")

PATIENCE = 300.0
"""Seconds to wait for a rank that has never compiled this place."""

RECOMPILATION = 60.0
"""Seconds to wait for a rank that has compiled this place before."""

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

    def meet(self, place: str, ranks: Iterable[int], elsewhere: Collection[int] = ()) -> Meeting:
        """Returns the meeting of this process with those of ``ranks`` that compile the graph at ``place``.

        ``elsewhere`` are ranks that are known to compile other graphs. Raises ``AgreementError`` if a rank is lost meanwhile.
        """
        digest = hashlib.sha256(place.encode()).hexdigest()[:16]
        occurrence, expected = self.arrivals[digest], set(ranks)
        self.arrivals[digest] += 1
        for generation in range(len(expected)):
            name = f"meet/{digest}/{occurrence}/{generation}"
            here = _Place(self, place, digest, name, occurrence)
            here.arrive(elsewhere)
            meeting = here.wait(expected)
            if self.channel.rank in meeting.members:
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

    @property
    def channel(self) -> Channel:
        return self.rendezvous.channel

    def arrive(self, elsewhere: Collection[int]) -> None:
        """Announces this process."""
        self.channel.write(f"{self.name}/{self.channel.rank}", sorted(elsewhere))
        self.channel.write(f"at/{self.channel.rank}", self.name)

    def wait(self, expected: Collection[int]) -> Meeting:
        """Returns the meeting, once its members are known."""
        begin, noticed, pulse = time.monotonic(), False, Pulse(self.channel, self.channel.rank)
        for _ in pauses():
            members = self.channel.read(f"{self.name}/members")
            if members is not None:
                return Meeting(self.name, tuple(members["members"]), tuple(members["missing"]))
            waited = time.monotonic() - begin
            arrived = self.arrived(expected)
            absent = set(expected) - arrived.keys() - {rank for others in arrived.values() for rank in others}
            awaited = {rank for rank in absent if self.may_come(rank, waited)}
            if not awaited and self.channel.rank == min(arrived):
                lost = sorted(rank for rank in absent if not self.waits_elsewhere(rank))
                self.channel.write_first(f"{self.name}/members", {"members": sorted(arrived), "missing": lost})
                if lost and self.occurrence:
                    self.rendezvous.deserted.add(self.digest)
            if pulse.rank != min(arrived):
                pulse = Pulse(self.channel, min(arrived))
            pulse.check()
            if awaited and waited > NOTICE and not noticed:
                noticed = True
                log.warning("%s", _notice(self.channel.rank, awaited, self.description))
        raise AssertionError("pauses never end")

    def arrived(self, expected: Collection[int]) -> dict[int, list[int]]:
        """Returns the ranks that have arrived, each with the ranks that it knows to be elsewhere."""
        keys = {rank: f"{self.name}/{rank}" for rank in expected}
        all_here = self.channel.has(*keys.values())
        return {rank: self.channel.read(key) for rank, key in keys.items() if all_here or self.channel.has(key)}

    def may_come(self, rank: int, waited: float) -> bool:
        """Returns True if an absent rank may still come in time."""
        if self.occurrence and self.channel.has(f"meet/{self.digest}/0/0/{rank}"):
            patience = 0.0 if self.digest in self.rendezvous.deserted else RECOMPILATION
        else:
            patience = PATIENCE
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
