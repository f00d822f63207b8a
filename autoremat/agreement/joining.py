"""Opens the session in which ranks compile a graph together."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Sequence

from autoremat.agreement.channel import Channel
from autoremat.agreement.rendezvous import Rendezvous
from autoremat.agreement.session import Session
from autoremat.basics.errors import OptionWarning
from autoremat.basics.progress import now
from autoremat.torch_private.processes import Job, job

_rendezvous: tuple[Job, Rendezvous] | None = None
"""The job of this process and its meetings."""


@contextlib.contextmanager
def session_at(
    place: str | None, agreement: str | tuple[int, ...], elsewhere: Collection[int] = ()
) -> Iterator[Session | None]:
    """Yields the session of all ranks that come to ``place``; None without a place, or if this process is the only one.

    ``agreement`` is the option. ``elsewhere`` are ranks that do not come. An error of the body ends the session on all members.
    """
    present = job()
    if present is None or place is None or agreement == "off":
        yield None
        return
    ranks: Sequence[int] = range(present.world_size) if isinstance(agreement, str) else agreement
    if present.rank not in ranks:
        yield None
        return
    now("waiting for the other ranks")
    channel = Channel(present)
    with channel.alive():
        meeting = _rendezvous_of(present).meet(place, ranks, set(elsewhere) - {present.rank})
        if meeting.missing:
            _warn_of_missing(meeting.missing, place)
        if len(meeting.members) == 1:
            yield None
            return
        session = Session(channel, meeting)
        try:
            yield session
        except Exception as error:
            session.present.fail(error)
            raise
        if not session.present.failed:
            session.present.close()


def _rendezvous_of(present: Job) -> Rendezvous:
    global _rendezvous
    if _rendezvous is None or _rendezvous[0] is not present:
        _rendezvous = present, Rendezvous(Channel(present))
    return _rendezvous[1]


def _warn_of_missing(missing: Sequence[int], place: str) -> None:
    ranks = ", ".join(map(str, missing))
    warnings.warn(
        f"ranks {ranks} did not come to compile {place}, so the others planned it without them. Their plans may differ, and "
        'nothing that communicates is repeated. Pass agreement="off", or the list of the ranks that compile it',
        OptionWarning,
        stacklevel=5,
    )
