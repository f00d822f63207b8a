"""Tells whoever waits what is going on: at a terminal, in a notebook, in a log.

:func:`status_if_slow` is put around what may take long, :func:`now` says what is being done at the moment. A thread of its own
speaks, so that nobody who works has to. Outside of ``status_if_slow`` nothing is said, whoever calls ``now``.
"""

from __future__ import annotations

import contextlib
import os
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
"""Before a person is told at a terminal or in a notebook."""

LOG_PATIENCE_SECONDS, LOG_INTERVAL_SECONDS = 5.0, 6.0
"""Before the first line in a log, and between two lines: no silence lasts ten seconds."""

LEAST_SECONDS = 4.0
"""So long something is counted before it is said how long the rest takes."""

Result = TypeVar("Result")
Count = Callable[[], tuple[int, int]]
"""How many of how many are done."""


_default: bool | None = None
"""The process's own setting; None: the environment's."""


def set_default(shown: bool | None) -> None:
    """Sets if progress is shown where nothing else is asked for; None leaves that to the environment."""
    global _default
    _default = shown


def progress_wanted() -> bool:
    """Returns True if the process's setting, or else the environment, wants progress to be shown."""
    return progress_in_environment() if _default is None else _default


def progress_in_environment() -> bool:
    """Returns the setting of ``AUTOREMAT_PROGRESS``, True by default. Raises ``OptionsError`` if it is neither 0 nor 1."""
    text = environment.said(environment.PROGRESS)
    return not text or flag({"0": False, "1": True}.get(text, text), environment.PROGRESS)


@dataclass
class Tally:
    """How many of how many are done, counted by who does them."""

    total: int = 0
    done: int = 0

    def count(self) -> tuple[int, int]:
        """What :func:`now` takes."""
        return min(self.done, self.total), self.total


@dataclass
class _Level:
    """What one ``status_if_slow`` has to say."""

    title: str
    began: float = field(default_factory=lambda: time.monotonic())
    doing: str = ""
    since: float = 0.0
    count: Count | None = None
    attempt: int = 1

    def text(self) -> str:
        """Title and seconds, and what is being done, with how many of how many and about how long the rest takes."""
        at, doing, count = time.monotonic(), self.doing, self.count
        if count is not None:
            done, total = count()
            spent = at - self.since
            left = spent / done * (total - done) if done and spent > LEAST_SECONDS else 0.0
            doing += f", {done} of {total}" + (f", about {left:.0f} s left" if left >= 1 else "")
        attempt = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"{self.title} for {at - self.began:.0f} s{attempt}" + (f": {doing}" if doing else "")


class _Here(threading.local):
    """What the present thread does: None if nobody asked to be told, empty if it is to be quiet, else the outermost first."""

    levels: list[_Level] | None = None


_here = _Here()
_voice = threading.Lock()
"""Held by who speaks: what two threads say at once nobody can read."""


def now(doing: str, count: Count | None = None, attempt: int | None = None) -> None:
    """Note what is done from now on, and what tells how much of it is. ``attempt`` stays until it is changed."""
    if _here.levels:
        level = _here.levels[-1]
        level.count, level.doing, level.since = None, doing, time.monotonic()
        level.count = count
        level.attempt = level.attempt if attempt is None else attempt


def carried(work: Callable[[], Result]) -> Callable[[], Result]:
    """``work`` for another thread, which then speaks for this one."""
    levels = _here.levels

    def run() -> Result:
        _here.levels = levels
        return work()

    return run


def quiet() -> contextlib.AbstractContextManager[None]:
    """While active, the present thread says nothing, whatever is called."""
    return status_if_slow("", shown=False)


@contextlib.contextmanager
def status_if_slow(
    message: str, console: Console | None = None, patience: float | None = None, shown: bool = True, waited: float = 0.0
) -> Iterator[None]:
    """While the body runs, tell on standard error what it does, as soon as it has run for ``patience`` seconds.

    Where a person sits, one line changes; elsewhere there is a line every few seconds. Of the ranks of a job the first speaks.
    ``waited``: for so long the caller has been waiting already. Inside of another ``status_if_slow`` the message is added to
    that one's; not ``shown``, all that is inside is quiet.
    """
    outer, level = _here.levels, _Level(message, time.monotonic() - waited)
    if outer and shown:
        outer.append(level)
        try:
            yield
        finally:
            outer.pop()
        return
    shown = shown and outer is None and os.environ.get("RANK", "0") == "0"
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
    """While the body runs, a thread says what ``levels`` hold."""
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
        except (OSError, ValueError):  # nobody listens any more
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
    """Where it is said, and how often."""

    patience: float
    interval: float

    def say(self, text: str) -> None:
        """Show ``text`` in the place of what was said before."""

    def end(self, text: str) -> None:
        """Show ``text``, which is the last, or take away what was shown."""


def outlet_of(console: Console | None = None) -> Outlet | None:
    """The way to reach whoever waits; None if there is no standard error."""
    if in_notebook():
        return Notebook(sys.stderr)
    if console is None and sys.stderr is None:
        return None
    console = console or Console(file=sys.stderr)
    if console.is_terminal and not console.is_dumb_terminal:
        return Terminal(console)
    return Log(console.file)


def in_notebook() -> bool:
    """Whether a kernel of IPython's runs this process: what is written appears under a cell."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class Terminal:
    """A line with a spinner, gone in the end."""

    patience, interval = PATIENCE_SECONDS, 0.2

    def __init__(self, console: Console) -> None:
        self.spinner = Spinner("dots")
        # What the program prints meanwhile goes above the line, unless it goes to a file.
        to_terminal = sys.stdout is not None and sys.stdout.isatty()
        self.live = Live(
            self.spinner, console=console, transient=True, auto_refresh=False, redirect_stdout=to_terminal, redirect_stderr=True
        )

    def say(self, text: str) -> None:
        """Show ``text`` beside the spinner."""
        self.spinner.update(text=Text(text, overflow="ellipsis", no_wrap=True))
        self.live.start()
        self.live.refresh()

    def end(self, text: str) -> None:
        """Take the line away: the prompt says that it is over."""
        self.live.stop()


class Notebook:
    """A line that is written over, and stays in the end."""

    patience, interval = PATIENCE_SECONDS, 1.0

    def __init__(self, file: TextIO) -> None:
        self.file, self.width = file, 0

    def say(self, text: str, ending: str = "") -> None:
        """Write over the line."""
        self.file.write(f"\r{text:<{self.width}}{ending}")
        self.file.flush()
        self.width = len(text)

    def end(self, text: str) -> None:
        """Leave a last line."""
        self.say(text, "\n")


class Log:
    """Lines, with seconds between two."""

    patience, interval = LOG_PATIENCE_SECONDS, LOG_INTERVAL_SECONDS

    def __init__(self, file: Any) -> None:
        self.file = file

    def say(self, text: str) -> None:
        """Write a line."""
        self.file.write(f"{text}\n")
        self.file.flush()

    end = say
