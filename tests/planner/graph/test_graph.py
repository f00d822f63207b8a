"""Graphs: what they refuse and derive, from plain lists and networkx; schedules from saved sets."""

import math

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import GraphBuilder, chain, dags, graphs, saved_sets

from autoremat.planner.api import plan
from autoremat.planner.constraints.model_structure import Forward
from autoremat.planner.graph.graph import Graph
from autoremat.planner.graph.op import NOT_REMATERIALIZABLE, Kind, Op, Role, Trait, Value
from autoremat.planner.graph.schedule import build_schedule
from autoremat.planner.plans.plan import Plan


def test_a_forward_op_behind_a_backward_op_is_refused():
    values = (Value("x", 1, None), Value("a", 1, 0), Value("b", 1, 1))
    ops = (Op("p", "t", (0,), (1,), forward=False), Op("q", "t", (0,), (2,), forward=True))
    with pytest.raises(ValueError, match="before the backward ops"):
        Graph(ops, values)


@pytest.mark.parametrize("reader", [0, 1])
def test_reading_what_is_not_yet_made_is_refused(reader):
    values = (Value("a", 1, 0), Value("b", 1, 1))
    inputs = ((1,), ()) if reader == 0 else ((), (1,))
    ops = (Op("p", "t", inputs[0], (0,), True), Op("q", "t", inputs[1], (1,), True))
    with pytest.raises(ValueError, match="reads b before it is computed"):
        Graph(ops, values)


def test_a_value_that_names_another_producer_is_refused():
    with pytest.raises(ValueError, match="v is an output of p but names another producer"):
        Graph((Op("p", "t", (), (0,), True),), (Value("v", 1, None),))


def test_every_trait_but_that_of_gathers_forbids_repetition():
    assert {t for t in Trait if t and not t & NOT_REMATERIALIZABLE} == {Trait.GATHER}
    assert Op("p", "t", (), (), True, traits=Trait.GATHER).rematerializable
    assert Op("p", "t", (), (), True).rematerializable


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
    assert not graph.machine.fuses


def test_a_training_step():
    graph = Graph.from_dag(**DIAMOND, outputs=(3, 1), num_forward=2)
    assert not graph.single_phase
    assert [op.forward for op in graph.ops] == [True, True, False, False]
    assert (graph.forward_outputs, graph.backward_outputs, graph.must_run) == ((1,), (3,), (0, 1))
    assert graph.step_seconds == 10.0


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


def test_a_graph_of_named_nodes_is_planned():
    directed = networkx.DiGraph([("load", "norm"), ("norm", "loss"), ("load", "loss")])
    for node, seconds, size in (("loss", 1.0, 8), ("load", 2.0, 64), ("norm", 0.5, 32)):
        directed.add_node(node, seconds=seconds, bytes=size)
    graph = Graph.from_networkx(directed, outputs=[2])
    assert [op.seconds for op in graph.ops] == [2.0, 0.5, 1.0]
    assert [value.bytes for value in graph.values] == [64, 32, 8]
    assert [op.inputs for op in graph.ops] == [(), (0,), (0, 1)]
    assert plan(graph).peak_bytes == 64 + 32 + 8


def test_what_describes_no_graph_is_refused():
    circle = networkx.DiGraph([(0, 1), (1, 0)])
    with pytest.raises(ValueError, match="has a circle"):
        Graph.from_networkx(circle)
    directed = networkx.DiGraph()
    directed.add_node("a", seconds=1.0)
    with pytest.raises(ValueError, match="node 'a' has no seconds or no bytes"):
        Graph.from_networkx(directed)


@given(dags())
def test_a_graph_comes_back(graph):
    again = Graph.from_networkx(graph.to_networkx(), num_forward=graph.num_forward)
    assert [op.seconds for op in again.ops] == [op.seconds for op in graph.ops]
    assert [op.inputs for op in again.ops] == [op.inputs for op in graph.ops]
    assert [value.bytes for value in again.values] == [value.bytes for value in graph.values]


@given(graphs())
def test_networkx_finds_the_same_ancestors_and_readers(graph):
    directed = graph.to_networkx()
    assert networkx.is_directed_acyclic_graph(directed)
    for index in range(len(graph.ops)):
        assert graph.ancestors([index]) == {index, *networkx.ancestors(directed, index)}
        readers = {reader for value in graph.ops[index].outputs for reader in graph.readers[value]}
        assert set(directed.successors(index)) == readers


def test_recomputation_stands_just_before_its_need_and_happens_once():
    graph = chain(4, forward_outputs=(4,))
    second = graph.ops[1].outputs[0]
    schedule = build_schedule(graph, {second})
    # The first backward op reads values 3 and 4: made from value 2. Value 1 is made only for the third.
    assert schedule.backward == (2, 3, 4, 5, 0, 6, 7)
    assert [schedule.sequence[at] for at in schedule.repetitions(graph)] == [2, 3, 0]
    assert schedule.saved(graph) == (second,)


def test_the_values_of_one_op_are_recomputed_together():
    build = GraphBuilder()
    x = build.source(1)
    first = build.op([x], 4, 8)
    out = build.op([first], 1)
    tangent = build.source(1, Role.TANGENT)
    gradient = build.op([first, tangent], 1, forward=False)
    gradient = build.op([first + 1, gradient], 1, forward=False)
    graph = build.graph(forward_outputs=(out,), backward_outputs=(gradient,))
    assert build_schedule(graph, ()).backward == (0, 2, 3)
    # The saved result stays; the other one is made again beside it.
    assert build_schedule(graph, {first}).backward == (2, 0, 3)


@given(st.data())
def test_schedules_are_valid_save_no_more_than_asked_and_recompute_nothing_for_nothing(data):
    """Every execution of a forward op in the backward makes something that is read before it is computed again."""
    graph = data.draw(graphs())
    saved = data.draw(saved_sets(graph))
    schedule = build_schedule(graph, saved)
    Plan.of(graph, schedule).check()
    assert set(schedule.saved(graph)) <= saved
    assert list(schedule.forward) == sorted(set(schedule.forward))
    assert set(schedule.forward) >= graph.required_forward
    for at, index in enumerate(schedule.backward):
        if index >= graph.num_forward:
            continue
        made, rest = set(graph.ops[index].outputs), schedule.backward[at + 1 :]
        until = next((i for i, op in enumerate(rest) if op == index), len(rest))
        read = {v for op in rest[: until + 1] for v in graph.ops[op].inputs} | set(graph.backward_outputs)
        assert made & read, f"execution {at} of {graph.ops[index].name} has no reader"


@given(st.data())
def test_in_one_segment_nothing_is_recomputed_twice(data):
    graph = data.draw(graphs(max_outputs=1))
    schedule = build_schedule(graph, data.draw(saved_sets(graph)))
    again = [op for op in schedule.backward if op < graph.num_forward]
    assert len(again) == len(set(again))


@given(graphs(), st.integers(1, 8))
def test_segments_are_consecutive_and_cover_the_forward(graph, count):
    segments = Forward(graph).segments(count)
    assert [op for segment in segments for op in segment] == list(range(graph.num_forward))
    assert len(segments) <= count


def test_cuts_fall_on_narrow_places():
    build = GraphBuilder()
    stream, narrow = build.source(0), []
    for _ in range(8):
        stream = build.op([build.op([build.op([stream], 1000)], 1000)], 10)
        narrow.append(len(build.ops) - 1)
    build.op([stream], 1, forward=False)
    for count in (2, 4, 8):
        found = Forward(build.graph()).segments(count)
        assert len(found) == count
        assert {segment[-1] for segment in found[:-1]} <= set(narrow)


@pytest.mark.parametrize("length", [16, 36, 64])
def test_segments_give_the_square_root_strategy(length):
    """Chen et al. (2016): a chain of n layers in memory O(sqrt n) at one extra forward."""
    graph = chain(length, forward_outputs=(length,))
    root = round(length**0.5)
    segments = Forward(graph).segments(root)
    schedule = build_schedule(graph, {graph.ops[segment[-1]].outputs[0] for segment in segments[:-1]})
    plan = Plan.of(graph, schedule)
    assert plan.peak_bytes <= 2 * root + 3
    assert len(plan.recomputed) <= length
    assert max(plan.recomputed.count(op) for op in range(length)) == 1
