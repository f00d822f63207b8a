"""Reads files that somebody else may have put there."""

from __future__ import annotations

import errno
import os
import stat

LARGEST_FILE = 2**28
"""Bytes above which a file is not read. No file that this package writes is that large."""


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
