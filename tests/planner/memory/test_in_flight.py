"""Several calls of a graph in flight: each further one holds what the plan saves, in search, bounds, check and report."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GraphBuilder, chain, graphs

from autoremat import plan as plan_of
from autoremat.basics.errors import OptionsError
from autoremat.planner.exact import annealing, integer_program
from autoremat.planner.exact.interval_model import IntervalModel
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind, Role
from autoremat.planner.multigraph.fronts import point_of
from autoremat.planner.plans.plan import Plan
from autoremat.planner.search.planner import Planner

CALLS = st.integers(1, 5)


def with_calls(graph: Graph, calls: int, resident: int = 0) -> Graph:
    return dataclasses.replace(graph, in_flight=calls, resident_bytes=resident)


def effective_peak(graph: Graph, plan: Plan) -> int:
    """The peak by the formula, from the plan of a single call."""
    alone = Plan.of(with_calls(graph, 1), plan.schedule)
    outputs = sum(graph.values[v].bytes for v in {v for v in graph.forward_outputs if graph.values[v].producer is not None})
    held = point_of(alone).saved_bytes + outputs
    return (graph.in_flight - 1) * held + alone.peak_bytes + graph.resident_bytes


@settings(max_examples=60)
@given(graphs(), CALLS, st.sampled_from([0, 100]), st.sampled_from([0.9, 0.7, 0.5]))
def test_plans_keep_the_sum_of_all_open_calls_within_the_budget(graph, calls, resident, share):
    graph = with_calls(graph, calls, resident)
    planner = Planner(graph)
    budget = int(share * planner.baseline.peak_bytes)
    found = planner.find(budget)
    assert planner.baseline.peak_bytes == effective_peak(graph, planner.baseline)
    assert found.smallest.peak_bytes == effective_peak(graph, found.smallest)
    assert found.lower_bound_bytes <= found.smallest.peak_bytes
    if found.plan is not None:
        found.plan.check()
        assert effective_peak(graph, found.plan) == found.plan.peak_bytes <= budget
        assert found.lower_bound_seconds <= found.plan.cost_seconds * (1 + 1e-6) + 1e-9


def test_a_saved_tensor_whose_buffer_the_backward_reuses_is_held():
    build = GraphBuilder()
    source, tangent = build.source(8), build.source(8, Role.TANGENT)
    saved = build.op([source], 64, kind=Kind.EXTERN)
    output = build.op([saved], 8, kind=Kind.EXTERN)
    inside = build.op([saved], 64, forward=False, kind=Kind.POINTWISE, in_place=(saved,))
    gradient = build.op([inside, tangent], 8, forward=False, kind=Kind.EXTERN)
    graph = build.graph(forward_outputs=(output,), backward_outputs=(gradient,), fuses=True, in_flight=3)
    plan = Planner(graph).baseline
    assert plan.timeline.held_bytes == 72
    assert plan.peak_bytes == effective_peak(graph, plan)


def test_the_bound_is_close_on_a_chain():
    graph = with_calls(chain(40, size=100, saving_seconds_per_byte=0.0, forward_outputs=(40,)), 4)
    planner = Planner(graph)
    for tenths in (9, 7, 5, 3):
        found = planner.find(planner.baseline.peak_bytes * tenths // 10)
        assert found.plan is not None
        assert 0.0 < found.lower_bound_seconds <= found.plan.added_seconds
        assert found.plan.added_seconds <= 1.2 * found.lower_bound_seconds + 3


def test_a_graph_of_one_phase_has_no_calls_in_flight():
    with pytest.raises(ValueError, match="in_flight=2"):
        dataclasses.replace(Graph.from_dag([1.0], [1], []), in_flight=2)
    with pytest.raises(ValueError, match="in_flight=0"):
        with_calls(chain(2), 0)


@pytest.mark.parametrize("fields", [{"fuses": True}, {"in_flight": 2}, {"resident_bytes": 5}], ids=str)
def test_exact_models_leave_graphs_that_are_not_plain(fields):
    plain = chain(10, size=100, forward_outputs=(10,))
    graph = dataclasses.replace(plain, **fields)
    assert (plain.is_plain, graph.is_plain) == (True, False)
    (name, value), budget = *fields.items(), 1
    with pytest.raises(OptionsError, match=f"other calls are open .*{name}={value}.* Use 'auto'"):
        plan_of(graph, memory_budget=0.7, solver="ilp")
    with pytest.raises(ValueError, match="this graph fuses or other calls are open"):
        IntervalModel(graph, 1)
    found = Planner(graph).judge(Planner(graph).baseline, budget)
    assert annealing.improve(graph, budget, 1.0, 0, found, 0.0, math.inf) is found
    assert integer_program.improve(graph, budget, found, 0.0, math.inf) is found
