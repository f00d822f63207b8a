"""Warns of constraints without effect, and collects the messages, so that a later process can warn again from a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from autoremat.basics.errors import ConstraintWarning
from autoremat.basics.warn import warn_user

_collected: ContextVar[list[str] | None] = ContextVar("messages of constraint warnings", default=None)


def warn(message: str) -> None:
    """Emits a ``ConstraintWarning``, and adds it to the messages that are being collected."""
    messages = _collected.get()
    if messages is not None and message not in messages:
        messages.append(message)
    warn_user(message, ConstraintWarning)


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Yields a list that receives the messages of this context."""
    messages: list[str] = []
    token = _collected.set(messages)
    try:
        yield messages
    finally:
        _collected.reset(token)
