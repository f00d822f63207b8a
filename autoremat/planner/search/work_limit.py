"""The limit of a search: an amount of work, counted in steps, so that equal requests end at the same step on any machine.

A unit of work is a step whose length follows from the graph alone: a minimum cut, a simulated plan, a view, a move, a check.
Its work is the number of its nodes, arcs, ops or executions, times a weight of about a microsecond of processor time. A share
of the work ends each stage, so that a graph whose starts take long still gets a plan and lower bounds.

The clock is the last resort, for a processor that is several times slower than the one of the weights. It counts the processor
time of units, so that other processes end no search. Only the clock can give an equal request another plan, so a search
remembers which of the two has ended it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

PREPARATION = 8.0
"""Work per op to build a flow network and to find the places and the bytes that a search starts from."""

CUT = 0.1
"""Work per node and arc of a minimum cut."""

SIMULATION = 2.2
"""Work per execution to schedule and simulate a plan."""

VIEW = 3.0
"""Work per execution to list the live ranges of a plan with their uses."""

CHOICE = 9.0
"""Work per drop that is priced."""

STEP = 1.8
"""Work per read that is followed to find what a drop computes again."""

PLACEMENT = 12.0
"""Work per execution to choose the stays that bring a plan within a budget, and to simulate them."""

CHECK = 6.0
"""Work per execution to check a plan."""

WORK_PER_SECOND = 300_000.0
"""Work per second of the time limit. Where the weights hold, a search that uses all its work takes 30 % of the limit."""


class WorkLimit:
    """The work that a search may do under a time limit in ``seconds``, and how much it has done."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self.work = seconds * WORK_PER_SECOND
        self.ended_by_clock = False
        """True if the clock has left something out, in this search or in one before it."""
        self.restart()

    def restart(self) -> None:
        self.done = 0.0
        self.elapsed = 0.0
        self.interrupted = False
        """True if the search has left something out, because its work was done or its time was over."""
        self.longest = 0.0

    @contextmanager
    def unit(self, work: float = 0.0) -> Iterator[None]:
        """Counts ``work`` and the processor time of the body, which has no unit inside. It may :meth:`add` work it finds."""
        began = time.thread_time()
        yield
        self.add(work)
        took = time.thread_time() - began
        self.elapsed += took
        self.longest = max(self.longest, took)

    def add(self, work: float) -> None:
        self.done += work

    @contextmanager
    def beside(self, share: float) -> Iterator[WorkLimit]:
        """Gives a further search that share of a whole one's work, and its own clock. What that leaves out is left out here."""
        further = WorkLimit(self.seconds)
        further.work *= share
        try:
            yield further
        finally:
            self.interrupted = self.interrupted or further.interrupted
            self.ended_by_clock = self.ended_by_clock or further.ended_by_clock

    def has_passed(self, share: float = 1.0) -> bool:
        """Returns True if no further unit may begin within that share of the work.

        The clock leaves later stages half of their share, and ends the search before a unit like the longest would end late.
        """
        is_done = self.done >= share * self.work
        is_late = self.elapsed > (1 + share) / 2 * self.seconds or self.elapsed + self.longest > self.seconds
        self.interrupted = self.interrupted or is_done or is_late
        self.ended_by_clock = self.ended_by_clock or (is_late and not is_done)
        return is_done or is_late
