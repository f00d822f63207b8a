"""Peak-aware search: simulates many candidate plans and returns the cheapest one that fits.

    candidate  =  saved set  x  segmentation

The saved sets are minimum cuts at all prices per saved byte. They are the vertices of the convex curve of saved bytes against
recomputation. A segmentation cuts the forward at narrow places. Just-in-time recomputation turns a saved set and a segmentation
into a schedule, and the simulator gives its peak. These candidates do not depend on the budget. Greedy fill then uses the
memory that is still free, starting from fitting candidates on the Pareto front of peak and cost. Ruin and recreate improves
the cheapest filled candidate.

The search counts its work, so it is deterministic unless the clock interrupts it (:mod:`.work_limit`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice, zip_longest
from typing import Protocol

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Constraint
from autoremat.planner.graph.schedule import build_schedule, one_segment
from autoremat.planner.graph.segments import Chain, segment_counts
from autoremat.planner.plans.candidate import Candidate, Segmentation, pareto_front
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.greedy_fill import fill
from autoremat.planner.search.least_peak import lowered, relaxed
from autoremat.planner.search.min_cut import MinCut
from autoremat.planner.search.peak_bound import bound_on_peak
from autoremat.planner.search.placement import SHARES, relieving
from autoremat.planner.search.ruin_and_recreate import recreate
from autoremat.planner.search.work_limit import PLACEMENT, PREPARATION, SIMULATION, WorkLimit
from autoremat.planner.settings import SETTINGS

settings = SETTINGS.search

SAVE_ALL = "save all"


def spread(count: int, wanted: int) -> set[int]:
    """Returns at most ``wanted`` numbers below ``count``, evenly spread, including the first and the last."""
    return {round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)} if count else set()


def spread_early(count: int) -> list[int]:
    """Returns the numbers below ``count`` in a sequence whose beginnings are all evenly spread: 0, 4, 2, 6, 1, 5, 3, 7."""
    digits = max(count - 1, 0).bit_length()
    return sorted(range(count), key=lambda number: f"{number:0{digits}b}"[::-1])


def effort(work: int, limits: tuple[int, int], num_forward: int) -> int:
    """Returns ``work`` per forward op, clipped to ``limits``, so that the search time grows at most linearly with the graph."""
    return min(max(work // max(num_forward, 1), limits[0]), limits[1])


class Strategies(enum.Flag):
    """Families of candidates of a search. The plan that saves everything is always a candidate."""

    CURVE = enum.auto()
    """Minimum cuts at all prices."""
    SEGMENTS = enum.auto()
    """Segmentations of the forward. Without this flag the forward is one segment."""
    FILL = enum.auto()
    """Greedy fill of free memory."""
    RECREATE = enum.auto()
    """Ruin and recreate, from the best filled candidate. With ``LOWER``, also of schedules near the least peak."""
    STORE = enum.auto()
    """Stays, if values have forms."""
    LOWER = enum.auto()
    """The search for the least peak, if nothing else fits."""


EVERY_STRATEGY = ~Strategies(0)


class PlansWithStays(Protocol):
    """Plans with stays, from those of a search (:class:`~autoremat.planner.search.joint_search.JointSearch`)."""

    found: list[Candidate]
    """Plans made for all budgets so far."""

    @property
    def smallest(self) -> Candidate | None:
        """The plan of the least peak found, if stays lower the peak."""

    def improve(self, budget: int, thorough: bool = True, suffices: Callable[[Plan], bool] = ...) -> None:
        """Finds plans within ``budget`` bytes, until one suffices."""


@dataclass
class Search:
    """Candidates of one graph. :meth:`cheapest` picks one for a budget."""

    graph: Graph
    limit: WorkLimit = field(default_factory=WorkLimit)
    strategies: Strategies = EVERY_STRATEGY
    given: tuple[Candidate, ...] = ()
    """Candidates from outside the search, such as a policy's schedule."""
    simulated: int = 0
    joint: PlansWithStays | None = field(default=None, init=False)
    """The joint search from the plans of this one, if values have forms."""
    lacks_candidates: bool = False
    """True if the limit passed before all candidates were simulated. A restart keeps those that were."""

    def __post_init__(self) -> None:
        self.explored = False
        self.filled: list[Candidate] = []  # kept, so that a later, larger budget never costs more than an earlier one
        self.lowered: list[Plan] = []  # likewise
        with self.limit.unit(PREPARATION * len(self.graph.ops)):
            self.mincut = MinCut(self.graph, self.limit)
            self.chain = Chain.of(self.graph)

    def restart(self) -> None:
        """Begins a new search. Candidates stay; plans that were filled for earlier budgets go."""
        self.limit.restart()
        self.forget()

    def forget(self) -> None:
        self.explored = False
        self.filled, self.lowered = [], []
        if self.joint is not None:
            self.joint.found = []

    @property
    def is_limited(self) -> bool:
        """True if more work might find better plans or bounds."""
        return self.limit.interrupted or self.lacks_candidates

    def own_half(self) -> AbstractContextManager[None]:
        """Keeps half of the work for the joint search, if there is one."""
        return nullcontext() if self.joint is None else self.limit.first_half()

    # -- single candidates ---------------------------------------------------------------------------------------------

    def plan(self, saved: frozenset[int], segmentation: Segmentation, label: str) -> Plan:
        """Returns the simulated plan of a saved set under a segmentation."""
        self.simulated += 1
        with self.limit.unit():
            schedule = build_schedule(self.graph, saved, segmentation.segments)
            self.limit.add(SIMULATION * len(schedule.sequence))
            return Plan.of(self.graph, schedule, f"{segmentation.label} {label}")

    @cached_property
    def whole(self) -> Segmentation:
        """One segment without cuts: every recomputed value is recomputed once and kept until its last reader."""
        return Segmentation(one_segment(self.graph), frozenset(), "1 segment,")

    def save_everything(self) -> Plan:
        """Returns the plan without recomputation. All values that the backward reads are saved."""
        return self.plan(self.graph.backward_needs, self.whole, SAVE_ALL)

    def save_what_constraints_allow(self) -> Plan:
        """Returns the plan that recomputes only what constraints demand."""
        if not any(op.constraint is Constraint.RECOMPUTE for op in self.graph.ops):
            return self.save_everything()
        return self.plan(self.mincut.solve(0.0), self.whole, "save what constraints allow")

    def least_traffic(self) -> Plan:
        """Returns the plan of the minimum cut of least time, in one segment. It recomputes only what saving would slow down."""
        return self.plan(self.mincut.cut(0.0, traffic=True).saved, self.whole, "least traffic")

    # -- families of candidates ------------------------------------------------------------------------------------------

    def segmentations(self) -> Iterator[Segmentation]:
        """Yields segmentations with every cut saved, every second cut, or every ``sqrt(n)``-th cut of ``n`` segments.

        Values on the other cuts are recomputed once and kept.
        """
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
        """Returns the minimum cuts at all prices per saved byte, with the memory traffic of saving; the most saved bytes come
        first.

        Between two known cuts, the search tries the price at which both cost the same. The minimum cut at that price is a new
        vertex of the curve, if there is one between them. The method is that of Eisner and Severance, "Mathematical Techniques
        for Efficient Record Segmentation in Large Shared Databases", J. ACM 1976.
        """
        ends = [self.mincut.cut(price, traffic=True) for price in (0.0, self.mincut.top_price)]
        found = {point.saved: point for point in ends}
        gaps = [(ends[0], ends[1])]
        while gaps and len(found) < settings.curve_points and not self.limit.has_passed(settings.candidates_share):
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
        """All candidates of the graph, independent of the budget.

        If the limit passes, those that come first in :func:`spread_early` are simulated: at least one minimum cut and the
        smallest saved set of one segmentation.
        """
        with self.own_half():
            curve = self.curve() if Strategies.CURVE in self.strategies else []
        with self.limit.unit(PREPARATION * self.graph.num_forward):
            segmentations = list(self.segmentations()) if Strategies.SEGMENTS in self.strategies else [self.whole]
        plain = [s for s in segmentations if not s.nested]
        wanted = effort(settings.segmentation_work, settings.segmentation_limits, self.graph.num_forward)
        chosen = [plain[choice] for choice in sorted(spread(len(plain), wanted))]
        cuts = [partial(self._of_cut, saved, number, s) for number, saved in enumerate(curve) for s in chosen]
        leanest = [partial(self._leanest, segmentation) for segmentation in segmentations]
        # The sequence of the list decides between equal candidates, so it does not depend on the limit.
        # One segment and very many have high peaks, so a division into some comes first.
        lean_turns = sorted(spread_early(len(leanest)), key=lambda number: number != len(leanest) // 2)
        first, second = spread_early(len(cuts)), [len(cuts) + number for number in lean_turns]
        turns = [turn for turn in chain(*zip_longest(first, second)) if turn is not None]
        works = [*cuts, *leanest]
        found: dict[int, Candidate] = {}
        with self.own_half():
            for place, turn in enumerate(turns):
                if place >= 2 and self.limit.has_passed(settings.candidates_share):
                    self.lacks_candidates = True
                    break
                found[turn] = works[turn]()
        return [*self.given, *(found[turn] for turn in sorted(found))]

    def _of_cut(self, saved: frozenset[int], number: int, segmentation: Segmentation) -> Candidate:
        return Candidate(self.plan(saved, segmentation, f"cut {number}"), segmentation)

    def _leanest(self, segmentation: Segmentation) -> Candidate:
        """Returns the candidate that saves the fewest bytes beside the saved cuts of ``segmentation``."""
        saved = self.mincut.solve(self.mincut.top_price, free=segmentation.saved_cuts)
        return Candidate(self.plan(saved, segmentation, "leanest"), segmentation)

    def bases(self, budget: int, saved_budget: float) -> list[Candidate]:
        """Returns fitting candidates that no other fitting candidate beats in both peak and cost.

        The cheapest candidate is the first. The others are spread evenly over the Pareto front.
        """
        fitting = (c for c in self.candidates if c.plan.peak_bytes <= budget and c.plan.saved_bytes <= saved_budget)
        front = pareto_front(fitting, lambda candidate: candidate.plan)
        wanted = effort(settings.fill_work, settings.fill_limits, self.graph.num_forward)
        return [front[i] for i in sorted(spread(len(front), wanted))]

    @cached_property
    def unfilled(self) -> list[Plan]:
        """Plans that do not depend on the budget: all candidates, and the plan that saves all that constraints allow."""
        return [self.save_what_constraints_allow(), *(c.plan for c in self.candidates)]

    @cached_property
    def smallest(self) -> Plan:
        """The plan of the least peak among those that do not depend on the budget, without the search for it."""
        joint = [] if self.joint is None or self.joint.smallest is None else [self.joint.smallest.plan]
        return min((*self.unfilled, *joint), key=lambda p: (p.peak_bytes, p.cost_seconds))

    @cached_property
    def peak_bound(self) -> int:
        """Lower bound on the peak of one call under any plan."""
        with self.limit.unit():
            return self.graph.derived(bound_on_peak)

    @cached_property
    def lowest(self) -> Plan:
        """The plan of the minimum peak found.

        It is the same for every budget, so a later search can reproduce it. The search for it takes no work from one for a
        budget.
        """
        if Strategies.LOWER not in self.strategies or self.graph.single_phase:
            return self.smallest
        by_peak = {plan.peak_bytes: plan for plan in reversed(self.unfilled) if not plan.schedule.stays}
        starts = [by_peak[peak] for peak in sorted(by_peak)[: SETTINGS.least_peak.starts]]
        with self.limit.beside(SETTINGS.least_peak.share) as limit:
            found = lowered(starts, self.peak_bound, limit)
        self.lacks_candidates = self.lacks_candidates or limit.interrupted
        return min(self.smallest, found, key=lambda p: (p.peak_bytes, p.cost_seconds))

    def lowered_to(self, budget: int) -> Plan | None:
        """Returns the plan of the minimum peak found without the recomputation that ``budget`` bytes do not demand, if it fits.

        It is for budgets that no other plan keeps to.
        """
        lowest = self.lowest
        if lowest.peak_bytes > budget:
            return None
        with self.limit.beside(SETTINGS.least_peak.share) as limit:
            self.lowered.append(lowest if lowest.schedule.stays else relaxed(lowest, budget, limit))
        return self.lowered[-1]

    @cached_property
    def least_cost(self) -> float:
        """Least cost of any plan in seconds, or 0 without minimum cuts. Greedy fill cannot beat it, because the first minimum
        cut of the curve costs the least of all plans."""
        return min(p.cost_seconds for p in self.unfilled) if Strategies.CURVE in self.strategies else 0.0

    @property
    def made_for_budgets(self) -> list[Candidate]:
        """All plans that were made for budgets so far."""
        return self.filled if self.joint is None else [*self.filled, *self.joint.found]

    def best(self, budget: int | None, accepts: Callable[[Plan], bool] = bool) -> Plan | None:
        """Returns the cheapest plan found so far within ``budget`` bytes (None: no bound) that ``accepts`` admits."""
        plans = (*self.unfilled, *(c.plan for c in self.made_for_budgets), *self.lowered)
        fitting = (p for p in plans if (budget is None or p.peak_bytes <= budget) and accepts(p))
        return min(fitting, key=lambda p: p.cost_seconds, default=None)

    def fill(self, budget: int, saved_budget: float = math.inf) -> None:
        """Fills candidates up to a peak of ``budget`` bytes with at most ``saved_budget`` saved bytes."""
        for base in self.bases(budget, saved_budget):
            with self.own_half():
                if self.limit.has_passed(settings.plans_share):
                    break
                rebuild = partial(self.plan, segmentation=base.segmentation, label="filled")
                filled = fill(base.plan, rebuild, budget, saved_budget, self.limit)
            self.filled.append(Candidate(filled, base.segmentation))

    def recreate(self, budget: int, suffices: Callable[[Plan], bool] = lambda plan: False) -> None:
        """Improves the cheapest filled candidates within ``budget`` bytes, of different segmentations, by ruin and recreate.

        A plan that ``suffices`` ends it. The joint search, if there is one, comes before it and needs no work any more.
        """
        bases: dict[Segmentation, Candidate] = {}
        for candidate in sorted(self.filled, key=lambda c: c.plan.cost_seconds):
            if candidate.plan.peak_bytes <= budget:
                bases.setdefault(candidate.segmentation, candidate)
        worth = self.least_cost + settings.recreation_gain * self.graph.step_seconds
        patience = effort(settings.recreation_work, settings.recreation_limits, self.graph.num_forward)

        def is_good(plan: Plan) -> bool:
            return plan.cost_seconds <= worth or suffices(plan)

        for segmentation, base in islice(bases.items(), settings.recreation_bases):
            rebuild = partial(self.plan, segmentation=segmentation, label="recreated")
            found = recreate(base.plan, rebuild, budget, patience, is_good, self.limit)
            self.filled.append(Candidate(found, segmentation))
            if suffices(found):
                break

    def cheapest(self, budget: int) -> Plan | None:
        """Returns the cheapest plan found within ``budget`` bytes, after greedy fill and ruin and recreate. None if no plan
        fits."""
        found = self.best(budget)
        if Strategies.FILL in self.strategies and found is not None and found.cost_seconds > self.least_cost:
            self.fill(budget)
        self.improve(budget)
        return self.best(budget)

    def improve(self, budget: int) -> None:
        """Improves the plans within ``budget`` bytes by stays, and by ruin and recreate unless stays have gained much."""
        before = self.best(budget)
        if self.joint is not None:
            self.joint.improve(budget)
        after = self.best(budget)
        if before is None or after is None or Strategies.RECREATE not in self.strategies:
            return
        over, left = before.cost_seconds - self.least_cost, after.cost_seconds - self.least_cost
        if left > (1 - SETTINGS.joint_search.large_gain) * over:
            self.recreate(budget)

    def _relieve_other_calls(self) -> None:
        """Finds plans with stays that free memory between the halves, from candidates that no other beats."""
        if self.joint is None:
            return
        for base in self.bases(2**62, math.inf):
            if self.limit.has_passed(settings.plans_share):
                break
            with self.limit.unit(len(SHARES) * PLACEMENT * len(base.plan.sequence)):
                self.joint.found += [Candidate(plan, base.segmentation) for plan in relieving(base.plan)]

    def spread_out(self) -> list[Plan]:
        """Returns plans of many peaks and many amounts of saved bytes, for a graph that shares its budget with others."""
        if not self.explored:
            self.explored = True
            whole, saved = self.save_what_constraints_allow(), [plan.saved_bytes for plan in self.unfilled]
            least, most, smallest = min(saved), max(saved), self.smallest.peak_bytes
            for step in range(1, settings.saved_levels + 1):
                self.fill(whole.peak_bytes, least + (most - least) * step // settings.saved_levels)
            for step in range(1, settings.peak_levels + 1):
                level = smallest + (whole.peak_bytes - smallest) * step // (settings.peak_levels + 1)
                self.fill(level)
                if self.joint is not None:
                    self.joint.improve(level, thorough=False)
            self._relieve_other_calls()
        return [*self.unfilled, *(c.plan for c in self.made_for_budgets)]
