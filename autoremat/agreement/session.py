"""A session: the messages of the members of a meeting while they compile.

Members proceed in *rounds*, which all of them run in the same sequence. In a round each member sends its part to the *leader*,
the lowest rank. The leader makes one result of all parts, and every member receives it. An error on one member is the result
of the round for all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from autoremat.agreement.channel import Channel
from autoremat.agreement.presence import LINGER, wait_for
from autoremat.agreement.rendezvous import Meeting
from autoremat.agreement.told_errors import described, restored
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
        return self._lead(topic, part, decide) if self.leads else self._follow(topic, part)

    def fail(self, error: BaseException) -> None:
        """Ends the session on all members with ``error``, unless an error has ended it already."""
        if self.failed:
            return
        self.failed = True
        self.number += 1
        if self.leads:
            self._end(described(error), self.leader)
        else:
            self.channel.write(self._part(self.channel.rank), {"error": described(error)})
            self.channel.count(self._heard)  # the leader may have failed as well, and lingers until all know

    @property
    def _result(self) -> str:
        return f"{self.meeting.name}/{self.number}/result"

    @property
    def _heard(self) -> str:
        return f"{self.meeting.name}/heard"

    def _part(self, rank: int) -> str:
        return f"{self.meeting.name}/{self.number}/{rank}"

    def _follow(self, topic: str, part: Any) -> Any:
        """Sends ``part`` and returns the leader's result."""
        self.channel.write(self._part(self.channel.rank), {"topic": topic, "part": part})
        try:
            result = wait_for(self.channel, self._result, self.leader)
        except BaseException as error:
            self.failed = True
            with contextlib.suppress(AgreementError):  # the leader may live after all, and reads the error with the parts
                self.channel.write(self._part(self.channel.rank), {"error": described(error)})
            raise
        if "error" in result:
            self.channel.count(self._heard)
            self._raise(result["error"], result.get("rank", self.leader))
        return result["value"]

    def _lead(self, topic: str, part: Any, decide: Callable[[Parts], Any]) -> Any:
        """Returns the result of all parts, after it has been sent to all members."""
        parts = {self.leader: part}
        try:
            for rank in self.members[1:]:
                sent = wait_for(self.channel, self._part(rank), rank)
                if "error" in sent:
                    self._end(sent["error"], rank)
                    self._raise(sent["error"], rank)
                if sent["topic"] != topic:
                    raise AgreementError(
                        f"rank {rank} is at {sent['topic']!r} of a compilation while rank {self.leader} is at {topic!r}: their "
                        'caches or settings of torch differ. Make these equal, or pass the option agreement="off"'
                    )
                parts[rank] = sent["part"]
            value = decide(parts)
        except BaseException as error:
            if not self.failed:
                self._end(described(error), self.leader)
            raise
        self.channel.write(self._result, {"value": value})
        # Nobody reads these parts again, nor the result before, which all members have read.
        self.channel.delete([*map(self._part, self.members[1:]), f"{self.meeting.name}/{self.number - 1}/result"])
        return value

    def _end(self, error: Mapping[str, Any], rank: int) -> None:
        """Tells all members, as their leader, that the session ends with an error of rank ``rank``."""
        self.failed = True
        self.channel.write(self._result, {"error": error, "rank": rank})
        self.channel.linger(self._heard, len(self.members) - 1, LINGER)

    def _raise(self, error: Mapping[str, Any], rank: int) -> NoReturn:
        self.failed = True
        raise restored(error, rank, self.channel)
