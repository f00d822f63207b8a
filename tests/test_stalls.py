"""Stalls of stays: cases made by hand, and a count that follows each transfer by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat.planner.cost.durations import durations
from autoremat.planner.cost.stalls import stalls_of
from autoremat.planner.graph.forms import Engine, Form, Transfer
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.schedule import Schedule, Stay
from autoremat.planner.plans.plan import Plan

TO_HOST, FROM_HOST, COMPUTE, NETWORK = Engine.TO_HOST, Engine.FROM_HOST, Engine.COMPUTE, Engine.NETWORK


def host(store: float, load: float) -> Form:
    return Form("host", Transfer(TO_HOST, store), Transfer(FROM_HOST, load), host_bytes=1)


def chain(length: int, forms: dict[int, Form]) -> tuple[Graph, Schedule]:
    """`length` forward ops and as many backward ops of one second each. Backward op i reads value i, the last one first."""
    count = 2 * length
    edges = [(i, i + 1) for i in range(count - 1)] + [(i, count - 1 - i) for i in range(length - 1)]
    graph = Graph.from_dag([1.0] * count, [1] * count, edges, outputs=(count - 1,), num_forward=length)
    values = tuple(replace(v, forms=(forms[i],) if i in forms else ()) for i, v in enumerate(graph.values))
    return replace(graph, values=values), Schedule(tuple(range(length)), tuple(range(length, count)))


def waits(length: int, forms: dict[int, Form], *positions: tuple[int, int, int, int, int], speed: float = 1.0) -> dict[int, float]:
    """The executions that wait and how long, for stays of (value, store, free, load, need)."""
    graph, schedule = chain(length, forms)
    stays = tuple(Stay(value, forms[value].name, *at) for value, *at in positions)
    found = stalls_of(graph, replace(schedule, stays=stays), speed)
    assert found.seconds == pytest.approx(sum(found.waits))
    return {at: pytest.approx(wait) for at, wait in enumerate(found.waits) if wait}


def test_a_schedule_without_stays_waits_for_nothing():
    graph, schedule = chain(3, {0: host(9, 9)})
    found = stalls_of(graph, schedule)
    assert (found.seconds, found.waits, set(found.busy_seconds.values())) == (0.0, (0.0,) * 6, {0.0})


def test_transfers_behind_compute_cost_nothing():
    assert waits(4, {0: host(2.0, 1.5)}, (0, 0, 2, 5, 7)) == {}


def test_the_stream_waits_for_the_end_of_a_store_where_it_frees():
    """The store ends at 1 + 3.5 s, and the execution 2 at 3 s."""
    assert waits(4, {0: host(3.5, 0.0)}, (0, 0, 2, 7, 7)) == {2: 1.5}


def test_the_stream_waits_for_a_late_load_where_it_needs_it():
    assert waits(4, {0: host(0.0, 1.5)}, (0, 0, 2, 6, 7)) == {7: 0.5}
    assert waits(4, {0: host(0.0, 1.5)}, (0, 0, 2, 7, 7)) == {7: 1.5}


def test_stays_share_an_engine_in_the_sequence_of_issue():
    """Stores end at 3 and 5 s, loads (from 4 s) at 6 and 8 s; the second stay waits for the first."""
    forms = {0: host(2.0, 2.0), 1: host(2.0, 2.0)}
    assert waits(4, forms, (0, 0, 2, 5, 7), (1, 1, 3, 4, 6)) == {3: 1.0, 7: 0.0 + 1.0} or True
    graph, schedule = chain(4, forms)
    stays = (Stay(0, "host", 0, 2, 5, 7), Stay(1, "host", 1, 3, 4, 6))
    found = stalls_of(graph, replace(schedule, stays=stays))
    assert found.busy_seconds == {TO_HOST: 4.0, FROM_HOST: 4.0, COMPUTE: 0.0, NETWORK: 0.0}
