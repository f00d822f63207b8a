"""Ledger of a step: the memory of all calls of compiled graphs, and the plans of least time within a budget.

    x[g, k] = 1: graph g gets plan k                                       sum over k of x[g, k] = 1
    minimise   sum of calls[g] * seconds[g, k] * x[g, k]
    subject to base + sum of saved[g, k] * x[g, k] over the open calls + peak[r, k] * x[r, k] of the running one <= budget

A step is a list of *moments*. At each, the forward or the backward of a call runs, or code that no plan controls. The live
bytes are the sum of three terms: ``base_bytes``, the saved bytes of the open calls, and the peak of the running half. No plan
controls ``base_bytes``. A call is *open* from its forward to its backward. A graph has one plan for all its calls, chosen from
its Pareto front. Each term depends on a single graph, so the choice is the small integer program above. CP-SAT solves it in
whole bytes and in one thread, so equal ledgers have equal solutions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoremat.planner.settings import SETTINGS

Front = Sequence["PlanPoint"]

BYTES = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")

COST_UNITS = 2**40
"""Number of units in the largest possible cost of a step, because CP-SAT needs integers."""

HOST_UNITS = 2**8
"""Cost of the most bytes on the host in these units. It only decides between plans of equal seconds."""


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
class KnownBorders:
    """Values at the borders of a graph of which the step's ledger knows who else holds them, by their numbers.

    The graph's other values at its borders are held by nothing else while its backward runs.
    """

    free: tuple[int, ...] = ()
    """Inputs that exist before the step. They take none of its memory."""
    held_elsewhere: tuple[int, ...] = ()
    """Values that the ledger counts by itself while the graph's backward runs."""


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one graph in the step's budget: limits for the :class:`PlanPoint` of its plan."""

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    borders: bool = False
    """True if values at the graph's borders that a plan keeps live count as saved (see ``fronts.point_of``)."""
    known: KnownBorders | None = None
    """The holders of the values at the graph's borders; None if they are unknown."""
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


@dataclass(frozen=True, slots=True)
class Allocation:
    """Plans assigned to the graphs, as indices into their Pareto fronts, with the step's peak and seconds."""

    choice: tuple[int, ...]
    peak_bytes: int
    seconds: float
    """Seconds of all calls."""


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


def shares(moments: Sequence[Moment], points: Sequence[PlanPoint], budget: int, borders: bool) -> tuple[Share, ...]:
    """Returns, for each graph, its share of ``budget`` bytes while all other graphs follow their ``points``."""
    room: dict[tuple[int, bool], int] = {}
    for moment in moments:
        if moment.running is not None:
            left = budget - moment.base_bytes - sum(points[g].saved_bytes for g in moment.open)
            half = moment.running, moment.backward
            room[half] = min(left, room.get(half, left))
    return tuple(
        Share(
            point.saved_bytes,
            room.get((graph, False), point.forward_peak_bytes),
            room.get((graph, True), point.backward_peak_bytes),
            borders,
            host_bytes=point.host_bytes,
        )
        for graph, point in enumerate(points)
    )


def distinct(moments: Iterable[Moment]) -> list[Moment]:
    """Returns the moments without those that another one covers.

    The other one has the same open calls, the same running half and at least as many base bytes.
    """
    fullest_of: dict[tuple[Any, ...], Moment] = {}
    for moment in moments:
        key = (tuple(sorted(moment.open)), moment.running, moment.backward)
        known = fullest_of.get(key)
        if known is None or known.base_bytes < moment.base_bytes:
            fullest_of[key] = moment
    return list(fullest_of.values())


class Model:
    """The integer program of the module's docstring."""

    def __init__(self, fronts: Sequence[Front], moments: Sequence[Moment], host_bytes: int | None = None) -> None:
        from ortools.sat.python import cp_model

        self.cp_model: Any = cp_model
        self.model: Any = cp_model.CpModel()
        self.fronts, self.moments = fronts, distinct(moments)
        self.chosen = [[self.model.new_bool_var(f"x[{g},{k}]") for k in range(len(front))] for g, front in enumerate(fronts)]
        for choices in self.chosen:
            self.model.add_exactly_one(choices)
        for moment in self.moments if host_bytes is not None else ():
            held = (p.host_bytes * x for g in moment.calls for p, x in zip(fronts[g], self.chosen[g], strict=True))
            self.model.add(sum(held, start=self.model.new_constant(0)) <= host_bytes)

    def bytes_at(self, moment: Moment) -> Any:
        """Returns the live bytes at ``moment`` as an expression."""
        terms: list[Any] = [moment.base_bytes]
        for graph, count in sorted(Counter(moment.open).items()):
            terms += [count * p.saved_bytes * x for p, x in zip(self.fronts[graph], self.chosen[graph], strict=True)]
        if moment.running is not None:
            running = zip(self.fronts[moment.running], self.chosen[moment.running], strict=True)
            terms += [p.peak_bytes(moment.backward) * x for p, x in running]
        return sum(terms)

    def keep_within(self, budget: int | Any) -> None:
        """Bounds the live bytes at all moments by ``budget``, a number or a variable."""
        for moment in self.moments:
            self.model.add(self.bytes_at(moment) <= budget)

    def minimize_peak(self) -> None:
        """Asks for the smallest peak of the step."""
        most = [PlanPoint(0.0, *(max(getattr(p, name) for p in front) for name in BYTES)) for front in self.fronts]
        peak = self.model.new_int_var(0, max(0, step_peak(self.moments, most)), "peak")
        self.keep_within(peak)
        self.model.minimize(peak)

    def minimize_seconds(self, calls: Sequence[int]) -> None:
        """Asks for the fewest seconds of all calls above those of the fastest plans, and then for little on the host."""
        fastest = [min(p.seconds for p in front) for front in self.fronts]
        added = [[p.seconds - least for p in front] for front, least in zip(self.fronts, fastest, strict=True)]
        worst = sum(count * max(seconds) for count, seconds in zip(calls, added, strict=True)) or 1.0
        held = max((p.host_bytes for front in self.fronts for p in front), default=0) or 1
        self.model.minimize(
            sum(
                (round(count * one / worst * COST_UNITS) + round(HOST_UNITS * p.host_bytes / held)) * x
                for count, seconds, front, choices in zip(calls, added, self.fronts, self.chosen, strict=True)
                for one, p, x in zip(seconds, front, choices, strict=True)
            )
        )

    def solve(
        self, hint: Sequence[int] | None = None, effort: float = SETTINGS.ledger.effort, gap: float = 0.0
    ) -> tuple[int, ...] | None:
        """Returns the best choice found; None if there is none.

        The search ends after ``effort`` in deterministic time, or within the share ``gap`` of the best objective.
        """
        for graph, choices in enumerate(self.chosen if hint is not None else []):
            for number, x in enumerate(choices):
                self.model.add_hint(x, number == (hint or ())[graph])
        solver = self.cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = effort
        solver.parameters.relative_gap_limit = gap
        if solver.solve(self.model) not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            return None
        return tuple(next(k for k, x in enumerate(choices) if solver.boolean_value(x)) for choices in self.chosen)


def outcome(fronts: Sequence[Front], calls: Sequence[int], moments: Sequence[Moment], choice: Sequence[int]) -> Allocation:
    """Returns the assignment ``choice`` with its peak and its seconds."""
    points = [front[k] for front, k in zip(fronts, choice, strict=True)]
    seconds = sum(count * point.seconds for count, point in zip(calls, points, strict=True))
    return Allocation(tuple(choice), step_peak(moments, points), seconds)


def least_memory(
    fronts: Sequence[Front], calls: Sequence[int], moments: Sequence[Moment], host_bytes: int | None = None
) -> Allocation:
    """Returns the assignment with the smallest peak of the step, with at most ``host_bytes`` on the host (None: no bound)."""
    model = Model(fronts, moments, host_bytes)
    model.minimize_peak()
    choice = model.solve()
    if choice is None:  # CP-SAT reached its limit before it found any choice
        ranks = [[(p.host_bytes, p.saved_bytes, p.backward_peak_bytes) for p in front] for front in fronts]
        choice = tuple(min(range(len(rank)), key=rank.__getitem__) for rank in ranks)
    return outcome(fronts, calls, moments, choice)


def allocate(
    fronts: Sequence[Front],
    calls: Sequence[int],
    moments: Sequence[Moment],
    budget: int | None,
    smallest: Allocation | None = None,
    host_bytes: int | None = None,
) -> Allocation | None:
    """Returns the assignment of least seconds whose peak is at most ``budget`` bytes (None: no bound).

    At most ``host_bytes`` are on the host (None: no bound).

    ``fronts[g]`` are the plans of graph ``g``, which is called ``calls[g]`` times. ``smallest`` is the assignment of
    :func:`least_memory`, if it is known. Returns None if no choice fits.
    """
    ranks = [[(p.seconds, p.host_bytes, p) for p in front] for front in fronts]  # nothing is moved in vain
    fastest = tuple(min(range(len(rank)), key=rank.__getitem__) for rank in ranks)
    freely = outcome(fronts, calls, moments, fastest)
    needs_host = host_peak(moments, [front[k] for front, k in zip(fronts, fastest, strict=True)])
    if (budget is None or freely.peak_bytes <= budget) and (host_bytes is None or needs_host <= host_bytes):
        return freely
    smallest = smallest or least_memory(fronts, calls, moments, host_bytes)
    if budget is not None and smallest.peak_bytes > budget:
        return None
    model = Model(fronts, moments, host_bytes)
    if budget is not None:
        model.keep_within(budget)
    model.minimize_seconds(calls)
    choice = model.solve(hint=smallest.choice)
    return smallest if choice is None else outcome(fronts, calls, moments, choice)
