"""Greedy fill: saves more values of a plan that recomputes much, wherever and as long as memory is free.

    gain of saving  =  seconds of the op, and of all recomputations that only it needs  -  seconds of saving

A saved value occupies its bytes from its last use in the forward to its recomputation. Where it is live in any case, it needs
no further memory. If ``k`` calls are open at once, the other ``k - 1`` hold the value during the whole step. Values are saved
greedily by gain per byte. This happens in rounds, because each saved value changes the gain of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autoremat.planner.cost.fused_traffic import traffic_of
from autoremat.planner.graph.op import Constraint
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.work_limit import FILL, WorkLimit
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.search


@dataclass(frozen=True)
class _Candidate:
    """A recomputed op whose results could be saved instead. Saving takes memory from execution ``start`` up to, not including,
    ``end``."""

    gain_per_byte: float
    """Seconds per byte."""
    bytes: int
    start: int
    end: int
    values: tuple[int, ...]


class _Reads:
    """Data flow between the executions of a plan: which execution reads the results of which."""

    def __init__(self, plan: Plan) -> None:
        self.graph, self.sequence, self.num_forward = plan.graph, plan.schedule.sequence, len(plan.schedule.forward)
        newest: dict[int, int] = {}
        self.sources: list[list[int]] = []
        """For each execution, the executions whose results it reads."""
        self.readers: list[list[int]] = [[] for _ in self.sequence]
        self.forward_end: dict[int, int] = {}
        """For each value, the last execution of the forward that computes or reads it."""
        for position, index in enumerate(self.sequence):
            sources = [newest[v] for v in self.graph.computed_inputs[index]]
            for source in sources:
                self.readers[source].append(position)
            self.sources.append(sources)
            op = self.graph.ops[index]
            if position < self.num_forward:
                self.forward_end.update(dict.fromkeys((*op.inputs, *op.outputs), position))
            newest.update(dict.fromkeys(op.outputs, position))

    def recomputations(self) -> dict[int, int]:
        """Returns the positions of executions that repeat a forward op, with the op."""
        ran = set(self.sequence[: self.num_forward])
        backward = range(self.num_forward, len(self.sequence))
        return {p: self.sequence[p] for p in backward if self.sequence[p] in ran}

    def alone_for(self, position: int, recomputed: dict[int, int]) -> float:
        """Returns the seconds of a recomputation and of all recomputations whose results only it needs."""
        gone, stack, seconds = {position}, [position], 0.0
        while stack:
            current = stack.pop()
            seconds += traffic_of(self.graph).recompute_seconds[self.sequence[current]]
            for source in self.sources[current]:
                if source in recomputed and source not in gone and all(r in gone for r in self.readers[source]):
                    gone.add(source)
                    stack.append(source)
        return seconds


def _candidates(plan: Plan) -> list[_Candidate]:
    """Returns the recomputed ops of ``plan`` that could be saved, the best gain per byte first."""
    graph, reads = plan.graph, _Reads(plan)
    recomputed = reads.recomputations()
    last: dict[int, int] = {}
    gain: dict[int, float] = {}
    for position, index in recomputed.items():
        last[index] = position
        gain[index] = gain.get(index, 0.0) + reads.alone_for(position, recomputed)
    live_ranges = plan.timeline.live_ranges
    materialised = set(zip(live_ranges.values.tolist(), live_ranges.computed_at.tolist(), strict=True))
    first = {index: position for position, index in reversed(list(enumerate(plan.schedule.forward)))}
    found = []
    for index, position in last.items():
        readers = reads.readers[position]
        values = [v for v in graph.ops[index].outputs if any(v in graph.ops[reads.sequence[r]].inputs for r in readers)]
        size = sum(graph.values[v].bytes for v in values)
        worth = gain[index] - float(traffic_of(graph).saving_seconds[values].sum())
        if not values or worth <= 0.0 or graph.ops[index].constraint is Constraint.RECOMPUTE:
            continue
        # A value that the code generator inlines would exist only because it is saved. It then lives from its op to its last
        # reader.
        start = min(reads.forward_end[v] + 1 if (v, first[index]) in materialised else first[index] for v in values)
        end = position if all((v, position) in materialised for v in values) else max(readers) + 1
        found.append(_Candidate(worth / max(size, 1), size, start, end, tuple(values)))
    return sorted(found, key=lambda c: (-c.gain_per_byte, c.values))


def _fuller(plan: Plan, budget: int, saved_budget: float) -> frozenset[int]:
    """Returns the saved set of ``plan`` with the values that greedy choice adds to it."""
    others = plan.graph.in_flight - 1
    live_bytes, saved, room = plan.timeline.bytes_at.copy(), set(plan.saved), saved_budget - plan.saved_bytes
    top, raised = plan.peak_bytes, 0  # the largest of live_bytes, and the bytes by which other calls hold more than before
    for candidate in _candidates(plan):
        stretch, more = live_bytes[candidate.start : candidate.end], others * candidate.bytes
        reached = max(top if others else 0, int(stretch.max(initial=0)) + candidate.bytes)
        if candidate.bytes <= room and reached + raised + more <= budget:
            stretch += candidate.bytes
            top, raised = max(top, reached), raised + more
            room -= candidate.bytes
            saved.update(candidate.values)
    return frozenset(saved)


def fill(
    base: Plan,
    rebuild: Callable[[frozenset[int]], Plan],
    budget: int,
    saved_budget: float = math.inf,
    limit: WorkLimit | None = None,
) -> Plan:
    """Returns the cheapest plan in a sequence of ever fuller plans from ``base``, which must fit, within ``budget`` bytes.

    ``rebuild`` schedules and simulates a saved set. At most ``saved_budget`` bytes are saved. The sequence ends early once
    the plans' share of ``limit`` has passed.
    """
    plan, limit = base, limit or WorkLimit()
    for _ in range(settings.fill_rounds):
        if limit.has_passed(settings.plans_share):
            break
        with limit.unit(FILL * len(plan.sequence)):
            saved = _fuller(plan, budget, saved_budget)
        if len(saved) == len(plan.saved):
            break
        filled = rebuild(saved)
        fits = filled.peak_bytes <= budget and filled.saved_bytes <= saved_budget
        if not fits or filled.cost_seconds >= plan.cost_seconds:
            break
        plan = filled
    return plan
