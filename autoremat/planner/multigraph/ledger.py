"""Ledger of a step: the memory of all calls of compiled graphs.

A step is a list of *moments*. At each, the forward or the backward of a call runs, or code that no plan controls. The live
bytes are the sum of three terms: ``base_bytes``, the saved bytes of the open calls, and the peak of the running half. No plan
controls ``base_bytes``. A call is *open* from its forward to its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoremat.planner.plans.limits import PlanPoint


@dataclass(frozen=True, slots=True)
class Moment:
    """A stretch of the step during which a single half runs, or none."""

    base_bytes: int
    """Bytes above the step's start that are live under every plan. Negative if a plan's peak counts values that are not
    live."""
    open: tuple[int, ...] = ()
    """Graphs of the other open calls, one entry for each call."""
    running: int | None = None
    """Graph whose half runs. None if no half runs; ``base_bytes`` is then the peak of the code that runs instead."""
    backward: bool = False

    @property
    def calls(self) -> tuple[int, ...]:
        """Graphs of all open calls, that of the running one included."""
        return self.open if self.running is None else (*self.open, self.running)


def _moment_bytes(moment: Moment, points: Sequence[PlanPoint]) -> int:
    half = 0 if moment.running is None else points[moment.running].peak_bytes(moment.backward)
    return moment.base_bytes + sum(points[g].saved_bytes for g in moment.open) + half


def fullest(moments: Sequence[Moment], points: Sequence[PlanPoint]) -> Moment:
    """Returns the first moment at which the step reaches its peak, if each graph ``g`` follows ``points[g]``."""
    return max(moments, key=lambda moment: _moment_bytes(moment, points))


def step_peak(moments: Sequence[Moment], points: Sequence[PlanPoint]) -> int:
    """Returns the peak of the step, if each graph ``g`` follows ``points[g]``."""
    return max((_moment_bytes(moment, points) for moment in moments), default=0)


def host_peak(moments: Sequence[Moment], points: Sequence[PlanPoint]) -> int:
    """Returns the most bytes that the step holds on the host, if each graph ``g`` follows ``points[g]``."""
    return max((sum(points[g].host_bytes for g in moment.calls) for moment in moments), default=0)


def distinct(moments: Iterable[Moment]) -> list[Moment]:
    """Returns the moments without those of the same calls that have fewer base bytes."""
    fullest_of: dict[tuple[object, ...], Moment] = {}
    for moment in sorted(moments, key=lambda moment: moment.base_bytes):
        fullest_of[tuple(sorted(moment.open)), moment.running, moment.backward] = moment
    return list(fullest_of.values())
