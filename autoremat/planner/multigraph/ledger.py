"""Ledger of a step: the memory of all calls of compiled graphs.

A step is a list of *moments*. At each, the forward or the backward of a call runs, or code that no plan controls. The live
bytes are the sum of three terms: ``base_bytes``, the saved bytes of the open calls, and the peak of the running half. No plan
controls ``base_bytes``. A call is *open* from its forward to its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class PlanPoint:
    """Seconds and bytes of one plan of a graph, per call. Peaks count from the start of the call's forward."""

    seconds: float
    """Seconds of recomputation and of the traffic of saved tensors, by the cost model."""
    saved_bytes: int
    """Bytes held from the forward to the backward, without the outputs."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    host_bytes: int = 0
    """Bytes that a call holds on the host from its forward to its backward."""

    def peak_bytes(self, backward: bool) -> int:
        """Returns the peak of the forward or the backward."""
        return self.backward_peak_bytes if backward else self.forward_peak_bytes

    def with_more(self, peak_bytes: int, saved_bytes: int = 0) -> PlanPoint:
        """Returns the plan with ``peak_bytes`` more in each half, of which it saves ``saved_bytes``."""
        forward, backward = self.forward_peak_bytes + peak_bytes, self.backward_peak_bytes + peak_bytes
        return PlanPoint(self.seconds, self.saved_bytes + saved_bytes, forward, backward, self.host_bytes)

    def dominates(self, other: PlanPoint) -> bool:
        """Returns True if this plan is at least as good in every cost."""
        return (
            self.seconds <= other.seconds
            and self.saved_bytes <= other.saved_bytes
            and self.forward_peak_bytes <= other.forward_peak_bytes
            and self.backward_peak_bytes <= other.backward_peak_bytes
            and self.host_bytes <= other.host_bytes
        )


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


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one graph in the step's budget: limits for the :class:`PlanPoint` of its plan."""

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    note: str = ""
    """A line for the report: the step to which the share belongs, if the backend itself shared out its budget."""
    host_bytes: int = 0
    """The most bytes that a call may hold on the host."""

    @property
    def peak_bytes(self) -> int:
        """The larger of the two limits on peaks."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    def excess_bytes(self, point: PlanPoint, extra_headroom_bytes: int = 0) -> int:
        """Returns the bytes by which ``point`` exceeds the limit that it misses most; not positive if it keeps to all.

        ``extra_headroom_bytes`` are to spare below the limits on the peaks.
        """
        return max(
            point.saved_bytes - self.saved_bytes,
            point.forward_peak_bytes + extra_headroom_bytes - self.forward_peak_bytes,
            point.backward_peak_bytes + extra_headroom_bytes - self.backward_peak_bytes,
            point.host_bytes - self.host_bytes,
        )

    def holds(self, point: PlanPoint, extra_headroom_bytes: int = 0) -> bool:
        """Returns True if ``point`` keeps to all limits, with ``extra_headroom_bytes`` to spare below those of the peaks."""
        return self.excess_bytes(point, extra_headroom_bytes) <= 0


def pareto(points: Iterable[PlanPoint]) -> tuple[PlanPoint, ...]:
    """Returns the points that no other point dominates, fastest first."""
    found: list[PlanPoint] = []
    for point in sorted(set(points)):
        if not any(other.dominates(point) for other in found):
            found.append(point)
    return tuple(found)


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
