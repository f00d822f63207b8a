"""Lists the live ranges of a schedule and their readers, as arrays. This is the planner's innermost loop.

A stay divides the live range of its value: it frees the value, and the backward allocates it again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.arrays import Flags, Numbers, arrays_of
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Form
from autoremat.planner.graph.schedule import Schedule, Stay

NOT_COMPUTED = -1
"""Stands for the execution that computes a live range, if the range holds the bytes of a form or of a transfer."""


@dataclass(frozen=True, slots=True)
class LiveRange:
    """One live range of a materialised value: ``bytes`` bytes from execution ``start`` to execution ``end``, both included."""

    value: int
    computed_at: int
    start: int
    end: int
    bytes: int


@dataclass(frozen=True)
class LiveRanges:
    """The materialised live ranges in the sequence of their allocation, as arrays.

    For each one: its value, the execution that computes it, the first and last execution during which it is live, its bytes.

    Behind those that executions compute come those of stays: first the loaded values, computed at their loads, and then the
    bytes of forms and of transfers, computed at ``NOT_COMPUTED``.
    """

    values: Numbers
    computed_at: Numbers
    starts: Numbers
    ends: Numbers
    bytes: Numbers

    def __iter__(self) -> Iterator[LiveRange]:
        columns = (self.values, self.computed_at, self.starts, self.ends, self.bytes)
        return map(LiveRange, *(column.tolist() for column in columns))


class Buffers:
    """All live ranges in the sequence of their allocation, and all reads in the sequence of executions.

    Includes live ranges that fusion does not materialise. Raises ``PlanInvalid`` if an execution reads a value that was not
    computed before, and for a stay that breaks a rule.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph, self.num_forward, self.materialised = graph, len(schedule.forward), schedule.materialised
        self.sequence = np.array(schedule.sequence, dtype=np.int64)
        self.start, self.value = arrays_of(graph).outputs.of(self.sequence)
        self.computed_at, self.num_computed = self.start, len(self.value)
        self.bytes = arrays_of(graph).value_bytes[self.value]
        self.reader, read = arrays_of(graph).inputs.of(self.sequence)
        keys = self._key(self.value, self.start)
        self.order = np.argsort(keys)
        self.keys = keys[self.order]
        self.source = self.newest(read, self.reader)
        """For each read, the live range that is read; ``reader`` is the execution that reads it."""
        if len(missing := np.flatnonzero(self.source < 0)):
            position = int(self.reader[missing[0]])
            reader, value = graph.ops[self.sequence[position]].name, graph.values[read[missing[0]]].name
            raise PlanInvalid(f"execution {position} ({reader}) reads {value}, which was never computed")
        self.last = self.start.copy()
        """For each live range, the last execution that computes or reads it."""
        np.maximum.at(self.last, self.source, self.reader)
        self.kept: Flags = np.zeros(len(self.value), dtype=np.bool_)
        """For each live range, True if it is a forward output or a gradient, which the caller holds."""
        for outputs, end in ((graph.forward_outputs, self.num_forward), (graph.backward_outputs, len(self.sequence))):
            newest = self.newest(np.array(outputs, dtype=np.int64), np.full(len(outputs), end))
            self.kept[newest[newest >= 0]] = True
        self.unshared = self.kept
        """For each live range, True if it is materialised and no result takes its buffer over: it is kept, or has a stay."""
        if schedule.stays:
            _divide(self, schedule)

    @cached_property
    def reads(self) -> list[list[int]]:
        """For each execution, the live ranges that it reads, in the sequence of its op's inputs."""
        source, begins = self.source.tolist(), np.searchsorted(self.reader, np.arange(len(self.sequence) + 1)).tolist()
        return [source[begin:end] for begin, end in pairwise(begins)]

    @property
    def never_inlined(self) -> Flags:
        """For each live range, True if it is a buffer for the code generator, whoever reads it."""
        by_op: Flags = arrays_of(self.graph).never_inlined[self.sequence[self.start]]
        return by_op | np.isin(self.value, self.materialised) if self.materialised else by_op

    def _key(self, values: Numbers, positions: Numbers) -> Numbers:
        """Returns sort keys that ascend with the value, then with the position."""
        return values * (len(self.sequence) + 1) + positions

    def newest(self, values: Numbers, positions: Numbers) -> Numbers:
        """Returns the newest live range of each value before a position, or -1 if there is none."""
        at = np.searchsorted(self.keys, self._key(values, positions)) - 1
        found = np.append(self.order, -1)[at]
        return np.where((found >= 0) & (np.append(self.value, -1)[found] == values), found, -1)

    def ends(self, last: Numbers) -> Numbers:
        """Returns, for each live range, the execution after which it is freed. ``last`` are those that need it last."""
        return np.where(self.kept, len(self.sequence) - 1, last)


def _divide(buffers: Buffers, schedule: Schedule) -> None:
    """Divides the live range of each stored value in two, and adds those of its form and of its transfers.

    The reads of the backward become reads of the second range. Raises ``PlanInvalid`` for a stay that breaks a rule.
    """
    graph, stays, count = buffers.graph, schedule.stays, len(buffers.value)
    forms = [_form(graph, stay) for stay in stays]
    if (values := [stay.value for stay in stays]) != sorted(set(values)):
        raise PlanInvalid(f"the values of the stays do not ascend, each with one stay: {values}")
    stored = buffers.newest(np.array(values, dtype=np.int64), np.full(len(stays), buffers.num_forward))
    stay_of = np.full(count + 1, -1)  # the last one stands for values that the forward never computes
    stay_of[stored] = np.arange(len(stays))
    read = stay_of[buffers.source]
    _check_positions(buffers, schedule, stored, read)
    late = (read >= 0) & (buffers.reader >= buffers.num_forward)
    buffers.source[late] = count + read[late]
    loaded = [(stay.value, stay.load, stay.load, stay.need, graph.values[stay.value].bytes) for stay in stays]
    held = []  # by forms, and by the temporaries of their transfers
    for stay, form in zip(stays, forms, strict=True):
        held.append((stay.value, NOT_COMPUTED, stay.store, stay.need, form.device_bytes))
        held.append((stay.value, NOT_COMPUTED, stay.store, stay.free, form.store.temporary_bytes))
        held.append((stay.value, NOT_COMPUTED, stay.load, stay.need, form.load.temporary_bytes))
    columns = (buffers.value, buffers.computed_at, buffers.start, buffers.last, buffers.bytes)
    added = np.array(loaded + [one for one in held if one[-1]], dtype=np.int64).T
    buffers.value, buffers.computed_at, buffers.start, buffers.last, buffers.bytes = map(np.append, columns, added)
    buffers.last[stored] = [stay.free for stay in stays]
    np.maximum.at(buffers.last, buffers.source[late], buffers.reader[late])
    buffers.kept = np.append(buffers.kept, np.zeros(added.shape[1], dtype=np.bool_))
    buffers.unshared = np.append(buffers.kept[:count], np.ones(added.shape[1], dtype=np.bool_))
    buffers.unshared[stored] = True


def _form(graph: Graph, stay: Stay) -> Form:
    """Returns the form of a stay. Raises ``PlanInvalid`` if there is none, and for the outputs of the step."""
    if not 0 <= stay.value < len(graph.values):
        raise PlanInvalid(f"a stay is that of value {stay.value}, but there are {len(graph.values)} values")
    value = graph.values[stay.value]
    found = next((form for form in value.forms if form.name == stay.form), None)
    if found is None:
        names = ", ".join(form.name for form in value.forms) or "none"
        raise PlanInvalid(f"{value.name} has no form {stay.form!r} for its stay; its forms: {names}")
    if stay.value in (*graph.forward_outputs, *graph.backward_outputs):
        raise PlanInvalid(f"{value.name} has a stay, but it is an output, which the caller holds")
    return found


def _check_positions(buffers: Buffers, schedule: Schedule, stored: Numbers, read: Numbers) -> None:
    """Raises ``PlanInvalid`` unless the positions of each stay ascend, between the reads of both halves.

    ``stored`` are the live ranges that the stays divide. ``read`` is the stay of each read, or -1.
    """
    graph, border, length = buffers.graph, buffers.num_forward, len(buffers.sequence)
    early, late = (read >= 0) & (buffers.reader < border), (read >= 0) & (buffers.reader >= border)
    last, first = np.full(len(stored), -1), np.full(len(stored), length)
    np.maximum.at(last, read[early], buffers.reader[early])
    np.minimum.at(first, read[late], buffers.reader[late])
    made = np.append(buffers.start, length)[stored]
    for stay, computed, last_read, first_read in zip(schedule.stays, *map(np.ndarray.tolist, (made, last, first)), strict=True):
        name = graph.values[stay.value].name
        if computed == length or first_read == length:
            raise PlanInvalid(f"{name} has a stay, but it is not saved for the backward")
        stored = computed <= stay.store < border and max(stay.store, last_read) <= stay.free
        if not (stored and max(stay.free + 1, border) <= stay.load <= stay.need <= first_read):
            raise PlanInvalid(
                f"the positions of {stay} are wrong for {name}: execution {computed} computes it, execution "
                f"{max(computed, last_read)} of the forward uses it last, the backward begins at {border}, and execution "
                f"{first_read} ({graph.ops[schedule.sequence[first_read]].name}) reads it first there"
            )
