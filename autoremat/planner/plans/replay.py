"""Replays a plan by arithmetic of its own, to check the simulator.

Nothing here is shared with :mod:`autoremat.planner.memory`. Each execution makes a *buffer* for each output of its op. A read
finds the newest buffer of its value. A buffer is live until its last read, or to the end if the caller holds it.

If the code generator fuses, some buffers are *absent*, because their readers compute them. The rules stand at the head of
:mod:`autoremat.planner.memory.fusion`. Here one pass in sequence and one in reverse apply them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind, Role
from autoremat.planner.graph.schedule import Schedule, Stay


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    ``bytes_at`` are the bytes live at each execution, with those of the other open calls. ``live_ranges`` are tuples: a value,
    the execution that makes it, the first and the last execution during which it is live, and its bytes. A load makes its value
    as well. The bytes of a form or of a transfer are made at -1. ``crossing`` are the values that the forward leaves for the
    backward. ``host_bytes`` are those of the forms of all open calls.
    """

    bytes_at: Sequence[int]
    live_ranges: Sequence[tuple[int, int, int, int, int]]
    crossing: frozenset[int]
    host_bytes: int


def replay(graph: Graph, schedule: Schedule) -> Replay:
    """Returns the replay of a schedule whose executions and stays :mod:`autoremat.planner.plans.check` accepts.

    Inputs cost nothing. Tangents count through the backward, and a workspace counts while its op runs. Every other open call
    holds what this one holds between its halves: of a value with a stay, the bytes of its form, and its own until it is freed.
    """
    buffers = _Buffers(graph, schedule)
    end, border = len(schedule.sequence) - 1, len(schedule.forward)
    if graph.fuses:
        fusion = _Fusion(graph, buffers)
        exist = [number for number, absent in enumerate(fusion.absent) if not absent]
        first, last = fusion.first_and_last()
    else:
        exist = list(range(len(buffers.value)))
        first, last = buffers.made, list(map(max, buffers.least_end, buffers.last_read))
    ends = [end if held else last[b] for b, held in enumerate(buffers.held)]
    made = [*buffers.made[: buffers.num_values], *[-1] * (len(ends) - buffers.num_values)]
    live_ranges = [(buffers.value[b], made[b], first[b], ends[b], buffers.bytes[b]) for b in exist]
    crossing = frozenset(buffers.value[b] for b in buffers.crossing)
    kept = crossing.union(buffers.value[b] for b in range(buffers.begins[border]) if buffers.held[b])
    changes = [0] * (end + 2)
    for _, _, start, stop, size in live_ranges:
        changes[start] += size
        changes[stop + 1] -= size
    between = sum(graph.values[value].bytes for value in kept)
    for stay in schedule.stays:
        form = buffers.forms[stay.value]
        between += form.device_bytes
        between += form.store.temporary_bytes if stay.free >= border else -graph.values[stay.value].bytes
    changes[0] += graph.resident_bytes + (graph.in_flight - 1) * between
    changes[border] += sum(value.bytes for value in graph.values if value.role is Role.TANGENT)
    live = zip(schedule.sequence, accumulate(changes), strict=False)
    bytes_at = [bytes_ + graph.ops[index].workspace_bytes for index, bytes_ in live]
    return Replay(bytes_at, live_ranges, crossing, sum(form.host_bytes for form in buffers.forms.values()) * graph.in_flight)


class _Buffers:
    """All buffers, numbered in the sequence of their making, and all reads. Executions are positions in the sequence.

    Behind those that executions make come those of stays: first the loaded values, then the bytes of forms and of transfers.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.border, self.sequence = len(schedule.forward), schedule.sequence
        self.ops = [graph.ops[index] for index in self.sequence]
        self.value: list[int] = []
        self.made: list[int] = []
        """For each buffer, the execution that makes it."""
        self.last_read: list[int] = []
        """For each buffer, the last execution that reads it, or -1."""
        self.reads: list[list[int]] = []
        """For each execution, the buffers that it reads, in the sequence of its op's inputs."""
        self.begins: list[int] = []
        """For each execution, the first buffer that it makes; one entry more for the end."""
        newest: dict[int, int] = {}
        returned: list[int] = []
        value, made, last_read, computed_inputs = self.value, self.made, self.last_read, graph.computed_inputs
        for position, (index, op) in enumerate(zip(self.sequence, self.ops, strict=True)):
            if position == self.border:
                returned = [newest[output] for output in graph.forward_outputs if output in newest]
            read = [newest[one] for one in computed_inputs[index]]
            for buffer in read:
                last_read[buffer] = position
            self.reads.append(read)
            self.begins.append(len(value))
            for output in op.outputs:
                newest[output] = len(value)
                value.append(output)
                made.append(position)
                last_read.append(-1)
        self.begins.append(len(value))
        self.bytes = [graph.values[number].bytes for number in value]
        if self.border == len(self.ops):
            returned = [newest[output] for output in graph.forward_outputs if output in newest]
        gradients = {newest[output] for output in graph.backward_outputs if output in newest}
        self.held = self.marked([*returned, *gradients])
        """For each buffer, True if the caller holds it to the end."""
        self.crossing = [b for b in range(self.begins[self.border]) if last_read[b] >= self.border or b in gradients]
        """The buffers that the forward makes and the backward reads or returns."""
        self.least_end = list(made)
        """For each buffer, the execution until which it is live even if none reads it."""
        self.forms = {stay.value: graph.values[stay.value].form(stay.form) for stay in schedule.stays}
        self.in_transfers: set[int] = set()
        """The buffers that transfers read or write."""
        self._divide(schedule.stays)

    def _divide(self, stays: Sequence[Stay]) -> None:
        """Frees stored values. Adds their loads, which the backward reads, and the bytes of their forms."""
        crossing, loads = {self.value[buffer]: buffer for buffer in self.crossing}, dict[int, int]()
        for stay in stays:
            stored = crossing[stay.value]
            loads[stored] = self._add(stay.value, stay.load, self.last_read[stored], self.bytes[stored])
            self.last_read[stored] = self.least_end[stored] = stay.free
        self.num_values = len(self.value)
        for stay in stays:
            form = self.forms[stay.value]
            whole, store, load = (stay.store, stay.need), (stay.store, stay.free), (stay.load, stay.need)
            sizes = (form.device_bytes, form.store.temporary_bytes, form.load.temporary_bytes)
            for (first, last), size in zip((whole, store, load), sizes, strict=True):
                if size:
                    self._add(stay.value, first, last, size)
        self.in_transfers.update(loads)
        for read in self.reads[self.border :]:
            read[:] = [loads.get(buffer, buffer) for buffer in read]

    def _add(self, value: int, first: int, last: int, size: int) -> int:
        """Adds a buffer that no execution makes, and returns its number."""
        number = len(self.value)
        self.value.append(value)
        self.made.append(first)
        self.least_end.append(last)
        self.last_read.append(last)
        self.bytes.append(size)
        self.held.append(False)
        self.in_transfers.add(number)
        return number

    def marked(self, buffers: Iterable[int]) -> list[bool]:
        """Returns, for each buffer, True if it is among ``buffers``."""
        found = [False] * len(self.value)
        for buffer in buffers:
            found[buffer] = True
        return found

    def made_by(self, position: int) -> range:
        """Returns the buffers that an execution makes."""
        return range(self.begins[position], self.begins[position + 1])


def _given(graph: Graph) -> list[frozenset[int]]:
    """Returns, for each op, its inputs that no op computes, as negative numbers."""
    sources = {number for number, value in enumerate(graph.values) if value.producer is None}
    return [frozenset(-1 - value for value in op.inputs if value in sources) for op in graph.ops]


class _Fusion:
    """The buffers that a code generator that fuses leaves out, and how long it needs the others."""

    def __init__(self, graph: Graph, buffers: _Buffers) -> None:
        self.graph, self.buffers = graph, buffers
        self.kinds = [op.kind for op in buffers.ops]
        self.externs = list(accumulate((kind is Kind.EXTERN for kind in self.kinds), initial=0))
        """The number of extern kernels before each execution."""
        self.readers = Counter(chain.from_iterable(buffers.reads))
        """The number of readers of each buffer that is read."""
        self.fusible = self._fusible()
        """For each buffer, True if it is a pointwise result that no caller, extern kernel or other half needs."""
        self.inlined = self._inlined()
        self.absent = list(self.inlined)
        self.last = list(buffers.least_end)
        """For each buffer, the last execution that makes or reads it. The readers of an absent buffer read its inputs."""
        self._read_late()

    def _fusible(self) -> list[bool]:
        buffers, kinds = self.buffers, self.kinds
        found = [kinds[made] is Kind.POINTWISE and not held for made, held in zip(buffers.made, buffers.held, strict=True)]
        unread = (buffer for buffer in range(len(found)) if buffer not in self.readers)
        by_extern = (buffer for kind, read in zip(kinds, buffers.reads, strict=True) if kind is Kind.EXTERN for buffer in read)
        for buffer in chain(buffers.crossing, unread, by_extern, buffers.in_transfers):
            found[buffer] = False
        return found

    def _inlined(self) -> list[bool]:
        """Returns, for each buffer, True if its readers compute it: a single one, or each a cheap expression of few buffers."""
        buffers, given, most_reads, fusible = self.buffers, self.graph.derived(_given), self.graph.most_reads, self.fusible
        inlined = [False] * len(buffers.value)
        expressions: dict[int, frozenset[int] | None] = {}  # by execution: what it reads; None for too much to compute twice
        for buffer, position in enumerate(buffers.made):
            if not fusible[buffer]:
                continue
            op = buffers.ops[position]
            if position not in expressions:
                reads: set[int] = set()
                cheap = op.inlining is not Inlining.ONCE
                for source in buffers.reads[position]:
                    behind = expressions[buffers.made[source]] if inlined[source] else (source,)
                    cheap = cheap and behind is not None
                    reads.update(behind or ())
                reads.update(given[buffers.sequence[position]])
                expressions[position] = frozenset(reads) if cheap and len(reads) <= most_reads else None
            cheap = expressions[position] is not None
            inlined[buffer] = op.inlining is not Inlining.NEVER and (cheap or self.readers[buffer] == 1)
        return inlined

    def _read_late(self) -> None:
        """Sets ``last``, and ``absent`` for the buffers that one loop makes and reads: without a reduction or an extern kernel.

        From the end, because all readers of a buffer come before its maker then.
        """
        buffers, externs, last, absent, inlined = self.buffers, self.externs, self.last, self.absent, self.inlined
        loop_end, reduced, begins, fusible = list(buffers.made), [False] * len(last), buffers.begins, self.fusible
        for position in range(len(self.kinds) - 1, -1, -1):
            done = done_inlined = position
            reduces = self.kinds[position] is Kind.REDUCTION
            for buffer in range(begins[position], begins[position + 1]):
                if inlined[buffer]:
                    done_inlined, reduces = max(done_inlined, loop_end[buffer]), reduces or reduced[buffer]
                elif fusible[buffer] and not reduced[buffer]:
                    absent[buffer] = externs[loop_end[buffer]] == externs[position]
                if absent[buffer]:
                    done = max(done, last[buffer])
            for buffer in buffers.reads[position]:
                if last[buffer] < done:
                    last[buffer] = done
                if loop_end[buffer] < done_inlined:
                    loop_end[buffer] = done_inlined
                if reduces:
                    reduced[buffer] = True

    def first_and_last(self) -> tuple[list[int], list[int]]:
        """Returns the first and the last execution during which each buffer is live."""
        first, last = list(self.buffers.made), list(self.last)
        if self.graph.fusion_groups_hold_buffers:
            calls = self._calls()
            first, last = [calls[at].start for at in first], [calls[at].stop - 1 for at in last]
        for given, taker in self._passed_on():
            first[taker], last[given] = self.buffers.made[taker], self.last[given] - 1
        return first, last

    def _calls(self) -> list[range]:
        """Returns, for each execution, those of its call: an extern kernel alone, or all between two of them."""
        calls: list[range] = []
        while len(calls) < len(self.kinds):
            start = end = len(calls)
            half = self.buffers.border if start < self.buffers.border else len(self.kinds)
            while end < half and self.kinds[end] is not Kind.EXTERN:
                end += 1
            end = max(end, start + 1)
            calls += [range(start, end)] * (end - start)
        return calls

    def _passed_on(self) -> Iterator[tuple[int, int]]:
        """Yields pairs: a buffer that ends where it is read, and the only result of that execution, which takes it over."""
        buffers, sizes, reduced = self.buffers, self.buffers.bytes, self._reduced_nearby()
        fixed = [held or b in buffers.in_transfers for b, held in enumerate(buffers.held)]
        ending = {self.last[b] for b in range(len(self.last)) if not (self.absent[b] or fixed[b])}
        for position in sorted(ending):
            made = buffers.made_by(position)
            if len(made) != 1 or self.absent[made[0]] or reduced[made[0]]:
                continue
            for buffer in self._read_where_written(position):
                if self.last[buffer] == position and not fixed[buffer] and sizes[buffer] == sizes[made[0]]:
                    if not self.absent[buffer]:
                        yield buffer, made[0]
                    break

    def _reduced_nearby(self) -> list[bool]:
        """Returns, for each buffer, True if a reduction reads it in its half, with no extern kernel between."""
        made, border, externs = self.buffers.made, self.buffers.border, self.externs
        return self.buffers.marked(
            buffer
            for position, kind in enumerate(self.kinds)
            if kind is Kind.REDUCTION
            for buffer in self.buffers.reads[position]
            if (made[buffer] < border) == (position < border) and externs[position] == externs[made[buffer] + 1]
        )

    def _read_where_written(self, position: int) -> Iterator[int]:
        """Yields the buffers that an execution reads at the elements that it writes, also through absent results."""
        buffers, seen = self.buffers, {position}
        pending = self._in_place(position)
        while pending:
            buffer = pending.pop()
            maker = buffers.made[buffer]
            if not self.absent[buffer] or buffers.ops[maker].inlining is Inlining.NEVER:
                yield buffer
            elif maker not in seen:
                seen.add(maker)
                pending += self._in_place(maker)

    def _in_place(self, position: int) -> list[int]:
        """Returns the buffers that an execution itself reads at the elements that it writes; the first input comes last."""
        may, value = self.buffers.ops[position].in_place, self.buffers.value
        return [buffer for buffer in reversed(self.buffers.reads[position]) if value[buffer] in may] if may else []
