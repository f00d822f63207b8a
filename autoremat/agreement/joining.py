"""Opens the session in which ranks compile a graph together, and names other ranks' failures in errors of this one."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from autoremat.agreement.channel import Channel
from autoremat.agreement.presence import Presence
from autoremat.agreement.rendezvous import Meeting, Rendezvous
from autoremat.agreement.session import Session
from autoremat.basics.errors import AgreementError, AutorematError, OptionWarning, find_cause
from autoremat.basics.progress import now
from autoremat.basics.warn import warn_user
from autoremat.torch_private.processes import Job, job

log = logging.getLogger("autoremat")


@dataclass(frozen=True)
class Membership:
    """This process in its job: its connection, its meetings and its signs of life."""

    job: Job
    channel: Channel
    rendezvous: Rendezvous
    presence: Presence


_membership: Membership | None = None


def membership() -> Membership | None:
    """Returns this process's membership in its job, from which on other ranks see whether it lives; None without a job."""
    global _membership
    present = job()
    if present is None:
        return None
    if _membership is None or _membership.job is not present:
        if _membership is None:
            sys.excepthook = partial(_show, sys.excepthook)
        else:
            _membership.presence.stop()
        channel = Channel(present)
        _membership = Membership(present, channel, Rendezvous(channel), Presence(channel))
    return _membership


def _show(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Has ``show`` print an uncaught error, with notes on other ranks that failed before.

    Their end also ends the collectives of this rank, whose errors cannot tell the reason.
    """
    if _membership is not None and find_cause(error, AutorematError) is None and sys.version_info >= (3, 11):
        for failure in tuple(_membership.channel.failures.values()):
            error.add_note(f"autoremat: before this error, {failure}")
    show(kind, error, trace)


@atexit.register
def _leave() -> None:
    """Tells the other ranks that the interpreter exits, and with which error."""
    if _membership is not None:
        _membership.presence.end(getattr(sys, "last_value", None))


@contextlib.contextmanager
def session_at(
    place: str, agreement: str | tuple[int, ...], elsewhere: Collection[int] = (), communicates: bool = True
) -> Iterator[Session | None]:
    """Yields the session of all ranks that come to ``place``; None if this process is the only one.

    ``agreement`` is the option. ``elsewhere`` are ranks that do not come. ``communicates`` is False if ranks may plan the graph
    differently. An error of the body, an interrupt included, ends the session on all members, and the other ranks note it.
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
    meeting = present.rendezvous.meet(place, ranks, set(elsewhere) - {present.channel.rank}, communicates)
    session = None if len(meeting.members) == 1 else Session(present.channel, meeting)
    try:
        if meeting.missing:
            _tell_of_missing(meeting, place, present.channel)
        for rank in meeting.members:
            present.channel.failures.pop(rank, None)  # it has survived them
        yield session
    except BaseException as error:
        if session is not None:
            session.fail(error)
        with contextlib.suppress(AgreementError):
            if len(meeting.members) < present.job.world_size:
                present.presence.tell(f"failed while it compiled {place}", error)
        raise


def _tell_of_missing(meeting: Meeting, place: str, channel: Channel) -> None:
    """Warns that some ranks did not come, unless each rank may plan the graph by itself."""
    ranks = ", ".join(map(str, meeting.missing))
    if not meeting.is_needed:
        log.info("ranks %s do not compile %s again, so the others plan it without them", ranks, place)
        return
    unknown = [str(rank) for rank in meeting.missing if not channel.has(f"process/{rank}")]
    known = "" if not unknown else f" Ranks {', '.join(unknown)} have not used autoremat in this job, or ended before they did."
    known += "".join(f" Before that, {channel.failures[rank]}." for rank in meeting.missing if rank in channel.failures)
    warn_user(
        f"ranks {ranks} did not come to compile {place}, so the others planned it without them.{known} Their plans may differ, "
        'and nothing that communicates is repeated. Pass agreement="off", or the list of the ranks that compile it',
        OptionWarning,
    )
