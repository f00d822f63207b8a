"""Shows the stage of slow work on standard error: a line that changes at a terminal, else a line every few seconds at most."""

import contextlib
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autoremat.basics import environment
from autoremat.basics.checks import flag

PATIENCE_SECONDS, LOG_INTERVAL_SECONDS = 2.0, 6.0
"""Seconds before the line at a terminal, and before each line in a log."""

LINE = 80
"""Most characters of a line."""

_default: bool | None = None
_here = threading.local()  # the status of the thread
_voice = threading.Lock()  # held by the thread that shows one


def set_default(shown: bool | None) -> None:
    """Sets the process's default for showing progress. None leaves it to the environment."""
    global _default
    _default = shown


def progress_wanted() -> bool:
    """Returns True if progress is to be shown, by the process's setting or else by ``AUTOREMAT_PROGRESS``, True by default.

    Raises ``OptionsError`` if the variable is neither 0 nor 1.
    """
    if _default is not None:
        return _default
    text = environment.said(environment.PROGRESS)
    return not text or flag({"0": False, "1": True}.get(text, text), environment.PROGRESS)


class _Status:
    def __init__(self, begin: float, console: Console | None) -> None:
        self.titles, self.begin, self.console, self.told = list[str](), begin, console, time.monotonic()
        self.stage = self.outcome = ""

    def __str__(self) -> str:
        doing, text = [*filter(None, (self.stage, *self.titles[::-1]))], f"autoremat {time.monotonic() - self.begin:.0f} s: "
        while len(doing) > 1 and len(text + ", ".join(doing)) > LINE:
            doing.pop()  # the widest one says least
        return textwrap.shorten(text + ", ".join(doing), LINE, placeholder=" …")

    def __rich__(self) -> Text:
        return Text(str(self), overflow="ellipsis", no_wrap=True)


def now(stage: str) -> None:
    """Names the current stage."""
    if status := getattr(_here, "status", None):
        status.stage = stage
        if status.console and not status.console.is_terminal and time.monotonic() >= status.told + LOG_INTERVAL_SECONDS:
            status.told = time.monotonic()
            print(status, file=status.console.file, flush=True)


def finish(outcome: str) -> None:
    """Names the outcome, with which the line ends if it was shown."""
    if status := getattr(_here, "status", None):
        status.outcome = outcome


@contextlib.contextmanager
def status_if_slow(title: str, shown: bool = True) -> Iterator[None]:
    """Shows ``title``, the elapsed seconds and the stage while the body runs, in the first rank of a job.

    A body within adds its title. ``shown=False`` silences the body.
    """
    outer = getattr(_here, "status", None)
    speaks = shown and outer is None and environment.said("RANK") in ("", "0") and _voice.acquire(blocking=False)
    console = Console(stderr=True, force_jupyter=False) if speaks and sys.stderr else None
    status = outer if outer and shown else _Status(time.monotonic(), console)
    to_terminal = sys.stdout is not None and sys.stdout.isatty()
    with contextlib.ExitStack() as after:
        if speaks:
            after.callback(_voice.release)
        if console and console.is_terminal:
            live = Live(status, console=console, transient=True, redirect_stdout=to_terminal)
            timer = threading.Timer(PATIENCE_SECONDS, live.start)
            timer.start()
            for act in (live.stop, timer.join, timer.cancel):  # the last is called first
                after.callback(act)
        after.callback(setattr, _here, "status", outer)
        after.callback(status.titles.pop)
        status.titles.append(title)
        _here.status = status
        yield
    seconds = time.monotonic() - status.begin
    if console and status.outcome and seconds > (PATIENCE_SECONDS if console.is_terminal else LOG_INTERVAL_SECONDS):
        print(f"autoremat: {status.outcome}", file=console.file, flush=True)
