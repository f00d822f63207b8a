"""The state of another process of the same machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class State(Enum):
    """The state of a process, as far as this one can see."""

    UNKNOWN = "unknown"
    RUNNING = "running"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True)
class LocalProcess:
    """A process: its machine, its number there, and the time of its start, which tells it from a later one of that number."""

    machine: str
    """The boot of the machine and the namespace of process numbers; empty where the system does not tell."""
    pid: int
    start: str

    @classmethod
    def of(cls, pid: int) -> LocalProcess:
        """Returns the process of this machine with that number."""
        return cls(_machine(), pid, _fields(pid)[1])

    def state(self) -> State:
        """Returns the state of the process; unknown on another machine, and where the system does not tell."""
        if not self.machine or self.machine != _machine():
            return State.UNKNOWN
        code, start = _fields(self.pid)
        if start != self.start or code in "ZX":  # a zombie has ended, and its parent has not noticed
            return State.ENDED
        return State.STOPPED if code in "Tt" else State.RUNNING


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _fields(pid: int) -> tuple[str, str]:
    """Returns the state and the start time of a process in Linux's words; empty texts if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return after_name[0], after_name[19]
