"""`Graph.from_dag`: graphs from plain lists, of one phase or two, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from strategies import dags

from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import Kind, Role
from autoremat.planner.graph.schedule import Schedule
from autoremat.planner.memory.simulator import simulate

DIAMOND = {"seconds": [1.0, 2.0, 3.0, 4.0], "sizes": [10, 20, 30, 40], "edges": [(0, 1), (0, 2), (1, 3), (2, 3)]}


def test_a_graph_of_one_phase():
    graph = Graph.from_dag(**DIAMOND, outputs=[3, 1, 3], rematerializable=[True, True, False, True])
    assert graph.single_phase
    assert [op.inputs for op in graph.ops] == [(), (0,), (0,), (1, 2)]
    assert [op.outputs for op in graph.ops] == [(0,), (1,), (2,), (3,)]
    assert [op.seconds for op in graph.ops] == DIAMOND["seconds"]
    assert [value.bytes for value in graph.values] == DIAMOND["sizes"]
    assert [op.rematerializable for op in graph.ops] == [True, True, False, True]
    assert (graph.forward_outputs, graph.backward_outputs, graph.must_run) == ((3, 1), (), (0, 1, 2, 3))
    assert {op.kind for op in graph.ops} == {Kind.EXTERN}
    assert {value.role for value in graph.values} == {Role.COMPUTED}
    assert not graph.fuses


def test_a_training_step():
    graph = Graph.from_dag(**DIAMOND, outputs=(3, 1), num_forward=2)
    assert not graph.single_phase
    assert [op.forward for op in graph.ops] == [True, True, False, False]
    assert (graph.forward_outputs, graph.backward_outputs, graph.must_run) == ((1,), (3,), (0, 1))
    assert graph.step_seconds == 10.0


def test_a_forward_of_all_ops_is_one_phase():
    assert Graph.from_dag(**DIAMOND, num_forward=4) == Graph.from_dag(**DIAMOND)
    assert Graph.from_dag([], [], []).single_phase


def test_edges_are_merged_and_may_come_from_arrays():
    edges = np.array([(0, 2), (1, 2), (0, 2)])
    graph = Graph.from_dag(np.ones(3), np.array([1, 2, 3]), edges)
    assert graph.ops[2].inputs == (0, 1)
    assert graph == Graph.from_dag([1.0] * 3, [1, 2, 3], [(1, 2), (0, 2)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [1, 2, 3]}, "sizes has 3 entries, seconds has 4"),
        ({"seconds": [1.0, -2.0, 3.0, 4.0]}, r"seconds\[1\] is -2.0"),
        ({"seconds": [1.0, 2.0, 3.0, math.inf]}, r"seconds\[3\] is inf"),
        ({"sizes": [10, 20, -1, 40]}, r"sizes\[2\] is -1"),
        ({"edges": [(0, 4)]}, r"the edge \(0, 4\) names an op that does not exist"),
        ({"edges": [(0, 1), (3, 2)]}, r"the edge \(3, 2\) does not lead to a later op"),
        ({"outputs": (0, 4)}, "the output 4 is no value"),
        ({"num_forward": 5}, "num_forward=5 is not between 0 and the number of ops, 4"),
    ],
)
def test_what_is_no_graph_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Graph.from_dag(**(DIAMOND | change))


@given(dags())
def test_what_is_made_is_a_graph_in_which_every_op_runs(graph):
    graph.verify()
    assert graph.required_forward == set(range(graph.num_forward))
    assert not set(graph.forward_outputs) & set(graph.backward_outputs)


def test_repetitions_in_a_schedule_of_one_phase_are_counted_and_read():
    """Value 0 is made twice: freed after op 1 and made again for op 3; the output, value 1, stays to the end."""
    graph = Graph.from_dag([1.0] * 4, [8, 1, 4, 1], [(0, 1), (1, 2), (2, 3), (0, 3)], outputs=(1,))
    schedule = Schedule((0, 1, 2, 0, 3), ())
    assert schedule.recomputed(graph) == (0,)
    timeline = simulate(graph, schedule)
    assert timeline.bytes_at.tolist() == [8, 9, 5, 13, 14]
    assert [(c.value, c.start, c.end) for c in timeline.live_ranges] == [(0, 0, 1), (1, 1, 4), (2, 2, 4), (0, 3, 4), (3, 4, 4)]
