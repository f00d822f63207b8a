"""The time limit of a search, which all of its stages look at between two units of work.

A unit is a minimum cut or a simulated plan. The stages have shares of the limit, so that a graph whose candidates take long
still gets a filled plan and lower bounds. A stage that ends early leaves its time to the next one.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TimeLimit:
    """The seconds that a search may take, from the creation of this object on."""

    seconds: float = math.inf
    began: float = field(default_factory=lambda: time.monotonic())

    def has_passed(self, share: float = 1.0) -> bool:
        """Returns True if that share of the seconds has passed."""
        return time.monotonic() - self.began > share * self.seconds

    @property
    def left(self) -> float:
        """Seconds that are left, or less than zero."""
        return self.began + self.seconds - time.monotonic()
