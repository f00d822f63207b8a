"""Graphs to and from networkx, which is also an oracle for what a graph says of its ops."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given
from strategies import dags, graphs

from autoremat.planner.api import plan
from autoremat.planner.graph.graph import Graph


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
