"""Reads and writes the files of the cache folder.

The folder holds four kinds of JSON files. Reports serve compilations that torch answers from its own caches. Rates of
devices, links to the host and workspaces of kernels are stored so that each is measured only once.

The folder is ``AUTOREMAT_CACHE_DIR``, or else the user's cache folder. It has one file per compiled graph or device. Nothing
read from a file is executed, and a file that does not parse counts as absent. Reports may take
``AUTOREMAT_CACHE_SIZE`` together (such as ``"2GiB"``; default 1 GiB). Above that, the least recently used files are deleted.
"""

import contextlib
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import platformdirs

from autoremat.basics.environment import CACHE_FOLDER, said
from autoremat.basics.environment import CACHE_SIZE as SIZE_VARIABLE
from autoremat.basics.errors import OptionsError
from autoremat.basics.units import parse_bytes

log = logging.getLogger("autoremat")

LARGEST_FILE = 2**28
"""Bytes above which a file is not read. No file that this package writes is that large."""

DEFAULT_SIZE = 2**30

KINDS = ("reports", "rates", "workspaces", "host_links")
"""All kinds of files. Only reports are deleted for space: a compilation restores them. Measured figures are small and stay."""

LEFT_OVER = 3600.0
"""Age in seconds at which a temporary file counts as abandoned by a process that was killed."""

UNUSABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions that a damaged or foreign file can cause while it is read."""


def folder(kind: str = "reports") -> Path:
    """Returns the folder of the files of one kind."""
    chosen = said(CACHE_FOLDER)
    return (Path(chosen) if chosen else platformdirs.user_cache_path("autoremat")) / kind


# -- files -------------------------------------------------------------------------------------------------------------


def read_regular_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a regular file.

    Raises ``OSError`` for a pipe, a device, a folder and a file above ``LARGEST_FILE`` bytes, and ``ValueError`` for bytes that
    are no UTF-8 and for an impossible name.
    """
    # Opened without blocking: a pipe of that name would make the process wait for ever.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if about.st_size > LARGEST_FILE:
            raise OSError(errno.EFBIG, f"it has {about.st_size:,} bytes, and at most {LARGEST_FILE:,} are read")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(LARGEST_FILE).decode()
    finally:
        os.close(descriptor)


def read_text(kind: str, key: str) -> str | None:
    """Returns the text stored as ``kind`` under ``key``, or None. Marks the file as used now."""
    path = folder(kind) / f"{key}.json"
    try:
        text = read_regular_text(path)
        with contextlib.suppress(OSError):
            os.utime(path)  # eviction goes by this time
        return text
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except OSError as error:
        _say_unusable(f"{path.name}: {error.strerror}")
        return None


def write_text(kind: str, key: str, text: str) -> None:
    """Writes a file atomically, then evicts old files if the cache is over its limit.

    A folder that cannot be written causes one log message and no error: the next process repeats the work.
    """
    temporary = folder(kind) / f"{key}.{secrets.token_hex(8)}.tmp"
    try:
        folder(kind).mkdir(parents=True, exist_ok=True)
        # ``tempfile`` would make the file readable for its owner alone, but a group may share the folder.
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
"""Folders whose failure was logged already."""


def _say_unusable(reason: str | None) -> None:
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
    """Holds an exclusive lock of ``kind`` and ``key`` across processes and threads while the body runs.

    Waits at most ``longest`` seconds. Yields True if the lock was acquired, else False; the body runs in both cases. The
    operating system releases the lock of a process that ends.
    """
    lock, held = filelock.FileLock(folder(kind) / f"{key}.lock", timeout=longest, mode=0o664), False
    with contextlib.suppress(OSError, NotImplementedError):  # too late, no folder, or a file system without locks
        folder(kind).mkdir(parents=True, exist_ok=True)
        lock.acquire()
        held = True
    try:
        yield held
    finally:
        lock.release()


# -- how much there is -------------------------------------------------------------------------------------------------


def stored(kind: str) -> dict[Path, os.stat_result]:
    """Returns the files of ``kind``, including lock files and the remains of interrupted writes. Writes and reads change
    their modification time."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder(kind)) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process may delete the file meanwhile
                if entry.name.endswith((".json", ".tmp", ".lock")) and not entry.is_dir(follow_symlinks=False):
                    found[Path(entry.path)] = entry.stat(follow_symlinks=False)
    return found


def size_limit() -> int:
    """Returns the bytes that reports may take together.

    Raises ``OptionsError`` if the environment variable is malformed.
    """
    asked = said(SIZE_VARIABLE)
    try:
        return parse_bytes(asked) if asked else DEFAULT_SIZE
    except ValueError as error:
        raise OptionsError(f"{SIZE_VARIABLE}: {error}") from None


def _evict() -> None:
    """Deletes abandoned temporary files, and the least recently used reports until a tenth of the limit is free."""
    files = [file for kind in KINDS for file in stored(kind).items() if kind == "reports" or file[0].suffix == ".tmp"]
    limit, forgotten = size_limit(), time.time() - LEFT_OVER
    excess = sum(about.st_size for _, about in files) - limit
    excess += limit // 10 if excess > 0 else 0
    for path, about in sorted(files, key=lambda file: file[1].st_mtime):
        if excess > 0 or (path.suffix == ".tmp" and about.st_mtime < forgotten):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            excess -= about.st_size


def clear() -> int:
    """Deletes all files of the cache. Returns the bytes that this frees."""
    files = {path: about for kind in KINDS for path, about in stored(kind).items()}
    for path in files:
        path.unlink(missing_ok=True)
    return sum(about.st_size for about in files.values())
