"""A session: the messages of the members of a meeting while they compile.

Members proceed in *rounds*, which all of them run in the same sequence. In a round each member sends its part to the *leader*,
the lowest rank. The leader makes one result of all parts, and every member receives it. An error on one member is the result
of the round for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoremat.agreement.channel import Channel
from autoremat.agreement.rendezvous import Meeting, described, restored
from autoremat.basics.errors import AgreementError

Parts = Mapping[int, Any]
"""The parts of all members by rank, as JSON data."""


def grouped(parts: Parts, name: str) -> dict[Any, dict[int, Any]]:
    """Returns the parts with equal values under ``name``, by that value."""
    found: dict[Any, dict[int, Any]] = {}
    for rank, part in parts.items():
        found.setdefault(part[name], {})[rank] = part
    return found


@dataclass
class Session:
    """The rounds of one compilation. Its data are JSON data."""

    channel: Channel
    meeting: Meeting
    number: int = field(default=0, init=False)
    """Number of rounds so far."""
    failed: bool = field(default=False, init=False)
    """True if an error has ended the session."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this session, in ascending order."""
        return self.meeting.members

    @property
    def leader(self) -> int:
        """The rank that makes the results."""
        return self.members[0]

    @property
    def leads(self) -> bool:
        """True if this process is the leader."""
        return self.channel.rank == self.leader

    def round(self, topic: str, part: Any, decide: Callable[[Parts], Any]) -> Any:
        """Returns the result of a round, in which this member sends ``part``.

        ``decide`` makes the result of all parts. It runs on the leader alone, and its error ends the session on all members.
        Raises ``AgreementError``, or ``BudgetInfeasible``, if a member fails or is lost.
        """
        if self.failed:
            raise AgreementError("an error has ended this compilation on all ranks that share it", self.channel.rank)
        self.number += 1
        try:
            return self._lead(topic, part, decide) if self.leads else self._follow(topic, part)
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Ends the session on all members with ``error``, unless an error has ended it already."""
        if not self.failed:
            try:
                self._end(described(error), self.channel.rank)
            except AgreementError:  # the store has gone
                self.failed = True

    def _part(self, rank: int, number: int) -> str:
        return f"{self.meeting.name}/{number}/{rank}"

    def _result(self, number: int) -> str:
        return f"{self.meeting.name}/{number}/result/{self.leader}"

    def _follow(self, topic: str, part: Any) -> Any:
        """Sends ``part`` and returns the leader's result."""
        self.channel.write(self._part(self.channel.rank, self.number), {"topic": topic, "part": part})
        result = self.channel.wait_for(self._result(self.number), self.leader)
        if "error" in result:
            self.failed = True
            raise restored(result["error"], result["rank"])
        return result["value"]

    def _lead(self, topic: str, part: Any, decide: Callable[[Parts], Any]) -> Any:
        """Returns the result of all parts, after it has been sent to all members."""
        parts = {self.leader: part}
        for rank in self.members[1:]:
            # Half as long as the others wait, so that they hear from this rank which one is missing.
            sent = self.channel.wait_for(self._part(rank, self.number), rank, share=0.5)
            if "error" in sent:
                self._end(sent["error"], rank)
                raise restored(sent["error"], rank)
            if sent["topic"] != topic:
                raise AgreementError(
                    f"rank {rank} is at {sent['topic']!r} of a compilation while rank {self.leader} is at {topic!r}: their "
                    'caches or settings of torch differ. Make these equal, or pass the option agreement="off"'
                )
            parts[rank] = sent["part"]
        value = decide(parts)
        self.channel.write(self._result(self.number), {"value": value})
        # Nobody reads these parts again, nor the result before, which all members have read.
        read = [self._part(rank, self.number) for rank in self.members[1:]]
        self.channel.delete([*read, self._result(self.number - 1)])
        return value

    def _end(self, error: Mapping[str, Any], rank: int) -> None:
        """Tells the members that the session ends with an error of ``rank``. They are in this round, or in the next one."""
        for number in (self.number, self.number + 1):
            if self.leads:
                self.channel.write(self._result(number), {"error": error, "rank": rank})
            else:
                self.channel.write(self._part(self.channel.rank, number), {"error": error})
        self.failed = True
