"""What is kept on disk: reports and plans, so that a compilation that is answered from torch's caches has them too; the
rates of devices and the workspaces of kernels, so that they are measured once.

JSON files under ``AUTOREMAT_CACHE_DIR`` or the user's cache folder, one for each compiled graph or device. Nothing read from
them is executed; a file that does not parse is as good as none. What was not used for longest goes once all reports and plans
together take more than ``AUTOREMAT_CACHE_SIZE`` (such as ``"2GiB"``; 1 GiB by default).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from autoremat.basics.environment import CACHE_SIZE as SIZE_VARIABLE
from autoremat.basics.errors import OptionsError
from autoremat.basics.units import parse_bytes

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("autoremat")

DEFAULT_SIZE = 2**30
LARGEST_FILE = 2**28
"""Bytes: a larger file is not read, for none of ours is so large."""

EVICTED = ("reports", "plans")
KINDS = (*EVICTED, "rates", "workspaces")
"""The first are made again by compiling. Figures that were measured are small, and stay."""

LEFT_OVER = 3600.0
"""Seconds after which a temporary file is taken to be that of a process that was killed."""

UNUSABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a file raises that was damaged or made by somebody else."""


def folder(kind: str = "reports") -> Path:
    """Where the files of one kind lie."""
    chosen = os.environ.get("AUTOREMAT_CACHE_DIR")
    return (Path(chosen) if chosen else platformdirs.user_cache_path("autoremat")) / kind


# -- files -------------------------------------------------------------------------------------------------------------


def read_text(kind: str, key: str) -> str | None:
    """What was written of ``kind`` under ``key``, or None."""
    path = folder(kind) / f"{key}.json"
    try:
        # Without waiting: a pipe in the place of a file would else hold the process up for ever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST_FILE:
                raise OSError(errno.EINVAL, f"{path.name} is no file of ours")
            with open(descriptor, "rb", closefd=False) as file:
                text = file.read(LARGEST_FILE).decode()
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return text
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except OSError as error:
        _say_unusable(error.strerror)
        return None


def write_text(kind: str, key: str, text: str) -> None:
    """Write a file in one piece. A folder that cannot be written is said once and is no error: the next process does the work
    again."""
    temporary = folder(kind) / f"{key}.{secrets.token_hex(8)}.tmp"
    try:
        folder(kind).mkdir(parents=True, exist_ok=True)
        # Not by `tempfile`, whose files only their owner can read: a group may share the folder.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, folder(kind) / f"{key}.json")
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        _say_unusable(error.strerror)
    else:
        _evict()


_said: set[Path] = set()
"""The folders of whose trouble was spoken."""


def _say_unusable(reason: str | None) -> None:
    """Once in a process for each folder."""
    where = folder("").resolve()
    if where not in _said:
        _said.add(where)
        log.warning(
            "the cache folder %s cannot be used (%s): each process plans and measures again what it should keep. "
            "Set AUTOREMAT_CACHE_DIR to another folder, or run `autoremat cache clear`",
            where, reason,
        )  # fmt: skip


@contextlib.contextmanager
def locked(kind: str, key: str, longest: float) -> Iterator[bool]:
    """While the body runs, no other process or thread holds the same lock. Waits at most ``longest`` seconds; False if the lock
    cannot be had. The system takes it back from a process that ends."""
    descriptor = None
    with contextlib.suppress(OSError):
        folder(kind).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder(kind) / f"{key}.lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0), 0o666)
    if descriptor is None:
        yield False
        return
    held = False
    try:
        held = _flock(descriptor, time.monotonic() + longest)
        yield held
    finally:
        if held and sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a process that was forked meanwhile has it open too
        os.close(descriptor)


def _flock(descriptor: int, end: float) -> bool:
    """Whether the lock of the file is ours by ``end``; False at once where there are no such locks."""
    while sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        except OSError:  # not on this file system
            return False
    return False


# -- how much there is -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One file of the cache."""

    path: Path
    bytes: int
    used: float
    """When it was last written or read, in seconds since 1970."""


def stored(kind: str) -> list[Stored]:
    """The files of ``kind``, with what is left of interrupted writes."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder(kind)) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has removed it
                if entry.name.endswith((".json", ".tmp", ".lock")) and not entry.is_dir(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    found.append(Stored(Path(entry.path), about.st_size, about.st_mtime))
    return found


def size_limit() -> int:
    """How many bytes reports and plans may take together."""
    asked = os.environ.get(SIZE_VARIABLE)
    try:
        return parse_bytes(asked) if asked else DEFAULT_SIZE
    except ValueError as error:
        raise OptionsError(f"{SIZE_VARIABLE}: {error}") from None


def _evict() -> None:
    """Remove what was not used for longest, if there is too much until a tenth is free, and what killed processes left."""
    files = [file for kind in KINDS for file in stored(kind) if kind in EVICTED or file.path.suffix == ".tmp"]
    limit, forgotten = size_limit(), time.time() - LEFT_OVER
    excess = sum(file.bytes for file in files) - limit
    excess += limit // 10 if excess > 0 else 0
    for file in sorted(files, key=lambda file: file.used):
        if excess > 0 or (file.path.suffix == ".tmp" and file.used < forgotten):
            with contextlib.suppress(OSError):
                file.path.unlink(missing_ok=True)
            excess -= file.bytes


def clear() -> int:
    """Remove all files of the cache; how many bytes that frees."""
    files = [file for kind in KINDS for file in stored(kind)]
    for file in files:
        file.path.unlink(missing_ok=True)
    return sum(file.bytes for file in files)
