"""Shows the progress of slow work at a terminal, in a notebook or in a log.

:func:`status_if_slow` surrounds work that may be slow; :func:`now` names the current step of it. A separate thread writes the
messages, so that working threads do not. Outside of ``status_if_slow``, calls of ``now`` have no effect.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from autoremat.basics import environment
from autoremat.basics.checks import flag

PATIENCE_SECONDS = 2.0
"""Seconds before the first message at a terminal or in a notebook."""

LOG_PATIENCE_SECONDS, LOG_INTERVAL_SECONDS = 5.0, 6.0
"""Seconds before the first line in a log, and between two lines. No silence lasts ten seconds."""

LEAST_SECONDS = 4.0
"""Seconds of counting before the remaining time is estimated."""

Result = TypeVar("Result")
Count = Callable[[], tuple[int, int]]
"""Returns the number of finished items and their total, which is 0 if it is unknown."""


_default: bool | None = None
"""The setting of the process; None leaves it to the environment."""


def set_default(shown: bool | None) -> None:
    """Sets the process's default for showing progress. None leaves it to the environment."""
    global _default
    _default = shown


def progress_wanted() -> bool:
    """Returns True if progress is to be shown, by the process's setting or else by the environment."""
    return progress_in_environment() if _default is None else _default


def progress_in_environment() -> bool:
    """Returns the setting of ``AUTOREMAT_PROGRESS``, True by default. Raises ``OptionsError`` if it is neither 0 nor 1."""
    text = environment.said(environment.PROGRESS)
    return not text or flag({"0": False, "1": True}.get(text, text), environment.PROGRESS)


@dataclass
class Tally:
    """A count of finished items, which the worker itself increments. A ``total`` of 0 is unknown."""

    total: int = 0
    done: int = 0

    def count(self) -> tuple[int, int]:
        """Returns the pair (done, total) that :func:`now` takes."""
        return min(self.done, self.total) if self.total else self.done, self.total


@dataclass
class _Level:
    """The state of one ``status_if_slow``."""

    title: str
    began: float = field(default_factory=lambda: time.monotonic())
    doing: str = ""
    since: float = 0.0
    count: Count | None = None
    attempt: int = 1

    def text(self) -> str:
        """Returns the title, elapsed seconds and current step, with its count and the estimated remaining seconds."""
        at, doing, count = time.monotonic(), self.doing, self.count
        if count is not None:
            done, total = count()
            spent = at - self.since
            left = spent / done * (total - done) if done and spent > LEAST_SECONDS else 0.0
            doing += f", {done:,} of {total:,}" if total else f": {done:,} so far"
            doing += f", about {left:.0f} s left" if left >= 1 else ""
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"{self.title} for {at - self.began:.0f} s{attempt}" + (f": {doing}" if doing else "")


class _Here(threading.local):
    """The levels of the current thread, outermost first.

    None if there is no ``status_if_slow``; empty if the thread is quiet.
    """

    levels: list[_Level] | None = None


_here = _Here()
_voice = threading.Lock()
"""Held by the thread that writes, so that messages of two threads do not mix."""


def now(doing: str, count: Count | None = None, attempt: int | None = None) -> None:
    """Names the current step, and optionally a function that counts its items.

    ``attempt`` keeps its value until it is changed.
    """
    if _here.levels:
        level = _here.levels[-1]
        level.count, level.doing, level.since = None, doing, time.monotonic()
        level.count = count
        level.attempt = level.attempt if attempt is None else attempt


def carried(work: Callable[[], Result]) -> Callable[[], Result]:
    """Returns ``work`` for another thread, whose progress then counts as the current thread's."""
    levels = _here.levels

    def run() -> Result:
        _here.levels = levels
        return work()

    return run


def quiet() -> contextlib.AbstractContextManager[None]:
    """Suppresses all progress messages of the current thread while active."""
    return status_if_slow("", shown=False)


@contextlib.contextmanager
def status_if_slow(
    message: str, console: Console | None = None, patience: float | None = None, shown: bool = True, waited: float = 0.0
) -> Iterator[None]:
    """Shows ``message`` and the current step on standard error once the body has run for ``patience`` seconds.

    A terminal or notebook shows one changing line, a log one line every few seconds. In a job of several ranks, only rank 0
    writes. ``waited`` is the seconds that the caller has waited already. A nested ``status_if_slow`` adds its message to the
    outer one. ``shown=False`` silences the body.
    """
    outer, level = _here.levels, _Level(message, time.monotonic() - waited)
    if outer and shown:
        outer.append(level)
        try:
            yield
        finally:
            outer.pop()
        return
    shown = shown and outer is None and environment.said("RANK") in ("", "0")
    outlet = outlet_of(console) if shown else None
    levels = [level] if outlet is not None else []
    _here.levels = levels
    try:
        if outlet is None:
            yield
        else:
            with _telling(outlet, levels, patience):
                yield
    finally:
        _here.levels = outer


@contextlib.contextmanager
def _telling(outlet: Outlet, levels: list[_Level], patience: float | None) -> Iterator[None]:
    """Writes the text of ``levels`` from a separate thread while the body runs."""
    over = threading.Event()

    def text() -> str:
        head, *rest = [level.text() for level in tuple(levels)]
        return "; ".join([f"autoremat: {head}", *rest])

    def tell() -> None:
        waiting = outlet.patience if patience is None else patience
        waiting = max(0.0, waiting - (time.monotonic() - levels[0].began))
        speaks = False
        try:
            while not over.wait(waiting):
                waiting = outlet.interval
                speaks = speaks or _voice.acquire(blocking=False)
                if speaks:
                    outlet.say(text())
        except (OSError, ValueError):  # standard error is closed
            return
        finally:
            if speaks:
                with contextlib.suppress(OSError, ValueError):
                    outlet.end(f"autoremat: done, {levels[0].title} took {time.monotonic() - levels[0].began:.0f} s")
                _voice.release()

    teller = threading.Thread(target=tell, name="autoremat-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


# -- outlets -----------------------------------------------------------------------------------------------------------


class Outlet(Protocol):
    """A place for messages, with the seconds before the first message and between two."""

    patience: float
    interval: float

    def say(self, text: str) -> None:
        """Shows ``text`` in place of the previous message."""

    def end(self, text: str) -> None:
        """Shows ``text`` as the last message, or removes the previous one."""


def outlet_of(console: Console | None) -> Outlet | None:
    """Returns the outlet for this process, or None if there is no standard error."""
    if in_notebook():
        return Notebook(sys.stderr)
    if console is None and sys.stderr is None:
        return None
    console = console or Console(file=sys.stderr)
    if console.is_terminal and not console.is_dumb_terminal:
        return Terminal(console)
    return Log(console.file)


def in_notebook() -> bool:
    """Returns True if an IPython kernel runs this process, so that output appears under a cell."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class Terminal:
    """Outlet for terminals: a line with a spinner, removed at the end."""

    patience, interval = PATIENCE_SECONDS, 0.2

    def __init__(self, console: Console) -> None:
        self.spinner = Spinner("dots")
        # The program's own output appears above the line, unless it is redirected to a file.
        to_terminal = sys.stdout is not None and sys.stdout.isatty()
        self.live = Live(
            self.spinner, console=console, transient=True, auto_refresh=False, redirect_stdout=to_terminal, redirect_stderr=True
        )

    def say(self, text: str) -> None:
        """Shows ``text`` beside the spinner."""
        self.spinner.update(text=Text(text, overflow="ellipsis", no_wrap=True))
        self.live.start()
        self.live.refresh()

    def end(self, text: str) -> None:
        """Removes the line. The prompt that follows shows that the work is done."""
        self.live.stop()


class Notebook:
    """Outlet for notebooks: a line that is overwritten and whose last text stays."""

    patience, interval = PATIENCE_SECONDS, 1.0

    def __init__(self, file: TextIO) -> None:
        self.file, self.width = file, 0

    def say(self, text: str, ending: str = "") -> None:
        """Overwrites the line."""
        self.file.write(f"\r{text:<{self.width}}{ending}")
        self.file.flush()
        self.width = len(text)

    def end(self, text: str) -> None:
        """Overwrites the line a last time and ends it."""
        self.say(text, "\n")


class Log:
    """Outlet for logs: a line per message."""

    patience, interval = LOG_PATIENCE_SECONDS, LOG_INTERVAL_SECONDS

    def __init__(self, file: Any) -> None:
        self.file = file

    def say(self, text: str) -> None:
        """Writes a line."""
        self.file.write(f"{text}\n")
        self.file.flush()

    end = say
