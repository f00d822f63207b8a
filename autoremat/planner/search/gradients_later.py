"""Runs gradients that nothing reads, such as those of weights, later, where the ops around them then share a fused kernel.

Autograd traces a weight's gradient before the gradient of the activation function in front of the layer. Both read the
activation's operand, if the activation runs again. The extern kernel between them keeps them in two kernels:

    dx = dy @ w.T                                  dx = dy @ w.T
    x  = gelu(h)               a kernel            x  = gelu(h)               one kernel, which reads h once
    dw = x.T @ dy                                  dh = gelu_backward(dx, h)
    dh = gelu_backward(dx, h)  another kernel      dw = x.T @ dy

A move changes neither what is saved nor what runs. It is made if the peak keeps to its limit, and neither the predicted seconds
(:mod:`autoremat.planner.cost.durations`) nor the cost by which plans are compared rises. With stays, the cost may: a shorter
kernel hides less of a transfer. All moves are tried together first, then the halves of those that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from autoremat.basics.errors import PlanInvalid
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import PASSED_BY_NONE, Kind
from autoremat.planner.graph.returned_gradients import Gradients, returned_gradients
from autoremat.planner.graph.schedule import Schedule, Stay
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planning_result import ROUNDING
from autoremat.planner.search.work_limit import SIMULATION, WorkLimit


def with_gradients_later(
    plan: Plan, limit: WorkLimit, budget: int | None = None, accepts: Callable[[Plan], bool] = bool
) -> Plan:
    """Returns ``plan`` with the moves that cost nothing and that ``accepts`` admits, as far as ``limit`` lets them be tried.

    The peak stays within ``budget`` bytes; None for the peak of ``plan``.
    """
    most = plan.peak_bytes if budget is None else budget
    gradients = list(_dividing(plan.graph, plan.schedule).items())
    moved, best, waiting = Gradients(), plan, [gradients] if gradients else []
    while waiting and not limit.has_passed():
        tried = waiting.pop(0)
        with limit.unit(2 * SIMULATION * len(plan.sequence)):
            found = _moved(plan, moved | dict(tried))
            if found is not None and _is_allowed(found, best, most) and accepts(found):
                best, moved = found, moved | dict(tried)
            elif len(tried) > 1:
                waiting += [tried[: len(tried) // 2], tried[len(tried) // 2 :]]
    return best


def _is_allowed(found: Plan, best: Plan, budget: int) -> bool:
    """Returns True if ``found`` differs from ``best``, is no slower, and keeps to ``budget`` bytes and to the host's."""
    if found.schedule == best.schedule or found.peak_bytes > budget or found.host_bytes > best.host_bytes:
        return False
    is_fast = found.predicted_seconds <= best.predicted_seconds * (1 + ROUNDING)
    return is_fast and found.cost_seconds <= best.cost_seconds * (1 + ROUNDING)


def _moved(plan: Plan, gradients: Gradients) -> Plan | None:
    """Returns ``plan`` with ``gradients`` behind the fusible ops that follow them; None if a stay then breaks a rule."""
    graph, schedule = plan.graph, plan.schedule
    moving = {*gradients, *(cast for casts in gradients.values() for cast in casts)}
    places = list(_sequence(graph, schedule, moving))
    backward = tuple(schedule.backward[place] for place in places)
    stays = tuple(_moved_stays(schedule, places, moving))
    try:
        return Plan.of(graph, Schedule(schedule.forward, backward, stays), plan.label)
    except PlanInvalid:
        return None


def _sequence(graph: Graph, schedule: Schedule, moving: Collection[int]) -> Iterator[int]:
    """Yields the places of the executions of the backward in their new sequence.

    The ops ``moving`` stand before the next op that they do not pass.
    """
    waiting = list[int]()
    for place, index in enumerate(schedule.backward):
        if index in moving:
            waiting.append(place)
            continue
        if _ends_group(graph, index):
            yield from waiting
            waiting.clear()
        yield place
    yield from waiting


def _ends_group(graph: Graph, index: int) -> bool:
    """Returns True if no gradient passes the op: an extern kernel, or one with a trait of ``PASSED_BY_NONE``."""
    op = graph.ops[index]
    return op.kind is Kind.EXTERN or (not op.forward and bool(op.traits & PASSED_BY_NONE))


def _moved_stays(schedule: Schedule, places: Sequence[int], moving: Collection[int]) -> Iterator[Stay]:
    """Yields the stays at the new positions of the executions that do not move. ``places`` is the new sequence of the old ones.

    A stay at an execution that moves keeps its side of the others: a load comes with the next one, the end of a store with the
    one before.
    """
    border, count = len(schedule.forward), len(schedule.backward)
    new = {place: border + number for number, place in enumerate(places) if schedule.backward[place] not in moving}
    before, behind, latest = list[int](), list[int](), border - 1
    for place in range(count):
        latest = new.get(place, latest)
        before.append(latest)
    earliest = border + count - 1
    for place in reversed(range(count)):
        earliest = new.get(place, earliest)
        behind.append(earliest)
    behind.reverse()
    for stay in schedule.stays:
        free = stay.free if stay.free < border else before[stay.free - border]
        yield replace(stay, free=free, load=behind[stay.load - border], need=behind[stay.need - border])


def _dividing(graph: Graph, schedule: Schedule) -> Gradients:
    """Returns the gradients of the backward behind which a fusible op reads what one before them reads or computes."""
    alone = graph.derived(returned_gradients)
    casts = {cast for casts in alone.values() for cast in casts}
    found, passed, touched = Gradients(), list[tuple[int, int]](), dict[int, int]()
    for place, index in enumerate(schedule.backward):
        if index in alone:
            passed.append((place, index))
        elif _ends_group(graph, index):
            passed.clear()
            touched.clear()
        elif index not in casts:
            first = min((touched.get(value, place) for value in graph.computed_inputs[index]), default=place)
            found |= {gradient: alone[gradient] for behind, gradient in passed if first < behind}
            for value in (*graph.computed_inputs[index], *graph.made[index]):
                touched.setdefault(value, place)
    return found
