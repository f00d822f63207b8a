"""Peak-aware search: many candidate plans, each simulated, the cheapest that fits.

A candidate is a saved set and a segmentation. Saved sets are the minimum cuts at all prices per saved byte: the vertices of
the convex curve of saved bytes against recomputation. A segmentation cuts the forward at narrow places; with it,
just-in-time recomputation turns a saved set into a schedule, and the simulator says what that needs. These candidates do
not depend on the budget. From those that fit, one per step of the curve, memory that is still free is then filled.

The search is deterministic: it counts candidates. Only the time limit can cut it short.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from autoremat.planner.graph.graph import Constraint, Graph
from autoremat.planner.graph.schedule import build_schedule, one_segment
from autoremat.planner.graph.segments import Chain, segment_counts
from autoremat.planner.plans.candidate import Candidate, Segmentation
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.greedy_fill import fill
from autoremat.planner.search.min_cut import MinCut

CURVE_POINTS = 12
"""At most so many minimum cuts."""

PLAIN_WORK, PLAIN_LIMITS = 2000, (2, 8)
"""So many segmentations, spread over all, are tried with every minimum cut, the others with the leanest only: this number
divided by that of forward ops, within limits."""

BASE_WORK, BASE_LIMITS = 4000, (4, 12)
"""So many candidates, spread over the peaks that they reach, are filled: likewise."""

SAVED_LEVELS, PEAK_LEVELS = 8, 3
"""To how many levels of saved bytes and of the peak memory is filled where a graph shares its budget with others."""

SAVE_ALL = "save all"


class Strategies(enum.Flag):
    """Which candidates a search looks at, beside saving everything."""

    CURVE = enum.auto()
    """The minimum cuts at all prices."""
    SEGMENTS = enum.auto()
    """Segmentations of the forward; without them it is one segment."""
    FILL = enum.auto()
    """Free memory is filled."""


EVERY_STRATEGY = Strategies.CURVE | Strategies.SEGMENTS | Strategies.FILL


def spread(count: int, wanted: int) -> set[int]:
    """At most ``wanted`` numbers below ``count``, evenly spread, the first and the last among them."""
    return {round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)} if count else set()


def effort(work: int, limits: tuple[int, int], num_forward: int) -> int:
    """How many of something to try on a graph, so that the time grows with its size and no faster."""
    return min(max(work // max(num_forward, 1), limits[0]), limits[1])


@dataclass
class Search:
    """The candidates of one graph; :meth:`cheapest` picks for a budget."""

    graph: Graph
    deadline: float = math.inf
    strategies: Strategies = EVERY_STRATEGY
    given: tuple[Candidate, ...] = ()
    """Candidates from elsewhere: a policy's."""
    simulated: int = 0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.explored = False
        self.filled: list[Plan] = []  # a later, larger budget never does worse than an earlier, smaller one
        self.mincut = MinCut(self.graph)
        self.chain = Chain.of(self.graph)

    # -- single candidates ---------------------------------------------------------------------------------------------

    def plan(self, saved: frozenset[int], segmentation: Segmentation, label: str) -> Plan:
        """Schedule and simulate."""
        self.simulated += 1
        self.interrupted = self.interrupted or time.monotonic() > self.deadline
        schedule = build_schedule(self.graph, saved, segmentation.segments)
        return Plan.of(self.graph, schedule, f"{segmentation.label} {label}")

    @cached_property
    def whole(self) -> Segmentation:
        """No cuts: every recomputed value is recomputed once and kept until its last reader."""
        return Segmentation(one_segment(self.graph), frozenset(), "1 segment,")

    def save_everything(self) -> Plan:
        """No recomputation: all that the backward reads is saved."""
        return self.plan(self.graph.backward_needs, self.whole, SAVE_ALL)

    def save_what_orders_allow(self) -> Plan:
        """No recomputation but what checkpoint regions and policies in the graph order."""
        if not any(op.constraint is Constraint.RECOMPUTE for op in self.graph.ops):
            return self.save_everything()
        return self.plan(self.mincut.solve(0.0), self.whole, "save what orders allow")

    # -- strategies of candidates ----------------------------------------------------------------------------------------

    def segmentations(self) -> Iterator[Segmentation]:
        """All cuts saved; or every second, every ``sqrt(n)``-th, with the ones between recomputed and kept."""
        seen = set()
        for count in segment_counts(self.graph.num_forward):
            segments, crossing = self.chain.segments(count)
            for stride in sorted({1, 2, max(1, math.isqrt(count))}):
                saved = frozenset(v for values in crossing[stride - 1 :: stride] for v in values)
                key = (segments.of_op, saved)
                if key not in seen and (stride == 1 or count > stride):
                    seen.add(key)
                    cuts = "every cut" if stride == 1 else f"one cut in {stride}"
                    label = "1 segment," if segments.count == 1 else f"{segments.count} segments, {cuts} saved,"
                    yield Segmentation(segments, saved, label, nested=bool(saved) and stride > 1)

    def curve(self) -> list[frozenset[int]]:
        """The minimum cuts at all prices per saved byte beside the memory traffic, those that save much first.

        Between two cuts, the price at which both are equally good shows whether there is a better one (Eisner and
        Severance, "Mathematical methods for segmenting computer networks", 1976).
        """
        ends = [self.mincut.cut(price, traffic=True) for price in (0.0, self.mincut.top_price)]
        found = {point.saved: point for point in ends}
        gaps = [(ends[0], ends[1])]
        while gaps and len(found) < CURVE_POINTS:
            gaps.sort(key=lambda pair: pair[0].bytes - pair[1].bytes)
            rich, lean = gaps.pop()
            if rich.bytes - lean.bytes <= 0.0:
                continue
            price = (lean.seconds - rich.seconds) / (rich.bytes - lean.bytes)
            middle = self.mincut.cut(max(price, 0.0), traffic=True)
            if middle.saved in found or not lean.bytes < middle.bytes < rich.bytes:
                continue
            found[middle.saved] = middle
            gaps += [(rich, middle), (middle, lean)]
        return [point.saved for point in sorted(found.values(), key=lambda p: (-p.bytes, p.seconds))]

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Every candidate of the graph, whatever the budget. Out of time, at least the first segmentation's."""
        curve = self.curve() if Strategies.CURVE in self.strategies else []
        segmentations = list(self.segmentations()) if Strategies.SEGMENTS in self.strategies else [self.whole]
        plain = [s for s in segmentations if not s.nested]
        chosen = sorted(spread(len(plain), effort(PLAIN_WORK, PLAIN_LIMITS, self.graph.num_forward)))
        found = list(self.given)
        for number, saved in enumerate(curve):
            for choice in chosen:
                if not self.interrupted or len(found) == len(self.given):
                    found.append(Candidate(self.plan(saved, plain[choice], f"cut {number}"), plain[choice]))
        for segmentation in segmentations:
            if not self.interrupted:
                saved = self.mincut.solve(self.mincut.top_price, free=segmentation.saved_cuts)
                found.append(Candidate(self.plan(saved, segmentation, "leanest"), segmentation))
        return found

    def bases(self, budget: int, saved_budget: float) -> list[Candidate]:
        """Candidates that fit, of those that no other beats in both peak and cost: the cheapest, and some leaner ones."""
        front: list[Candidate] = []
        for candidate in sorted(self.candidates, key=lambda c: (c.plan.peak_bytes, c.plan.cost_seconds)):
            fits = candidate.plan.peak_bytes <= budget and candidate.plan.saved_bytes <= saved_budget
            if fits and (not front or candidate.plan.cost_seconds < front[-1].plan.cost_seconds):
                front.append(candidate)
        front.reverse()
        wanted = effort(BASE_WORK, BASE_LIMITS, self.graph.num_forward)
        return [front[i] for i in sorted(spread(len(front), wanted))]

    @cached_property
    def unfilled(self) -> list[Plan]:
        """The plans that do not depend on the budget: every candidate, and saving all that orders allow."""
        return [self.save_what_orders_allow(), *(c.plan for c in self.candidates)]

    @cached_property
    def smallest(self) -> Plan:
        """The plan of least memory found: the same for every budget, so that what was compiled once as the smallest plan can
        be had again."""
        return min(self.unfilled, key=lambda p: (p.peak_bytes, p.cost_seconds))

    @cached_property
    def least_cost(self) -> float:
        """What filling cannot beat: the first minimum cut of the curve costs the least of all plans."""
        return min(p.cost_seconds for p in self.unfilled) if Strategies.CURVE in self.strategies else 0.0

    def best(self, budget: int | None, accepts: Callable[[Plan], bool] = bool) -> Plan | None:
        """The cheapest plan found so far within ``budget`` bytes (None: no bound) that ``accepts`` holds for."""
        fitting = (p for p in (*self.unfilled, *self.filled) if (budget is None or p.peak_bytes <= budget) and accepts(p))
        return min(fitting, key=lambda p: p.cost_seconds, default=None)

    def fill(self, budget: int, saved_budget: float = math.inf) -> None:
        """Fill candidates up to ``budget`` bytes, of which ``saved_budget`` may be saved."""
        for base in self.bases(budget, saved_budget):
            if self.interrupted:
                break
            rebuild = partial(self.plan, segmentation=base.segmentation, label="filled")
            self.filled.append(fill(base.plan, rebuild, budget, saved_budget))

    def cheapest(self, budget: int) -> Plan | None:
        """The cheapest plan found within ``budget`` bytes, after filling."""
        found = self.best(budget)
        if Strategies.FILL in self.strategies and found is not None and found.cost_seconds > self.least_cost:
            self.fill(budget)
        return self.best(budget)

    def spread_out(self) -> list[Plan]:
        """Plans for all needs of a graph that shares its budget with others: some of little peak, some of few saved bytes."""
        if not self.explored:
            self.explored = True
            whole, saved = self.save_what_orders_allow(), [plan.saved_bytes for plan in self.unfilled]
            least, most, smallest = min(saved), max(saved), self.smallest.peak_bytes
            for step in range(1, SAVED_LEVELS + 1):
                self.fill(whole.peak_bytes, least + (most - least) * step // SAVED_LEVELS)
            for step in range(1, PEAK_LEVELS + 1):
                self.fill(smallest + (whole.peak_bytes - smallest) * step // (PEAK_LEVELS + 1))
        return [*self.unfilled, *self.filled]
