"""Peak-aware search: many candidate plans, each simulated, the cheapest that fits.

A candidate is a segmentation (how many segments, and which of their cuts are saved in the forward) and a price per saved
byte. A minimum cut turns the price into a saved set; just-in-time recomputation by segments turns that into a schedule; the
simulator says what it needs. Within a segmentation a higher price means fewer saved bytes, so the smallest price that fits
is found by bisection; between it and the next lower price, the later segments take the lower one, because their memory is
free again when the earlier segments run backward.

The search is deterministic: it counts candidates. Only the time limit can cut it short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from autoremat.graph import Graph, Kind, Order, Role
from autoremat.plans import Plan
from autoremat.schedule import Segments, build_schedule, one_segment
from autoremat.solvers.mincut import MinCut
from autoremat.solvers.segments import Chain, segment_counts

PRICE_STEPS = 24
"""Prices form a geometric ladder of this many steps ..."""
PRICE_RANGE = 1e6
"""... from the traffic price up to this many times it: beyond, nothing is saved that can be recomputed."""

BLEND_STEPS = 4
SAVE_ALL = "save all"

REFINED_CANDIDATES = 3
"""How many segmentations are searched at all prices: those whose lowest-memory plan costs least."""


@dataclass(frozen=True)
class Segmentation:
    """Segments and the values on those cuts that the forward saves (the other cuts are recomputed, then kept)."""

    segments: Segments
    saved_cuts: frozenset[int]
    label: str


@dataclass
class Search:
    """The candidates of one graph; :meth:`cheapest` picks for a budget."""

    graph: Graph
    deadline: float = math.inf
    mincut: MinCut = field(init=False)
    chain: Chain = field(init=False)
    simulated: int = 0
    found: list[Plan] = field(default_factory=list, init=False)
    """Every plan simulated so far that orders allow: a later, larger budget never does worse than an earlier, smaller one."""
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.mincut = MinCut(self.graph)
        self.chain = Chain.of(self.graph)
        self.cuts: dict[tuple[frozenset[int], int], frozenset[int]] = {}

    # -- single candidates ---------------------------------------------------------------------------------------------

    def price(self, step: int) -> float:
        """Seconds per saved byte at ``step`` of the ladder; at its top, one byte is dearer than the whole forward."""
        if step == PRICE_STEPS:
            return 1.0 + self.graph.forward_seconds
        return float(self.graph.saving_seconds_per_byte * PRICE_RANGE ** (step / PRICE_STEPS))

    def saved_set(self, segmentation: Segmentation, step: int) -> frozenset[int]:
        """The minimum cut at a price, with the segmentation's saved cuts for nothing."""
        key = (segmentation.saved_cuts, step)
        if key not in self.cuts:
            self.cuts[key] = self.mincut.solve(self.price(step), free=segmentation.saved_cuts)
        return self.cuts[key]

    def plan(self, saved: frozenset[int], segmentation: Segmentation, label: str) -> Plan:
        """Schedule and simulate."""
        self.simulated += 1
        self.interrupted = self.interrupted or time.monotonic() > self.deadline
        schedule = build_schedule(self.graph, saved, segmentation.segments)
        plan = Plan.of(self.graph, schedule, f"{segmentation.label} {label}")
        if label != SAVE_ALL:
            self.found.append(plan)
        return plan

    def at_price(self, segmentation: Segmentation, step: int) -> Plan:
        """The candidate of a segmentation at a price."""
        return self.plan(self.saved_set(segmentation, step), segmentation, f"price {step}")

    def whole(self) -> Segmentation:
        """No cuts: every recomputed value is recomputed once and kept until its last reader."""
        return Segmentation(one_segment(self.graph), frozenset(), "1 segment")

    def save_everything(self) -> Plan:
        """No recomputation: all that the backward reads is saved."""
        return self.plan(self.graph.backward_needs, self.whole(), SAVE_ALL)

    def save_what_orders_allow(self) -> Plan:
        """No recomputation but what checkpoint regions and policies in the graph order."""
        if not any(op.order is Order.RECOMPUTE for op in self.graph.ops):
            return self.save_everything()
        return self.plan(self.mincut.solve(0.0), self.whole(), "save what orders allow")

    # -- families of candidates ----------------------------------------------------------------------------------------

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
                    yield Segmentation(segments, saved, f"{segments.count} segments, every {stride}. cut saved,")

    def lowest(self) -> list[tuple[Plan, Segmentation]]:
        """The plan of least memory of each segmentation, by cost."""
        found = []
        for segmentation in self.segmentations():
            found.append((self.at_price(segmentation, PRICE_STEPS), segmentation))
            if self.interrupted:
                break
        return sorted(found, key=lambda pair: (pair[0].cost_seconds, pair[0].peak_bytes))

    def cheapest_in(self, segmentation: Segmentation, budget: int, top: Plan) -> Plan:
        """The cheapest plan of one segmentation that fits; ``top``, its plan at the highest price, does."""
        best, low, high = top, -1, PRICE_STEPS
        while high - low > 1 and not self.interrupted:
            middle = (low + high) // 2
            plan = self.at_price(segmentation, middle)
            if plan.peak_bytes <= budget:
                high = middle
                best = min(best, plan, key=lambda p: p.cost_seconds)
            else:
                low = middle
        if low >= 0:
            best = min(best, self.blend(segmentation, low, high, budget, best), key=lambda p: p.cost_seconds)
        return best

    def blend(self, segmentation: Segmentation, low: int, high: int, budget: int, fallback: Plan) -> Plan:
        """The lower price for as many of the latest segments as fit, the higher one for the rest."""
        richer, poorer = self.saved_set(segmentation, low), self.saved_set(segmentation, high)
        # Blending by position in the forward works with and without segments.
        extra = sorted(richer - poorer, key=lambda v: -(self.graph.values[v].producer or 0))
        best, fits, fails = fallback, 0, len(extra)
        for _ in range(BLEND_STEPS):
            if fails - fits <= 1 or self.interrupted:
                break
            middle = (fits + fails) // 2
            plan = self.plan(poorer | frozenset(extra[:middle]), segmentation, f"price {high}, {middle} more saved")
            if plan.peak_bytes <= budget:
                fits = middle
                best = min(best, plan, key=lambda p: p.cost_seconds)
            else:
                fails = middle
        return best

    def cheapest(self, budget: int | None) -> tuple[Plan | None, Plan]:
        """The cheapest plan found within ``budget`` bytes (None if none fits) and the plan of least memory found."""
        fastest = self.at_price(self.whole(), 0)
        lowest = self.lowest()
        allowed = self.save_what_orders_allow()
        candidates = [allowed, *self.found]
        # The same for every budget, so that what was compiled once as the smallest plan can be had again.
        smallest = min([allowed, fastest, *(plan for plan, _ in lowest)], key=lambda p: (p.peak_bytes, p.cost_seconds))
        fitting = [plan for plan in candidates if budget is None or plan.peak_bytes <= budget]
        best = min(fitting, key=lambda p: p.cost_seconds, default=None)
        if budget is not None and best is not fastest:
            for top, segmentation in [pair for pair in lowest if pair[0].peak_bytes <= budget][:REFINED_CANDIDATES]:
                plan = self.cheapest_in(segmentation, budget, top)
                best = plan if best is None else min(best, plan, key=lambda p: p.cost_seconds)
        return best, smallest


def lower_bound_bytes(graph: Graph) -> int:
    """A proven bound on the peak of every plan: each extern op needs its inputs and outputs at once.

    In the backward, what the caller holds (forward outputs, tangents, gradients made so far) is alive besides.
    """
    values = graph.values
    bound = 0
    resident = set(graph.forward_outputs) | {v for v, value in enumerate(values) if value.role is Role.TANGENT}
    gradients = set(graph.backward_outputs)
    runs = graph.ancestors([*graph.required_forward, *graph.producers(graph.backward_needs)])
    for index, op in enumerate(graph.ops):
        if op.kind is Kind.EXTERN and (index in runs or not op.forward):
            alive = {v for v in (*op.inputs, *op.outputs) if values[v].role is not Role.INPUT}
            if not op.forward:
                alive |= resident
            bound = max(bound, sum(values[v].bytes for v in alive) + op.workspace_bytes)
        if not op.forward:
            resident |= gradients.intersection(op.outputs)
    return max(bound, sum(values[v].bytes for v in resident))
