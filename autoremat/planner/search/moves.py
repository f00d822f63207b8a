"""The moves of the local search on one value of a schedule: drop it in a gap between two uses, keep it there, materialise it.

*Drop* frees the memory of a range in the gap around an execution. The value is computed again before its next use, or where
that divides a fusion group, with all that this needs and that is not live there. Some of what it needs may live longer instead.

*Keep* leaves a recomputation out, so that the range before it lives on.

*Materialise* makes a buffer of a result of the backward that fusion inlines, such as a sum of gradients. What it is computed
from is free behind it. *Keep* takes that back, too.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise

import numpy as np

from autoremat.planner.graph.arrays import Numbers
from autoremat.planner.graph.op import Kind
from autoremat.planner.memory.fusion import fusion_in
from autoremat.planner.search.live_view import LiveView, Span
from autoremat.planner.settings import settings

KEPT_SHARES = (0.0, 0.3, 1.0)
"""Bytes up to which an input of a recomputation lives longer instead, as shares of the dropped value's."""


@dataclass(frozen=True)
class Drop:
    """A range that is not live in a gap."""

    number: int
    before: int
    """The last use before the gap."""
    place: int
    """The first use behind the gap, before which ``ops`` run."""
    ops: tuple[int, ...]
    extended: tuple[int, ...]
    """The ranges that live longer for ``ops``."""
    seconds: float

    def key(self, view: LiveView) -> Hashable:
        """Returns what tells the drop from others of the same plan."""
        return view.value[self.number], self.place, self.ops

    def gap(self, view: LiveView) -> list[Span]:
        size, border = view.size[self.number], view.border
        crosses = view.start[self.number] < border <= self.place and self.before < border
        return [(self.before + 1, self.place, -size), *view.between_halves(-size * crosses)]

    def spans(self, view: LiveView) -> list[Span]:
        found, crossing = self.gap(view), 0
        for number in self.extended:
            last = view.last_use(number)
            found.append((last + 1, self.place + 1, view.size[number]))
            if view.start[number] < view.border and last < view.border:
                crossing += view.size[number]
        return found + view.between_halves(crossing)


@dataclass(frozen=True)
class Materialise:
    """An inlined result that becomes a buffer."""

    number: int
    uses: dict[int, list[int]]
    """The uses that are left of the ranges that it is computed from."""
    seconds: float
    extended: tuple[int, ...] = ()

    def key(self, view: LiveView) -> Hashable:
        return view.value[self.number]

    def gap(self, view: LiveView) -> list[Span]:
        found = [(view.start[self.number], view.last_use(self.number) + 1, view.size[self.number])]
        for number, uses in self.uses.items():
            if not view.absent[number] and not view.held[number]:
                left = uses[-1] if uses else view.start[number]
                found.append((left + 1, view.last_use(number) + 1, -view.size[number]))
        return merged(found)

    spans = gap


Move = Drop | Materialise


class Moves:
    """The moves that free memory in a view. They change it as they are applied."""

    def __init__(self, view: LiveView) -> None:
        self.view, self.graph, self.facts = view, view.graph, view.facts
        self.steps = 0
        """Number of reads that recomputations were followed through, for the count of work."""
        self._known: dict[int, dict[int, list[Move]]] = {}
        self._buffers: dict[int, Materialise] = {}

    def at(self, execution: int, excess: int) -> Iterator[list[Move]]:
        """Yields the moves of each range at an execution. Other open calls hold what crosses into the backward all the time."""
        for place in (execution, self.view.border - 1) if self.graph.calls.others else (execution,):
            yield from filter(None, (self.around(number, place, excess) for number in self.view.inlined_at(place)))
            idle = (self.around(number, place, excess) for number in self.view.idle_at(place))
            yield from islice(filter(None, idle), settings.options)

    def around(self, number: int, execution: int, excess: int = 0) -> list[Move]:
        """Returns the ways to free a range, or what an inlined one is computed from, around an execution.

        A buffer must free a good part of the ``excess`` there. Later moves make many small ones useless.
        """
        if self.view.absent[number]:
            if number not in self._buffers:
                self._buffers[number] = self.materialise(number)
            buffer = self._buffers[number]
            freed = -sum(more for begin, end, more in buffer.gap(self.view) if begin <= execution < end)
            return [buffer] if freed * settings.options >= excess else []
        view, uses = self.view, self.view.uses[number]
        following = bisect_right(uses, execution)
        if following == len(uses) or uses[following] < view.border:
            return []
        place, before = uses[following], uses[following - 1] if following else view.start[number]
        if before >= execution and not self.graph.machine.fuses:
            return []
        known = self._known.setdefault(number, {})
        if place not in known:
            known[place] = list(self._found(number, execution, before, place))
        return known[place]

    def materialise(self, number: int) -> Materialise:
        """Returns the move that makes a buffer of an inlined result."""
        view, found = self.view, dict[int, list[int]]()
        for source in sorted(sources_of(view, number), reverse=True):
            left = set(view.readers[source])
            for one in (one for reader in view.readers[source] for one in view.made_by(reader) if view.absent[one]):
                left.update(() if one == number else found.get(one, view.uses[one]))
            found[source] = [use for use in view.uses[source] if use in left or use not in view.uses[number]]
        return Materialise(number, found, self.facts.materialise_seconds[view.value[number]])

    def dividing(self, execution: int) -> Iterator[Drop]:
        """Yields drops that run an extern kernel between an execution and a reduction of its result, which fusion would join.

        The result may take over an operand's buffer then. The drop counts as if its range were not live at the execution.
        """
        view, ops, group = self.view, self.graph.ops, fusion_in(self.graph, self.view.plan.schedule).group
        readers = [reader for made in view.made_by(execution) if not view.absent[made] for reader in view.readers[made]]
        beside = [ops[view.sequence[reader]].kind for reader in readers if group[reader] == group[execution]]
        for number in view.idle_at(execution) if execution >= view.border and Kind.REDUCTION in beside else ():
            if execution in view.uses[number]:
                found = self._found(number, execution, execution - 1, execution + 1)
                yield from (drop for drop in found if any(ops[op].kind is Kind.EXTERN for op in drop.ops))

    def _found(self, number: int, execution: int, before: int, place: int) -> Iterator[Drop]:
        view, facts = self.view, self.facts
        through = self._through(number, execution)
        values, seen = [view.value[one] for one in (number, *through)], set[tuple[int, ...]]()
        for share in KEPT_SHARES if all(facts.may_run_again[value] for value in values) else ():
            ops, extended = self._recomputation(values, number, place, share * view.size[number])
            if ops not in seen:
                seen.add(ops)
                seconds = math.fsum(facts.seconds_again[op] for op in ops)
                if before < view.border <= place:
                    seconds -= facts.saving_seconds[view.value[number]]
                for one in extended:
                    if max(view.start[one], view.last[one]) < view.border and not view.held[one]:
                        seconds += facts.saving_seconds[view.value[one]]
                yield Drop(number, before, place, ops, extended, seconds)

    def _through(self, number: int, execution: int) -> list[int]:
        """Returns the results that are not materialised, through which the range is used behind an execution."""
        view, found = self.view, list[int]()
        for source in chain([number], found):  # which grows meanwhile
            for reader in view.readers[source]:
                inlined = view.made_by(reader) if reader <= execution else ()
                found += [n for n in inlined if view.absent[n] and view.last_use(n) > execution and n not in found]
        return found

    def _recomputation(
        self, values: list[int], dropped: int, place: int, kept_bytes: float
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ops that compute ``values`` again before execution ``place``, and the ranges that live until then.

        Ranges of at most ``kept_bytes`` live longer. The range ``dropped`` does not.
        """
        view, facts, makers = self.view, self.facts, self.graph.makers
        there = view.inserted.get(place, ())
        stack = [makers[value] for value in values]
        ops, extended = set(stack), dict[int, None]()
        while stack:
            reads = self.graph.forward_reads[stack.pop()]
            self.steps += len(reads)
            for value in reads:
                maker = makers[value]
                if maker in ops or maker in there:
                    continue
                newest = view.newest(value, place)
                lives = newest >= 0 and (view.held[newest] or (newest != dropped and view.last_use(newest) >= place))
                if facts.may_run_again[value] and (
                    newest < 0
                    or newest == dropped
                    or view.absent[newest]
                    or (not lives and view.size[newest] > kept_bytes)
                    or (not lives and view.start[newest] < view.border and value in facts.never_saved)
                ):
                    ops.add(maker)
                    stack.append(maker)
                elif newest >= 0 and not lives:
                    extended[newest] = None
        return tuple(sorted(ops)), tuple(extended)

    def apply(self, move: Move) -> None:
        """Changes the view by a move."""
        self.view.add(move.spans(self.view))
        if isinstance(move, Drop):
            self._drop(move)
        else:
            self.view.uses[:] = [move.uses.get(number, uses) for number, uses in enumerate(self.view.uses)]
            self.view.absent[move.number] = False
            self.view.materialised.add(self.view.value[move.number])
            self._known.clear()
            self._buffers.clear()

    def _drop(self, drop: Drop) -> None:
        view, place, ops = self.view, drop.place, set(drop.ops)
        view.inserted.setdefault(place, set()).update(ops)
        view.divide(drop.number, place)
        self._known.pop(drop.number, None)
        for op in drop.ops:
            for value in self.graph.forward_reads[op]:
                newest = view.newest(value, place)
                if self.graph.makers[value] not in ops and newest >= 0:
                    view.uses[newest] = sorted({*view.uses[newest], place})
                    self._known.pop(newest, None)


def sources_of(view: LiveView, number: int) -> set[int]:
    """Returns the ranges that a result is computed from, also through inlined results, and these."""
    found, stack = set[int](), [number]
    while stack:
        fresh = set(view.reads[view.start[stack.pop()]]) - found
        found |= fresh
        stack += (source for source in fresh if view.absent[source])
    return found


def merged(spans: list[Span]) -> list[Span]:
    """Returns the spans of the sums of bytes, without overlaps."""
    change = Counter[int]()
    for begin, end, more in spans:
        change[begin] += more
        change[end] -= more
    sums = accumulate(change[place] for place in sorted(change))
    return [(begin, end, more) for (begin, end), more in zip(pairwise(sorted(change)), sums, strict=False) if more]


def relief(over: Numbers, spans: list[Span]) -> float:
    """Returns the bytes of excess that ``spans`` take away from those ``over`` a target."""
    gained = 0.0
    for begin, end, more in spans:
        if begin < end:
            part = over[begin:end]
            if more < 0:
                gained += float(np.minimum(np.maximum(part, 0), -more).sum())
            else:
                gained -= float(np.minimum(np.maximum(part + more, 0), more).sum())
    return gained


@dataclass(frozen=True)
class Keep:
    """A recomputation that is left out."""

    execution: int
    spans: list[Span]
    seconds_per_byte: float
    """The seconds gained per byte that lives longer."""


def keeps_of(view: LiveView) -> list[Keep]:
    """Returns the recomputations of a view without moves that could be left out, the most seconds per byte first."""
    repetitions, saved = view.plan.schedule.repetitions(view.graph), set(view.plan.saved)
    again = set(repetitions)
    found = [*filter(None, (_keep(view, execution, again, saved) for execution in repetitions))]
    found += (_inline(view, *view.of_value[value][0]) for value in view.materialised)
    return sorted(found, key=lambda keep: (-keep.seconds_per_byte, keep.execution))


def _inline(view: LiveView, execution: int, number: int) -> Keep:
    """Returns the move that inlines a materialised result again: what it is computed from lives until its last use."""
    last = view.last_use(number)
    spans = [(execution, last + 1, -view.size[number])]
    for source in sources_of(view, number):
        if not view.absent[source] and not view.held[source] and view.last_use(source) < last:
            spans.append((view.last_use(source) + 1, last + 1, view.size[source]))
    seconds = view.facts.materialise_seconds[view.value[number]]
    return Keep(execution, spans, seconds / max(sum(more for _, _, more in spans[1:]), 1))


def _keep(view: LiveView, execution: int, again: set[int], saved: set[int]) -> Keep | None:
    facts, spans, seconds, crossing = view.facts, list[Span](), 0.0, 0
    for number in view.made_by(execution):
        if not view.readers[number]:
            continue
        value, ranges = view.value[number], view.of_value[view.value[number]]
        before = ranges[ranges.index((execution, number)) - 1][1]
        if not view.held[before]:
            begin = view.start[before] if view.absent[before] else view.last_use(before) + 1
            end = view.last[number] + 1 if view.absent[number] else execution
            spans.append((begin, end, view.size[number]))
        if view.start[before] < view.border and value not in saved:
            if value in facts.never_saved:
                return None
            seconds -= facts.saving_seconds[value]
            crossing += view.size[number]
    gone, stack = {execution}, [execution]
    while stack:
        current = stack.pop()
        seconds += facts.seconds_again[view.sequence[current]]
        for source in view.reads[current]:
            maker = view.start[source]
            if maker in again and maker not in gone and all(r in gone for n in view.made_by(maker) for r in view.readers[n]):
                gone.add(maker)
                stack.append(maker)
    spans += view.between_halves(crossing)
    return Keep(execution, spans, seconds / max(sum(more for _, _, more in spans), 1)) if seconds > 0.0 else None
