"""Stalls of stays: cases made by hand, and a count second by second; host links of devices by name."""

import math
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.planner.cost.datasheets import DATASHEETS
from autoremat.planner.cost.durations import stalls_of
from autoremat.planner.cost.links import HostLink, assumed_host_link, host_form
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Engine, Form, Transfer
from autoremat.planner.graph.schedule import Schedule, Stay
from autoremat.planner.plans.plan import Plan

TO_HOST, FROM_HOST, COMPUTE, NETWORK = Engine.TO_HOST, Engine.FROM_HOST, Engine.COMPUTE, Engine.NETWORK


def form(store: float, load: float, engines: tuple[Engine, Engine] = (TO_HOST, FROM_HOST)) -> Form:
    return Form("away", Transfer(engines[0], store), Transfer(engines[1], load), host_bytes=1)


def chain(seconds: list[float], forms: dict[int, Form]) -> tuple[Graph, Schedule]:
    """A forward and a backward of as many ops each. The last op but i reads value i."""
    count = len(seconds)
    edges = [(i, i + 1) for i in range(count - 1)] + [(i, count - 1 - i) for i in range(count // 2 - 1)]
    graph = Graph.from_dag(seconds, [1] * count, edges, outputs=(count - 1,), num_forward=count // 2)
    values = tuple(replace(v, forms=(forms[i],) if i in forms else ()) for i, v in enumerate(graph.values))
    return replace(graph, values=values), Schedule(tuple(range(count // 2)), tuple(range(count // 2, count)))


def waits(forms: dict[int, Form], *stays: tuple[int, int, int, int, int], speed: float = 1.0) -> dict[int, float]:
    """The executions that wait, and how long, in 8 executions of one second."""
    graph, schedule = chain([1.0] * 8, forms)
    kept = tuple(Stay(value, "away", *positions) for value, *positions in stays)
    found = stalls_of(graph, replace(schedule, stays=kept), speed)
    return {at: wait for at, wait in enumerate(found) if wait}


def test_a_faster_link_shortens_transfers():
    forms = {0: form(3.0, 3.0)}
    assert waits(forms, (0, 0, 2, 6, 7)) == {2: 1.0, 7: 2.0}
    assert waits(forms, (0, 0, 2, 6, 7), speed=1.5) == {7: 1.0}


def test_a_plan_adds_its_stalls():
    graph, schedule = chain([1.0] * 8, {0: form(3.5, 1.5)})
    without = Plan.of(graph, schedule)
    plan = replace(without, schedule=replace(schedule, stays=(Stay(0, "away", 0, 2, 6, 7),)))
    assert (without.recompute_seconds, without.stall_seconds, without.added_seconds, without.cost_seconds) == (0, 0, 0, 0)
    assert (plan.recompute_seconds, plan.stall_seconds, plan.added_seconds, plan.cost_seconds) == (0.0, 2.0, 2.0, 2.0)
    assert (without.predicted_seconds, plan.predicted_seconds) == (8.0, 10.0)


@st.composite
def stored_chains(draw: st.DrawFn) -> tuple[Graph, Schedule]:
    """Chains of whole seconds with stays."""
    half = draw(st.integers(2, 8))
    seconds = st.integers(0, 6)
    values = sorted(draw(st.sets(st.integers(0, half - 2))))
    engines = st.sampled_from([(TO_HOST, FROM_HOST), (NETWORK, NETWORK), (COMPUTE, FROM_HOST), (COMPUTE, COMPUTE)])
    forms = {value: form(draw(seconds), draw(seconds), draw(engines)) for value in values}
    stays = []
    for value in values:
        store, free = sorted(draw(st.lists(st.integers(value, half - 1), min_size=2, max_size=2)))
        load, need = sorted(draw(st.lists(st.integers(half, 2 * half - 1 - value), min_size=2, max_size=2)))
        stays.append(Stay(value, "away", store, free, load, need))
    graph, schedule = chain([float(draw(seconds)) for _ in range(2 * half)], forms)
    return graph, replace(schedule, stays=tuple(stays))


def program(graph: Graph, schedule: Schedule) -> list[tuple[str, int, Any]]:
    """The steps of the compute stream, as tuples (kind, position, detail)."""
    steps: list[tuple[str, int, Any]] = []

    def move(kind: str, deadline: str, position: int) -> None:
        issued = [stay for stay in schedule.stays if getattr(stay, kind) == position]
        for stay in sorted(issued, key=lambda stay: (getattr(stay, deadline), stay.value)):
            transfer = getattr(graph.values[stay.value].form(stay.form), kind)
            if transfer.engine is COMPUTE:
                steps.extend([("transfer", position, None)] * int(transfer.seconds))
            else:
                steps.append(("issue", position, (transfer.engine, transfer.seconds, (kind, stay.value))))
        for stay in schedule.stays:
            if (
                getattr(stay, deadline) == position
                and getattr(graph.values[stay.value].form(stay.form), kind).engine is not COMPUTE
            ):
                steps.append(("await", position, (kind, stay.value)))

    for position, index in enumerate(schedule.sequence):
        move("load", "need", position)
        steps.extend([("run", position, None)] * int(graph.ops[index].seconds))
        move("store", "free", position)
    return steps


def waits_second_by_second(graph: Graph, schedule: Schedule) -> list[float]:
    """The waits before or after each execution, by running the compute stream and the queues one second at a time."""
    todo, found = deque(program(graph, schedule)), [0.0] * len(schedule.sequence)
    queues: dict[Engine, deque[list[Any]]] = defaultdict(deque)
    ended = set()
    while todo:
        for queue in queues.values():
            while queue and queue[0][0] == 0:
                ended.add(queue.popleft()[1])
        kind, position, detail = todo[0]
        if kind == "issue":
            queues[detail[0]].append([detail[1], detail[2]])
        elif kind != "await" or detail not in ended:  # a second passes
            for queue in filter(None, queues.values()):
                queue[0][0] -= 1
            found[position] += kind != "run"
            if kind == "await":
                continue
        todo.popleft()
    return found


@settings(max_examples=200)
@given(stored_chains())
def test_waits_are_those_of_a_count_second_by_second(case):
    assert stalls_of(*case) == waits_second_by_second(*case)


@pytest.mark.parametrize("device", ["cpu", "mps", "NVIDIA GB10", "Orin", "NVIDIA Thor", "AMD Instinct MI300A"])
def test_a_device_that_shares_the_memory_of_its_host_has_no_link(device):
    assert assumed_host_link(device) is None


def test_every_card_has_a_link_that_is_slower_than_its_memory():
    for name, sheet in DATASHEETS.items():
        link = assumed_host_link(name)
        assert link is not None
        assert 0 < max(link.to_host, link.from_host) < sheet.bandwidth / 4


@pytest.mark.parametrize("impossible", [{"to_host": 0.0}, {"from_host": math.inf}, {"latency_seconds": -1e-6}])
def test_an_impossible_link_is_refused(impossible):
    with pytest.raises(ValueError, match="is no host link"):
        replace(HostLink(1e9, 1e9), **impossible)


def test_a_value_on_the_host_has_the_seconds_of_the_planned_share_of_the_rates():
    form = host_form(1000, HostLink(to_host=100.0, from_host=200.0, latency_seconds=2.0))
    assert (form.name, form.host_bytes, form.device_bytes, form.ranks) == ("host", 1000, 0, ())
    assert (form.store.engine, form.load.engine) == (Engine.TO_HOST, Engine.FROM_HOST)
    assert (form.store.seconds, form.load.seconds) == pytest.approx((12.0 / 0.8, 7.0 / 0.8))
