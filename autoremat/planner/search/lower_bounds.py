"""Lower bounds on the peak and on the cost of any plan: seconds of recomputation, of stalls and of saving.

    cost of any plan  >=  max over t, price >= 0 of   cost of cut(t, price)  -  price * (budget - fixed bytes(t))

Take one *program point* ``t`` of the backward. Some bytes are live there under every plan. The rest of the budget must hold
values from which everything that the backward reads later can be recomputed. With a price per byte, the cheapest such choice is
a minimum cut, and a lower bound (Lagrangian duality). It is concave in the price, so secants find its maximum.

- A value that is live between the halves costs the memory traffic of saving it. Behind the border, it is either saved or
  already computed again, so it costs the lesser of that traffic and of its op.
- If ``k`` calls are open at once, the other ``k - 1`` hold at least the bytes of the smallest choice at the border. A limit on
  the saved bytes follows, and the minimum cut at the border under this limit is a bound of its own.
- A value with forms counts the bytes of its smallest form. No transfer takes time here, so bounds are loose with offload.
- A recomputed result that fusion does not materialise takes no bytes at ``t``, but what it is computed from does until its
  readers have run. That is as if its op ran behind ``t``, so the cut counts it so.

The bounds hold for every plan that runs the forward and the backward's own ops once, in the given sequence. That of a
single-phase graph is the best of its splits at ops with many live bytes, at the start of each backward: values computed behind
the split may be recomputed, too. The bound on the peak is in :mod:`.peak_bound`.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from autoremat.planner.cost.durations import ROUNDING
from autoremat.planner.graph.arrays import arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind
from autoremat.planner.plans.limits import UNLIMITED, Limits
from autoremat.planner.search.min_cut import Cut, MinCut
from autoremat.planner.search.peak_bound import CertainFusion, bound_on_peak
from autoremat.planner.search.starts import full_places, split_at
from autoremat.planner.search.work_limit import PREPARATION, WorkLimit
from autoremat.planner.settings import settings


@dataclass(frozen=True)
class LowerBound:
    """What no plan undercuts."""

    peak_bytes: int
    """The least peak of any plan."""
    seconds: float
    """The least cost of a plan within the limits; infinite if none fits."""


def lower_bound(graph: Graph, limits: Limits = UNLIMITED) -> LowerBound:
    """Returns what no plan of ``graph`` undercuts in its peak, and no plan within the peak of ``limits`` in its cost."""
    return LowerBounds(graph).within(limits)


class LowerBounds:
    """The lower bounds of a graph for any limits.

    They are weaker once ``limit`` has passed. ``mincut`` is the flow network of a graph of two phases, if it is there.
    """

    def __init__(self, graph: Graph, limit: WorkLimit | None = None, mincut: MinCut | None = None) -> None:
        self.graph, self.limit = graph, limit or WorkLimit()
        self.known: dict[int, float] = {}
        """The seconds by budget. They depend on the work that was left."""
        self.parts: list[_Points] = []
        if not graph.single_phase:
            with self.limit.unit():
                self.parts.append(_Points(graph, mincut or MinCut(graph, self.limit)))
            return
        for place in full_places(graph, settings.stretches * 2):
            if self.limit.has_passed():
                break
            with self.limit.unit(PREPARATION * len(graph.ops)):
                split = split_at(graph, place)
                self.parts.append(_Points(split, MinCut(split, self.limit), only_first=True))

    def within(self, limits: Limits = UNLIMITED) -> LowerBound:
        """Returns the bounds on the peak of any plan, and on the cost of plans within the peak of ``limits``."""
        if self.graph.single_phase:
            least = max([working_set_bytes(self.graph), *(part.point_bytes() for part in self.parts)])
        else:
            least = self.parts[0].peak_bytes()
        budget = limits.peak_bytes
        if budget is None:
            return LowerBound(least, 0.0)
        if budget not in self.known:
            fits = budget >= least
            self.known[budget] = max((part.seconds(budget) for part in self.parts), default=0.0) if fits else math.inf
        return LowerBound(least, self.known[budget])


class _Points:
    """Lower bounds of one graph by its program points: the start of the backward alone with ``only_first``."""

    def __init__(self, graph: Graph, mincut: MinCut, only_first: bool = False) -> None:
        self.graph, self.mincut = graph, copy.copy(mincut)
        self.mincut.bytes = np.array([graph.values[value].least_bytes for value in mincut.values], dtype=np.float64)
        self.behind = copy.copy(self.mincut)
        """The cuts behind the border: what is held there was saved, or computed again before."""
        makers = [len(graph.ops[producer].outputs) for producer in mincut.producers]
        self.behind.traffic = np.minimum(mincut.traffic, mincut.costs[mincut.producers] / makers)
        self.limit = mincut.limit
        self._least: dict[int, float] = {}  # by program point; they do not depend on the budget
        self.fixed = fixed_bytes(graph)
        self.others = graph.calls.others
        self.output_bytes = sum(graph.values[v].bytes for v in set(graph.forward_outputs).intersection(graph.forward_values))
        backward = np.arange(graph.num_forward, len(graph.ops))
        stretches = [stretch for stretch in np.array_split(backward, settings.stretches) if len(stretch) and not only_first]
        self.chosen = sorted({*backward[:1].tolist(), *(int(stretch[np.argmax(self.fixed[stretch])]) for stretch in stretches)})
        """The program points."""
        self.read_later: dict[int, frozenset[int]] = {}
        later = set(graph.backward_needs.intersection(graph.backward_outputs))
        for index in range(len(graph.ops) - 1, graph.num_forward - 1, -1):
            later.update(graph.backward_needs.intersection(graph.ops[index].inputs))
            if index in self.chosen:
                self.read_later[index] = frozenset(later)

    @cached_property
    def least_saved(self) -> float:
        """Lower bound on the bytes of the values that a call saves."""
        return self._least_bytes_of(self._border_cut)

    def _there(self, moment: int) -> frozenset[int]:
        """Returns the forward values that are live at the program point under every plan, because its op reads them."""
        op = self.graph.ops[moment]
        if self.graph.machine.fuses and op.kind is not Kind.EXTERN:
            return frozenset()
        return self.graph.backward_needs.intersection(op.inputs)

    @property
    def _beside_bytes(self) -> float:
        """Lower bound on the bytes that do not belong to the running call."""
        saved = self.least_saved if self.others else 0.0
        return self.graph.calls.resident_bytes + self.others * (self.output_bytes + saved)

    def _room(self, moment: int, budget: int) -> float:
        """Returns the bytes of ``budget`` that are left at the program point for values that are free to choose."""
        there = self._there(moment) - set(self.graph.forward_outputs)
        return float(budget - self._beside_bytes - self.fixed[moment] - sum(self.graph.values[v].bytes for v in there))

    def _border_cut(self, price: float, traffic: bool = True) -> Cut:
        return self.mincut.cut(price, needs=self.graph.backward_needs, traffic=traffic)

    def _cut(self, moment: int, price: float, traffic: bool = True) -> Cut:
        """Returns the minimum cut for all values that the backward reads from the program point on."""
        return self.behind.cut(price, free=self._there(moment), needs=self.read_later[moment], traffic=traffic)

    def seconds(self, budget: int) -> float:
        """Returns a lower bound on the cost in seconds of plans within ``budget`` bytes; infinite if none fits."""
        seconds, rooms = [0.0], list[float]()  # rooms are upper bounds on the saved bytes of one call, without the outputs
        for moment in self.chosen:
            if not self.limit.has_passed():
                least, room = self._least_bytes(moment), self._room(moment, budget)
                seconds.append(self._seconds_within(partial(self._cut, moment), least, room))
        if self.others and not self.limit.has_passed():
            at_border = budget - self.graph.calls.resident_bytes - self.graph.tangent_bytes
            rooms.append(at_border / (self.others + 1) - self.output_bytes)
            for moment in self.chosen:
                more = self._room(moment, budget) - self._least_bytes(moment)
                rooms.append(self.least_saved + more / self.others)
        if self.mincut.traffic.any() and self.chosen:
            rooms.append(budget - self._beside_bytes - self.output_bytes - self.graph.tangent_bytes)
        if rooms and not self.limit.has_passed():
            seconds.append(self._seconds_within(self._border_cut, self.least_saved, min(rooms)))
        return max(seconds)

    def _seconds_within(self, cut: Callable[[float], Cut], least_bytes: float, room: float) -> float:
        """Returns a lower bound on the seconds of any cut of at most ``room`` bytes; infinite if there is none."""
        if least_bytes > room:
            return math.inf
        rich = cut(0.0)
        if rich.bytes <= room:
            return max(rich.bound, 0.0)
        lean = cut(self.mincut.top_price)
        best = max(0.0, rich.bound, lean.bound - self.mincut.top_price * room)
        for _ in range(32):
            if rich.bytes <= lean.bytes or lean.seconds <= rich.seconds or self.limit.has_passed():
                break
            price = (lean.seconds - rich.seconds) / (rich.bytes - lean.bytes)
            crossing = rich.seconds + price * (rich.bytes - room)
            middle = cut(price)
            best = max(best, middle.bound - price * room)
            if middle.seconds + price * (middle.bytes - room) >= crossing - 1e-6 * abs(crossing):
                break
            rich, lean = (middle, lean) if middle.bytes > room else (rich, middle)
        return best

    def peak_bytes(self) -> int:
        border = int(self.output_bytes + self.least_saved) + self.graph.tangent_bytes if self.others else 0
        with self.limit.unit():
            running = max(working_set_bytes(self.graph), self.graph.derived(bound_on_peak))
        return int(self._beside_bytes) + max(running, border)

    def point_bytes(self) -> int:
        """Returns a lower bound on the bytes that are live at the program points: their maximum over all points."""
        known = [m for m in self.chosen if m in self._least or not self.limit.has_passed()]
        return int(max((self._least_bytes(m) - self._room(m, 0) for m in known), default=0.0))

    def _least_bytes(self, moment: int) -> float:
        """Returns a lower bound on the bytes of any cut at a program point, as a whole number. Recomputation is not limited."""
        if moment not in self._least:
            self._least[moment] = self._least_bytes_of(partial(self._cut, moment))
        return self._least[moment]

    def _least_bytes_of(self, cut: Callable[[float, bool], Cut]) -> float:
        """Returns a lower bound on the bytes on the device of any cut."""
        price, costs = self.mincut.top_price, float(self.mincut.costs.sum())  # recomputing all costs no more
        least = (cut(price, False).bound - costs) / price
        return float(math.ceil(least - ROUNDING * max(1.0, abs(least))))


def fixed_bytes(graph: Graph) -> NDArray[np.int64]:
    """Returns, for each op, the bytes that are live while it runs under every plan.

    They are those of materialised values that backward ops computed and still need, of what the caller holds, and workspaces.
    """
    change = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    outputs, gradients = set(graph.forward_outputs).intersection(graph.forward_values), set(graph.backward_outputs)
    fusion = CertainFusion(graph)
    change[graph.num_forward] = graph.tangent_bytes
    for number, start in enumerate(graph.makers):
        is_held = number in outputs or (start >= graph.num_forward and number in gradients)
        if is_held or (start >= graph.num_forward and fusion.materialised[number]):
            last = len(graph.ops) - 1 if is_held else max(graph.readers[number], default=start)
            # While its op runs, the value may reuse the buffer that the op overwrites.
            change[start + (graph.machine.fuses and fusion.may_overwrite(start))] += graph.values[number].bytes
            change[last + 1] -= graph.values[number].bytes
    return np.cumsum(change)[: len(graph.ops)] + arrays_of(graph).workspace_bytes


def working_set_bytes(graph: Graph) -> int:
    """Returns the most bytes of the computed inputs, the outputs and the workspace of any extern op."""
    runs = graph.ancestors([*graph.required_forward, *graph.producers(graph.backward_needs)])
    extern = (i for i, op in enumerate(graph.ops) if op.kind is Kind.EXTERN and (i in runs or not op.forward))
    sets = (({*graph.computed_inputs[index], *graph.made[index]}, graph.ops[index].workspace_bytes) for index in extern)
    return max((sum(graph.values[value].bytes for value in live) + workspace for live, workspace in sets), default=0)
