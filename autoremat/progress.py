"""Tells a person at a terminal that something takes long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rich.console import Console

PATIENCE_SECONDS = 2.0


@contextlib.contextmanager
def said_if_slow(message: str, console: Console | None = None, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Show ``message`` on standard error while the body runs, once it has run for ``patience`` seconds; nothing where standard
    error is not a terminal."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    status = console.status(message)
    timer = threading.Timer(patience, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
