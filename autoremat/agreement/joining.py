"""Opens the session in which ranks compile a graph together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoremat.agreement.channel import Channel
from autoremat.agreement.rendezvous import Meeting, Rendezvous
from autoremat.agreement.session import Session
from autoremat.basics.errors import OptionWarning
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.torch_private.processes import Job, job


@dataclass(frozen=True)
class Membership:
    """This process in its job: its connection and its meetings."""

    job: Job
    channel: Channel
    rendezvous: Rendezvous


_membership: Membership | None = None


def membership() -> Membership | None:
    """Returns this process's membership in its job; None without a job."""
    global _membership
    present = job()
    if present is None:
        return None
    if _membership is None or _membership.job is not present:
        channel = Channel(present)
        _membership = Membership(present, channel, Rendezvous(channel))
    return _membership


@contextlib.contextmanager
def session_at(place: str, agreement: str | tuple[int, ...]) -> Iterator[Session | None]:
    """Yields the session of all ranks that come to ``place``; None if this process is the only one.

    ``agreement`` is the option. An error of the body, an interrupt included, ends the session on all members. Warns with
    ``OptionWarning`` of ranks that do not come.
    """
    present = membership()
    if present is None or agreement == "off":
        yield None
        return
    ranks: Sequence[int] = range(present.job.world_size) if isinstance(agreement, str) else agreement
    if present.channel.rank not in ranks:
        yield None
        return
    now("waiting for the other ranks")
    meeting = present.rendezvous.meet(place, ranks)
    session = None if len(meeting.members) == 1 else Session(present.channel, meeting)
    try:
        if meeting.missing:
            _tell_of_missing(meeting, place)
        yield session
    except BaseException as error:
        if session is not None:
            session.fail(error)
        raise


def _tell_of_missing(meeting: Meeting, place: str) -> None:
    ranks = ", ".join(map(str, meeting.missing))
    warn_user(
        f"ranks {ranks} did not come to compile {place}, so the others planned it without them. Their plans may differ, and "
        'nothing that communicates is repeated. Pass agreement="off", or the list of the ranks that compile it',
        OptionWarning,
    )
