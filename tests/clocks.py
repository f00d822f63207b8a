"""A clock that passes only when told to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Time that passes only when told to."""

    time: float = 0.0

    def now(self) -> float:
        return self.time
