"""Warns users at their own line: the innermost frame that belongs neither to this package nor to torch.

Warnings come from deep below a user's call, often through Dynamo, so a fixed number of frames would name anybody's line.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from types import CodeType, FrameType

from autoremat.basics.errors import ConstraintWarning

BETWEEN = ("autoremat", "torch", "contextlib", "functools")
"""Top-level modules whose frames lie between the user's line and a warning. Generated code has no module."""

_collected: ContextVar[list[str] | None] = ContextVar("messages of constraint warnings", default=None)
"""Messages of constraint warnings that a later process repeats from a cache."""


def warn_user(message: str, category: type[Warning]) -> None:
    """Emits a warning that points at the user's line."""
    innermost = sys._getframe(1)
    frame: FrameType | None = innermost
    while frame is not None and str(frame.f_globals.get("__name__") or "torch").partition(".")[0] in BETWEEN:
        frame = frame.f_back
    frame = frame or innermost  # without a frame of the user, as in a thread of torch's
    names = frame.f_globals
    warnings.warn_explicit(
        message, category, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"),
        names.setdefault("__warningregistry__", {}),
    )  # fmt: skip


def warn_at(code: CodeType, message: str, category: type[Warning]) -> None:
    """Emits a warning that points at a function of the user, whatever calls it."""
    warnings.warn_explicit(message, category, code.co_filename, code.co_firstlineno)


def warn_of_constraint(message: str) -> None:
    """Emits a ``ConstraintWarning``, and adds it to the messages that are being collected."""
    messages = _collected.get()
    if messages is not None and message not in messages:
        messages.append(message)
    warn_user(message, ConstraintWarning)


@contextlib.contextmanager
def collected_constraints() -> Iterator[list[str]]:
    """Yields a list that receives the messages of this context."""
    messages: list[str] = []
    token = _collected.set(messages)
    try:
        yield messages
    finally:
        _collected.reset(token)
