"""Divides the live ranges of stored values: a stay frees its value, and the backward allocates it again."""

from __future__ import annotations

import numpy as np

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.arrays import Numbers
from autoremat.planner.graph.forms import Form
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule, Stay
from autoremat.planner.memory.live_ranges import NOT_COMPUTED, Buffers


def divide(buffers: Buffers, schedule: Schedule) -> None:
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
    held = [one for stay, form in zip(stays, forms, strict=True) for one in _ranges_of_form(stay, form) if one[-1]]
    columns = (buffers.value, buffers.computed_at, buffers.start, buffers.last, buffers.bytes)
    added = np.array(loaded + held, dtype=np.int64).T
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


def _ranges_of_form(stay: Stay, form: Form) -> tuple[tuple[int, int, int, int, int], ...]:
    """Returns the live ranges of a form and of its transfers' temporaries, as rows of the columns of live ranges."""
    return (
        (stay.value, NOT_COMPUTED, stay.store, stay.need, form.device_bytes),
        (stay.value, NOT_COMPUTED, stay.store, stay.free, form.store.temporary_bytes),
        (stay.value, NOT_COMPUTED, stay.load, stay.need, form.load.temporary_bytes),
    )


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
