"""Slow, simple definition of live bytes to compare with, stays included: moment by moment, by none of the code under test."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Inlining, Kind, Role
from autoremat.planner.graph.schedule import Schedule


@dataclass(frozen=True)
class Buffer:
    """One materialisation of `value` by the execution at `computed_at`, or the one that a transfer has `loaded` before it."""

    value: int
    computed_at: int
    readers: tuple[int, ...]
    to_the_end: bool
    at_least_until: int = 0
    moves: bool = False
    loaded: bool = False


def buffers_of(graph: Graph, schedule: Schedule) -> list[Buffer]:
    """What each execution makes, and each load. A read goes to the latest execution before it that makes the value; in the
    backward, to the load of what the forward has made."""
    sequence, border = schedule.forward + schedule.backward, len(schedule.forward)
    stays = {stay.value: stay for stay in schedule.stays}
    makers = {
        value: [at for at, op in enumerate(sequence) if value in graph.ops[op].outputs] for value in range(len(graph.values))
    }
    found = []
    for value, made in makers.items():
        in_forward = [at for at in made if at < border]
        for at, following in zip(made, [*made[1:], math.inf], strict=False):
            readers = tuple(r for r, op in enumerate(sequence) if at < r <= following and value in graph.ops[op].inputs)
            with_caller = value in graph.forward_outputs and at == in_forward[-1]
            gradient = value in graph.backward_outputs and following == math.inf
            if value not in stays or at != in_forward[-1]:
                found.append(Buffer(value, at, readers, with_caller or gradient))
                continue
            early, late = (tuple(r for r in readers if (r < border) is wanted) for wanted in (True, False))
            found.append(Buffer(value, at, early, False, stays[value].free, True))
            found.append(Buffer(value, stays[value].load, late, False, 0, True, True))
    return found


def bytes_between_halves(graph: Graph, schedule: Schedule) -> int:
    """What a call holds on the device that is between its forward and its backward: outputs, and what the backward reads."""
    border = len(schedule.forward)
    made = [b for b in buffers_of(graph, Schedule(schedule.forward, schedule.backward)) if b.computed_at < border]
    sizes = {b.value: graph.values[b.value].bytes for b in made if b.to_the_end or max(b.readers, default=0) >= border}
    total = 0
    for stay in schedule.stays:
        form = graph.values[stay.value].form(stay.form)
        total += form.device_bytes
        if stay.free < border:
            del sizes[stay.value]
        else:
            total += form.store.temporary_bytes
    return total + sum(sizes.values())


def is_valid(graph: Graph, schedule: Schedule) -> bool:
    """Whether the stays are possible, for executions that are."""
    border = len(schedule.forward)
    plain = [b for b in buffers_of(graph, Schedule(schedule.forward, schedule.backward)) if b.computed_at < border]
    saved = {b.value: b for b in plain if not b.to_the_end and max(b.readers, default=0) >= border}
    for stay in schedule.stays:
        if stay.value not in saved or stay.form not in [form.name for form in graph.values[stay.value].forms]:
            return False
        b = saved[stay.value]
        before, first = [b.computed_at, *(r for r in b.readers if r < border)], min(r for r in b.readers if r >= border)
        stored = range(b.computed_at, stay.free + 1)
        if stay.store not in stored or stay.store >= border or stay.free < max(before):
            return False
        if stay.load not in range(max(border, stay.free + 1), stay.need + 1) or stay.need > first:
            return False
    values = [stay.value for stay in schedule.stays]
    return all(one < following for one, following in zip(values, values[1:], strict=False))


class Fusion:
    """The buffers that a code generator never makes which inlines pointwise chains, by definition.

    It makes results of reductions and extern kernels, what an extern kernel reads, what is saved, and outputs. What has
    several readers it makes if it is computed from more than a few buffers or from something heavy, random numbers in any
    case, unless one loop may hold the maker and all readers: no extern kernel separates them, and none is a reduction.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.sequence, self.start_of_backward = schedule.forward + schedule.backward, len(schedule.forward)
        self.ops, self.most_reads = [graph.ops[op] for op in self.sequence], graph.machine.most_reads
        self.buffers = buffers_of(graph, schedule)
        self.read = {(b.value, reader): b for b in self.buffers for reader in b.readers}
        self.inlined, self.computed_from, self.work_of = cache(self._inlined), cache(self._computed_from), cache(self._work_of)

    def fusible(self, b: Buffer) -> bool:
        last_reader = max(b.readers, default=-1)
        crosses = b.computed_at < self.start_of_backward <= last_reader
        extern = any(self.ops[reader].kind is Kind.EXTERN for reader in b.readers)
        needed = b.to_the_end or extern or crosses or b.moves
        return self.ops[b.computed_at].kind is Kind.POINTWISE and bool(b.readers) and not needed

    def _computed_from(self, execution: int) -> tuple[frozenset[Buffer | int], bool]:
        """The buffers and inputs of the step that an expression reads, and whether there is something heavy in it."""
        op = self.ops[execution]
        found: set[Buffer | int] = set()
        heavy = op.inlining is Inlining.ONCE
        for value in op.inputs:
            b = self.read.get((value, execution))
            if b is not None and self.inlined(b):
                behind, heavy_behind = self.computed_from(b.computed_at)
                found, heavy = found | behind, heavy or heavy_behind
            else:
                found.add(value if b is None else b)
        return frozenset(found), heavy

    def _inlined(self, b: Buffer) -> bool:
        if not self.fusible(b) or self.ops[b.computed_at].inlining is Inlining.NEVER:
            return False
        if len(b.readers) == 1:
            return True
        reads, heavy = self.computed_from(b.computed_at)
        return len(reads) <= self.most_reads and not heavy

    def _work_of(self, execution: int) -> frozenset[int]:
        """The executions at whose time the work of this one is done: its own, and those that compute its inlined results."""
        found = {execution}
        for b in self.buffers:
            if b.computed_at == execution and self.inlined(b):
                found |= {e for reader in b.readers for e in self.work_of(reader)}
        return frozenset(found)

    def in_one_loop(self, b: Buffer) -> bool:
        if not self.fusible(b):
            return False
        loops = {e for reader in b.readers for e in self.work_of(reader)}
        extern = any(op.kind is Kind.EXTERN for op in self.ops[b.computed_at : max(loops)])
        return not extern and not any(self.ops[e].kind is Kind.REDUCTION for e in loops)

    def absent(self) -> set[Buffer]:
        return {b for b in self.buffers if self.inlined(b) or self.in_one_loop(b)}


def in_one_call(graph: Graph, schedule: Schedule, moment: int) -> range:
    """The executions of the one call that runs the execution at `moment`: those around it without an extern kernel."""
    sequence, start_of_backward = schedule.forward + schedule.backward, len(schedule.forward)
    extern = [at for at, op in enumerate(sequence) if graph.ops[op].kind is Kind.EXTERN]
    if not (graph.machine.fuses and graph.machine.fusion_groups_hold_buffers) or moment in extern:
        return range(moment, moment + 1)
    half = range(start_of_backward) if moment < start_of_backward else range(start_of_backward, len(sequence))
    before = [at for at in extern if half.start <= at < moment]
    after = [at for at in extern if moment < at < half.stop]
    return range(max(before, default=half.start - 1) + 1, min(after, default=half.stop))


def by_maker(buffers: list[Buffer]) -> dict[int, list[Buffer]]:
    """The buffers that each execution makes."""
    found: dict[int, list[Buffer]] = {}
    for b in buffers:
        if not b.loaded:
            found.setdefault(b.computed_at, []).append(b)
    return found


def form_bytes(graph: Graph, schedule: Schedule, moment: int) -> int:
    """Bytes on the device that the forms of stays and their transfers take during the execution at `moment`."""
    total = 0
    for stay in schedule.stays:
        form = graph.values[stay.value].form(stay.form)
        store, free, load, need = (in_one_call(graph, schedule, at) for at in (stay.store, stay.free, stay.load, stay.need))
        total += form.device_bytes if store.start <= moment < need.stop else 0
        total += form.store.temporary_bytes if store.start <= moment < free.stop else 0
        total += form.load.temporary_bytes if load.start <= moment < need.stop else 0
    return total


def replay_bytes(graph: Graph, schedule: Schedule) -> list[int]:
    """Bytes alive during each execution, counted moment by moment."""
    sequence = schedule.forward + schedule.backward
    buffers = buffers_of(graph, schedule)
    absent = Fusion(graph, schedule).absent() if graph.machine.fuses else set()
    made_by = by_maker(buffers)

    @cache
    def needed_until(execution: int) -> int:
        """When the last kernel runs that does this execution's work: its own, or that of whoever inlines a result."""
        inlining = [needed_until(r) for b in made_by.get(execution, []) if b in absent for r in b.readers]
        return max([execution, *inlining])

    def last_moment(b: Buffer) -> int:
        return len(sequence) - 1 if b.to_the_end else max([b.computed_at, b.at_least_until, *map(needed_until, b.readers)])

    def read_where_written(moment: int) -> Iterator[Buffer]:
        op = graph.ops[sequence[moment]]
        for value in op.inputs:
            for b in (b for b in buffers if moment in b.readers and b.value == value and value in op.in_place):
                made = b not in absent or graph.ops[sequence[b.computed_at]].inlining is Inlining.NEVER
                yield from [b] if made else read_where_written(b.computed_at)

    kinds = [graph.ops[op].kind for op in sequence]

    def in_one_run(first: int, last: int) -> bool:
        same_half = (first < len(schedule.forward)) == (last < len(schedule.forward))
        return same_half and Kind.EXTERN not in kinds[first + 1 : last]

    overwritten, overwriting = set(), set()
    for moment, op in enumerate(sequence if graph.machine.fuses else ()):
        for result in made_by.get(moment, []) if len(graph.ops[op].outputs) == 1 else []:
            reduced = [r for r in result.readers if kinds[r] is Kind.REDUCTION and in_one_run(moment, r)]
            free = [b for b in read_where_written(moment) if not (b.to_the_end or b.moves)]
            ending = [b for b in free if last_moment(b) == moment]
            same = [b for b in ending if graph.values[b.value].bytes == graph.values[result.value].bytes]
            if same and same[0] not in absent and result not in absent and not reduced:
                overwritten.add(same[0])
                overwriting.add(result)

    def alive(b: Buffer, moment: int) -> bool:
        first = b.computed_at if b in overwriting else in_one_call(graph, schedule, b.computed_at).start
        last = last_moment(b) - 1 if b in overwritten else in_one_call(graph, schedule, last_moment(b)).stop - 1
        return first <= moment <= last

    tangents = sum(value.bytes for value in graph.values if value.role is Role.TANGENT)
    beside = (graph.calls.in_flight - 1) * bytes_between_halves(graph, schedule) + graph.calls.resident_bytes
    return [
        sum(graph.values[b.value].bytes for b in buffers if b not in absent and alive(b, moment))
        + (tangents if moment >= len(schedule.forward) else 0)
        + graph.ops[op].workspace_bytes
        + form_bytes(graph, schedule, moment)
        + beside
        for moment, op in enumerate(sequence)
    ]
